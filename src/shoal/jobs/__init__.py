"""Jobs: what to run and how, as text for sbatch (pure), and handing it to Slurm."""
