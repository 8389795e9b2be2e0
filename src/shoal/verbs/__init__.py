"""The commands of `shoal`, one module each: what a person asks, done on the hosts, returned as a frozen result.

`shoal X` is in `X.py`; the other modules hold what several commands share. They print nothing.
May import every package but cli.
"""
