"""Hooks: replacements of the libraries' functions, which pass calls to the dispatcher or to stock."""
