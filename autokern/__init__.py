"""Placeholder while the package is being built."""
