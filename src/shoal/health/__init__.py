"""What can be wrong with a running cluster: the faults, how each is found, its cause and its fix. Pure.

Begin with `faults.py`, the table, and `diagnosis.py`, which compares it with a cluster.
"""
