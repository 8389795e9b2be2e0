"""Ends the bill of this RunPod pod, with the key that RunPod gives it. A pod whose first process ends is restarted.

Arguments: the address of the API, and the file with the environment of the first process. Whether the key may do so,
RunPod does not document. Exit status 1: it may not.
"""

import sys
import urllib.request

TIMEOUT_S = 30


def main(base: str, environment: str) -> int:
    with open(environment, encoding="utf-8", errors="replace") as file:
        variables = dict(entry.partition("=")[::2] for entry in file.read().split("\0"))
    pod, key = variables.get("RUNPOD_POD_ID", ""), variables.get("RUNPOD_API_KEY", "")
    if not (pod and key):
        return 1
    request = urllib.request.Request(
        f"{base}/pods/{pod}", method="DELETE", headers={"Authorization": f"Bearer {key}", "User-Agent": "shoal"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # nosec B310: the provider's address
            return 0
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
