"""Log densities and linear systems by preconditioned conjugate gradients, without a factor."""
