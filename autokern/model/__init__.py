"""A model of the libraries: what it consists of, read into arrays, and whether that has changed."""
