"""What the user wrote: frozen models, loading with file, line and column, and findings."""
