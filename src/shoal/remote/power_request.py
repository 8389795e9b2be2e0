#!/usr/bin/env python3
"""What Slurm starts to power nodes up and down: leaves a note for shoal-elastic.service, and ends.

slurm.conf names it three times, by the links `resume`, `suspend` and `resume-fail`; the name says what is asked. It
runs as Slurm's user with nothing but the standard library, sees no secret, and never waits: the service does the work,
and finds out by itself what was asked where a note got lost.
"""

from __future__ import annotations

import json
import os
import sys
import time

REQUESTS = "/var/lib/shoal/elastic/requests"
VERBS = ("resume", "suspend", "resume-fail")
MAX_REQUEST_BYTES = 16 << 20
"""No list of jobs is longer than this."""


def main(argv: list[str], directory: str = REQUESTS, environ: dict[str, str] | None = None) -> int:
    environ = dict(os.environ) if environ is None else environ
    verb = os.path.basename(argv[0])
    if verb not in VERBS or len(argv) != 2:
        print(f"usage: {'|'.join(VERBS)} HOSTLIST", file=sys.stderr)
        return 2
    write_request(directory, {"verb": verb, "nodes": argv[1], "jobs": jobs_of(environ), "at": time.time()})
    return 0


def jobs_of(environ: dict[str, str]) -> list[dict[str, str]]:
    """Which job waits for which nodes, from the file that Slurm hands to its ResumeProgram."""
    path = environ.get("SLURM_RESUME_FILE")
    if not path:
        return []
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(MAX_REQUEST_BYTES))
        return [
            # 22.05 says `nodes`; later releases tell those to be woken from those that the job has in all.
            {"id": str(job["job_id"]), "nodes": str(job.get("nodes_alloc") or job.get("nodes") or "")}
            for job in told["jobs"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # squeue tells the same a little later


def write_request(directory: str, request: dict[str, object]) -> None:
    """Write the note whole or not at all."""
    name = f"{time.time_ns():020d}-{os.getpid()}"
    hidden = os.path.join(directory, f".{name}")
    with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(request, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(hidden, os.path.join(directory, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
