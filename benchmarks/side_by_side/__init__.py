"""Launchers side by side on one Slurm cluster: the systems, one trial, and what its step files say."""
