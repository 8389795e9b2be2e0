"""Shoal turns the machines you have into one Slurm cluster and trains on it."""

__version__ = "0.1.0"
