"""Jobs: the model of a job, its batch script as text, and what Slurm and the nodes know of it."""
