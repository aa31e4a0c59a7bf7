"""Kernels of small models in NumPy: parts that evaluate themselves and take their derivatives."""
