"""The tracking server: what MLflow on a host reads, and how it is asked after its health."""
