"""Preconditioners of kernel matrices with noise: factors ``S`` with ``S S^T`` near the inverse of the matrix.

Each also approximates the log determinant, with closed-form gradients, so that probes estimate only the difference.
"""
