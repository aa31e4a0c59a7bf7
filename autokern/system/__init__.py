"""System: the machine's memory, threads, files, compilers and devices."""
