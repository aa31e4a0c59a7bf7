"""Candidates by other people's backends, one file each: XLA, CuPy.

Each file is loaded by an entry point of the group `autokern.candidates`, as those of any other package are (`plugins`);
nothing imports them. A backend itself is imported by the first call of a candidate. Floor 2: may import `ops`.
"""
