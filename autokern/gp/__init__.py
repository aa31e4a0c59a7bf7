"""Gaussian processes: likelihood, factors, inverse factors and their growth, lazy covariances."""
