"""Runtime: from a call to a decision to a running candidate, and later checks of that candidate."""
