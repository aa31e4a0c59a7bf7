"""``import autokern.auto``: enable autokern for the rest of the process, as one line."""

import warnings as _warnings

from autokern.core.errors import AutokernWarning as _AutokernWarning
from autokern.core.errors import SettingsError as _SettingsError
from autokern.hooks.install import enable as _enable

try:
    _enable()
except _SettingsError as _error:  # an import never fails; `autokern.enable` raises
    _warnings.warn(f"autokern stays off: {_error}", _AutokernWarning, stacklevel=2)
