"""Jobs: the model of a job (`model.py`), its batch script as text, how its code is sent, and its records and logs.

Functions of text and values; `verbs/run.py` submits. May import slurm, network, storage, environments, tracking, spec,
remote and below; roles, plan, proof and verbs import it.
"""
