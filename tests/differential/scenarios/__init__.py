"""Scenarios by theme; importing this fills the table."""

import importlib
import pkgutil

for _theme in pkgutil.iter_modules(__path__):
    importlib.import_module(f"scenarios.{_theme.name}")
