"""Log densities with gradients: in NumPy, in torch with one matrix, in time linear in the points, by iterations."""
