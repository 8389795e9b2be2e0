"""Arguments to verbs; all printing, progress and --json in one place."""

import gc

__all__ = ["main"]


def main() -> None:
    """Entry point of the `shoal` command."""
    # Loading makes many objects and no garbage; looking for some takes a quarter of the time. Sessions do so again.
    gc.disable()
    from shoal.cli.app import main as app_main

    app_main()
