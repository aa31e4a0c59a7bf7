"""Candidates that not every machine can run, one file each: KeOps, XLA, CuPy, CUDA graphs, lower precision.

Each file is loaded by an entry point of the group `autokern.candidates`, as those of any other package are (`plugins`);
nothing imports them. A backend itself is imported by the first call of a candidate.
"""
