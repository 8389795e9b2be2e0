"""Slurm's own words: versions, hostlists, configuration as pure functions, and the answers of its commands."""
