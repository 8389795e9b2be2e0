"""The health program of a node: a systemd timer, or Shoal's supervisor, runs it every few minutes.

It never asks Slurm and never waits for a share or a GPU that hangs. `main.py` writes what it found for two readers:
`shoal doctor`, and `health_hook.sh`, Slurm's HealthCheckProgram, which only reads the result. `host_checks.py`,
`gpu_checks.py` and `leftovers.py` have the checks; `gpu_test.py` tests GPUs when the node joins or returns;
`training.py` finds trainings that hang, and `hung_job.py`, which the hook starts, queues one again. The files know each
other by where they lie.
"""
