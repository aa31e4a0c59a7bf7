"""Core: problems, ops, candidates, decisions, settings, errors, plugins. Imports nothing of autokern or gpytorch."""
