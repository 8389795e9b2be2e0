"""What a person asks, done on the hosts, returned as a frozen result. Nothing here prints.

`shoal X` is in `X.py`; the other modules hold what several commands share. May import plan, proof, cloud and below;
only cli imports it.
"""
