"""Releases of the libraries: which are installed, and which of their functions are known from tested ones."""
