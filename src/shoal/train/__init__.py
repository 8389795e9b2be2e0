"""What a training script imports: torch and the standard library, nothing of the cluster side."""
