"""Hooks: the places where calls of the libraries are routed to the dispatcher. May import `runtime` and below."""
