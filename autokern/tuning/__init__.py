"""Tuning: measure candidates, keep the measurements, predict times, choose. May import `gp` and what that imports."""
