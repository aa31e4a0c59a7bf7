"""Covariance formulae, each written once, and the ways to evaluate them.

A family is one file of this package; importing the package finds them all. Floor 2: the candidates in `ops` take
formulae from here; nothing here knows of Ops or of decisions.
"""

import importlib
import pkgutil

from autokern.kernels.covariance import Covariance, family_name, recognise, reference, same_points
from autokern.kernels.family import Family, families, family

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Covariance",
    "Family",
    "families",
    "family",
    "family_name",
    "recognise",
    "reference",
    "same_points",
]
