"""Arguments to verbs; all printing, progress and --json in one place."""

from shoal.cli.app import main

__all__ = ["main"]
