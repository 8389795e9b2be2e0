"""Times commands in turn, round after round, where the user logs in: reads JSON, prints the seconds of each as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time


def main() -> None:
    plan = json.load(sys.stdin)
    times: dict[str, list[float]] = {name: [] for name in plan["commands"]}
    for number in range(-1, plan["rounds"]):  # the first round unpacks images and fills caches
        for name, line in plan["commands"].items():
            start = time.monotonic()
            done = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            seconds = time.monotonic() - start
            if done.returncode != 0:
                sys.exit(f"{name} failed with status {done.returncode}: {done.stdout}{done.stderr}")
            if number >= 0:
                times[name].append(seconds)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
