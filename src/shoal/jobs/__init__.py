"""Jobs: the model of a job, its batch script as text, and what Slurm and the nodes know of it.

Most of it is pure; `ship.py` and `launchers.py` also run commands on hosts. Imports slurm, storage, hosts and spec.
"""
