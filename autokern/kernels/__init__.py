"""Covariance formulae, each written once, and the ways to evaluate them.

A family is one file of `families`; importing this package registers them all.
"""

from autokern.kernels import families as _families  # noqa: F401  (each file registers its family)
from autokern.kernels.family import Family, families, family

__all__ = ["Family", "families", "family"]
