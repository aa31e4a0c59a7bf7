"""Models of the libraries: their parts as NumPy arrays, whether these have changed, and functions they rely on."""
