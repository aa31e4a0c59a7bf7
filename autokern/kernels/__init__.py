"""Covariance families, each formula written once, and the ways to evaluate them.

Each file of `families` defines one family or several; importing this package registers them all.
"""

from autokern.kernels import families as _families  # noqa: F401  (each file registers its family)
from autokern.kernels.family import Family, families, family

__all__ = ["Family", "families", "family"]
