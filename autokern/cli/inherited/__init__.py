"""Inherited: start-up code of the Python processes that a program under `autokern run` starts."""
