"""Candidates that some machines cannot run: KeOps, CUDA graphs.

Each file is loaded by an entry point of the group `autokern.candidates`, like the candidates of any other package
(`core.registry`). The first call of a candidate imports its backend.
"""
