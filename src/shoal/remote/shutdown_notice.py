"""Runs when a spot machine shuts down: its provider takes it away, and says so in no other way.

Drains its node if jobs run there, and holds the shutdown until they have saved their work and left: the service warns
them. Arguments: the node, the reason to give, and how many seconds the provider leaves.
"""

import subprocess
import sys
import time

POLL_INTERVAL_S = 1.0
COMMAND_TIMEOUT_S = 10


def output(*command: str) -> "str | None":
    """What a command prints; None if it fails. systemctl fails on purpose while the system stops."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode().strip() if done.returncode == 0 or command[0] == "systemctl" else None


def main(node: str, reason: str, seconds: str) -> None:
    if output("systemctl", "is-system-running") != "stopping":
        return  # this service alone is stopped
    until, is_drained = time.monotonic() + float(seconds), False
    while time.monotonic() < until:
        jobs = output("squeue", "-h", "-o", "%i", "-w", node)
        if jobs == "":
            return
        if jobs and not is_drained:
            is_drained = output("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}") is not None
        time.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
