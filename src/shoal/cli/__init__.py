"""The command line: reads arguments, calls verbs, and prints what they return.

All printing, progress and --json are here. Imports verbs and the types of the layers below; nothing imports it.
"""

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `shoal` command."""
    # Loading makes no garbage: without collection `shoal run` takes 170 ms less CPU of 770 (median of 20). A session
    # turns it on again.
    gc.disable()
    if sys.argv[1:2] == ["run"]:
        from shoal.verbs.early_login import begin_logins

        begin_logins(sys.argv[2:])
    from shoal.cli.app import main as app_main

    app_main()
