"""What several tests share; a package, since `calibration/support.py` would come before a mere folder."""
