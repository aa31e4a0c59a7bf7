"""The version of autokern."""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""Where the version is stated; the package's metadata read it here."""
