"""Covariance families, each formula written once, and the ways to evaluate them.

Importing this package registers all families.
"""

from autokern.kernels import stationary as _stationary  # noqa: F401  (registers them)
from autokern.kernels.family import Family, families, family

__all__ = ["Family", "families", "family"]
