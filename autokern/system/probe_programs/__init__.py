"""Programs that `subprocess_probe` runs in a process of their own, one file each; the last line printed is the answer.

Each file is run by its path. `python -m` runs them too, but imports autokern first, and with it gpytorch and pykeops:
`try_keops` could then not find out why pykeops cannot be imported.
"""
