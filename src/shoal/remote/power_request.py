#!/usr/bin/env python3
"""The program that Slurm starts to power nodes up and down. It writes a request for shoal-elastic.service and ends.

slurm.conf names it three times, by the links `resume`, `suspend` and `resume-fail`; the link's name is the verb. It
runs as Slurm's user, sees no secret and never waits. A lost request only costs time: the service compares states too.
"""

from __future__ import annotations

import json
import os
import sys
import time

REQUESTS = "/var/lib/shoal/elastic/requests"
VERBS = ("resume", "suspend", "resume-fail")
MAX_REQUEST_BYTES = 16 << 20
"""More than the longest list of jobs."""


def main(argv: list[str], directory: str = REQUESTS, environ: dict[str, str] | None = None) -> int:
    environ = dict(os.environ) if environ is None else environ
    verb = os.path.basename(argv[0])
    if verb not in VERBS or len(argv) != 2:
        print(f"usage: {'|'.join(VERBS)} HOSTLIST", file=sys.stderr)
        return 2
    write_request(directory, {"verb": verb, "nodes": argv[1], "jobs": jobs_of(environ), "at": time.time()})
    return 0


def jobs_of(environ: dict[str, str]) -> list[dict[str, str]]:
    """Which job waits for which nodes, from the file that Slurm gives to its ResumeProgram."""
    path = environ.get("SLURM_RESUME_FILE")
    if not path:
        return []
    try:
        with open(path, "rb") as file:
            resume = json.loads(file.read(MAX_REQUEST_BYTES))
        return [
            # 22.05 has only `nodes`; later releases have `nodes_resume`, and `nodes_alloc` with all nodes of the job
            {"id": str(job["job_id"]), "nodes": str(job.get("nodes_alloc") or job.get("nodes") or "")}
            for job in resume["jobs"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # squeue reports the same a little later


def write_request(directory: str, request: dict[str, object]) -> None:
    """Write the request whole or not at all."""
    name = f"{time.time_ns():020d}-{os.getpid()}"
    hidden = os.path.join(directory, f".{name}")
    with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(request, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(hidden, os.path.join(directory, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
