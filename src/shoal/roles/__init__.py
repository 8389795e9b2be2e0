"""Roles: what each host should be, as documents made from the spec and the facts.

Pure functions, and one `Component` for each part of a cluster beside Slurm; `registry.py` lists them.
May import jobs, slurm, network, storage, tracking, cloud (all but its service), agent, spec, remote and below; plan,
verbs and the rental service import it.
"""
