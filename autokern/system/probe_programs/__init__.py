"""Programs that `probes` runs in a process of their own, one file each; the last line printed is the answer.

`probes` runs each file by its path. `python -m` runs them too, but imports autokern first, and with it gpytorch and
pykeops: `try_keops` could then not tell why pykeops cannot be imported.
"""
