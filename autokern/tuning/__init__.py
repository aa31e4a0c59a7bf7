"""Tuning: measure candidates, keep the measurements, predict times, choose."""
