"""With the hooks installed: calibration and its exam, `compare` of whole programs, `explain` of whole models."""
