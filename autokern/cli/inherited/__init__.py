"""Inherited: what Python runs first in the processes that a program under `autokern run` starts."""
