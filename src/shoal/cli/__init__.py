"""Arguments to verbs; all printing, progress and --json in one place."""

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `shoal` command."""
    # Loading makes many objects and no garbage; looking for some takes a quarter of the time. Sessions do so again.
    gc.disable()
    if sys.argv[1:2] == ["run"]:
        from shoal.cli.early import begin

        begin(sys.argv[2:])
    from shoal.cli.app import main as app_main

    app_main()
