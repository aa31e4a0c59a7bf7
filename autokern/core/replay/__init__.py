"""Computations of small tensors, recorded once and replayed: their operations, memory, effects and guards."""
