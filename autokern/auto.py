"""``import autokern.auto``: enable autokern for the rest of the process, as one line.

The import never fails: if autokern cannot be enabled, it warns and stays off, where `autokern.enable` would raise.
"""

import warnings as _warnings

import autokern as _autokern
from autokern.core.errors import AutokernWarning as _AutokernWarning
from autokern.core.errors import caught as _caught

try:
    _autokern.enable()
except _caught(Exception) as _error:
    _warnings.warn(f"autokern stays off: {_error}", _AutokernWarning, stacklevel=2)
