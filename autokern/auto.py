"""``import autokern.auto``: enable autokern for the rest of the process, as one line."""

from autokern.hooks.install import enable

enable()
