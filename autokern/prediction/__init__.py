"""Predictions: factors and their growth, lazy covariances, posteriors at a few points."""
