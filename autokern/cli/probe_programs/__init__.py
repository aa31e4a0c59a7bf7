"""The program of `probe`; no other module lies beside it, where Python would look for the libraries' imports."""
