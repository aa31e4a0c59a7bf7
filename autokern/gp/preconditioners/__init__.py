"""Preconditioners of kernel matrices with noise: factors ``S`` with ``S S^T`` near the inverse of the matrix.

Each also approximates the log determinant, differentiable in closed form, so that probes estimate only what is left.
"""
