"""Runs of a plan started, found again, watched, here or under Slurm. No torch."""
