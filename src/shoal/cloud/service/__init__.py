"""shoal-elastic.service: rents machines when Slurm resumes nodes, makes them nodes, and deletes them when idle.

`service` runs the steps; `provision`, `boot`, `join`, `reconcile` and `release` are what a step does. It may import all
layers up to `plan`; `shoal.elastic` is its entry point.
"""
