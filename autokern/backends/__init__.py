"""Candidates that some machines cannot run (KeOps, CUDA graphs), by entry points as those of any other package."""
