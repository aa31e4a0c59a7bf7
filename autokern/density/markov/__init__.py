"""Log densities of one-dimensional Matérn processes, which are Markov chains, in linear time."""
