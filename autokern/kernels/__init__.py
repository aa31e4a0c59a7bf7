"""Covariance formulae, each written once, and the ways to evaluate them.

A family is one file of this package; importing the package finds them all. Floor 2: the candidates in `ops` take
formulae from here; nothing here knows of Ops or of decisions.
"""

from autokern.kernels import families as _families  # noqa: F401  (each file registers its family)
from autokern.kernels.covariance import Covariance, family_name, recognise, reference, same_points
from autokern.kernels.family import Family, families, family

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
