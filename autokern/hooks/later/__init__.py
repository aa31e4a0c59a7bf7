"""Hooks that are declared once their library is imported."""
