"""Programs that `doctor` runs in processes of their own, like those of `autokern.system.probe_programs`."""
