"""Programs that `doctor` runs in a process of their own, as those of `autokern.system.probe_programs`."""
