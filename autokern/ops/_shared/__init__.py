"""Serves several ops: candidates, problems and their samples, costs and error bounds."""
