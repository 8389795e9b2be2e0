"""How a host is reached: one narrow interface (`api.py`), over SSH or on this machine, and many hosts at once.

What `ssh` says of a failure becomes an error of Shoal's in `ssh_errors.py`. The fake for tests is in shoal_simulators.
May import spec, remote, registry and errors.
"""
