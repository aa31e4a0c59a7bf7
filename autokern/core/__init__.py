"""Core: problems, ops, candidates, decisions, settings, errors, plugins, releases. Imports no gpytorch."""
