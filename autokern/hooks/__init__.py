"""Hooks: the places where calls of gpytorch and linear_operator are routed to the dispatcher."""
