"""Slurm: the text of its configuration files, what its releases support, and the output of its commands.

Pure functions: text in, values out. Nothing here connects to a host.
May import spec, agent (facts and unit text), remote and the modules below; roles, plan and verbs import it.
"""
