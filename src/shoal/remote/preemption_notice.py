"""Waits until the provider announces that it takes this machine away, and drains its node: the service warns its jobs.

Arguments: the address where the provider announces it, the node, and the reason to give.
"""

import subprocess
import sys
import time
import urllib.request

POLL_INTERVAL_S = 1.0
WAIT_S = 60


def is_announced(url: str) -> bool:
    """Whether the provider takes the machine away. The answer comes when that changes, or after WAIT_S."""
    request = urllib.request.Request(
        f"{url}?wait_for_change=true&timeout_sec={WAIT_S}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S + 30) as answer:  # nosec B310: the provider's
            return bool(answer.read(16).strip() == b"TRUE")
    except OSError:
        return False


def main(url: str, node: str, reason: str) -> None:
    while not is_announced(url):
        time.sleep(POLL_INTERVAL_S)
    command = ["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"]
    while subprocess.run(command, check=False).returncode:
        time.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
