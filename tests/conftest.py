"""Hypothesis without clocks or dice: a busy machine is no failure, and every run is the same."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")
