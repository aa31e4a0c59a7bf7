"""Candidates that not every machine can run: KeOps, XLA, CuPy, CUDA graphs, lower precision.

Each file is loaded by an entry point of the group `autokern.candidates`, like the candidates of any other package
(`core.plugins`). The first call of a candidate imports its backend.
"""
