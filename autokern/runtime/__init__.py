"""Runtime: from a call to a decision to the run, and checks of what runs."""
