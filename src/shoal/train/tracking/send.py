"""`python -m shoal.train.tracking.send DIR`: send what a job recorded and could not send itself.

It may run while the job does, and as often as you like: what the server has is not sent again. A job that could not
send everything logs the whole command, for the host where it was submitted: it runs on the job's node.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.train.file_io import read_json_object
from shoal.train.tracking.delivery import Delivery
from shoal.train.tracking.mlflow_client import MlflowClient, ServerUnavailable
from shoal.train.tracking.run_identity import RUN_FILE, SEND_MODULE, from_record

USER_VARIABLES_FILE = "/etc/shoal/mlflow.env"
"""What users of a cluster have in their environment after a login: the address of its server."""


def _client(uri: str, environ: Mapping[str, str] = os.environ) -> MlflowClient:
    """The server's client, with the login of the environment, or with the one that the cluster gave the user."""
    try:
        match = re.search(r"^MLFLOW_TRACKING_URI DEFAULT=(\S+)$", Path(USER_VARIABLES_FILE).read_text(), re.MULTILINE)
    except OSError:
        match = None
    return MlflowClient(uri, {**({"MLFLOW_TRACKING_URI": match[1]} if match else {}), **environ})


def send(directory: Path, uri: str = "") -> int:
    """Send everything in a tracking directory; how many bytes of it. ValueError or ServerUnavailable says why not."""
    record = read_json_object(directory / RUN_FILE)
    if not record:
        raise ValueError(f"{directory} has no {RUN_FILE}: it is not the tracking directory of a job")
    name, job_uri = from_record(record)
    if not (uri or job_uri):
        raise ValueError("the job had no tracking server: name one with --uri")
    create = (directory / "metrics.jsonl").exists()
    delivery = Delivery(_client(uri or job_uri), name, sorted(directory.glob("*.jsonl")), create=create)
    while delivery.deliver():
        pass
    return sum(delivery.acknowledged.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {SEND_MODULE}", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the `tracking` directory of a job")
    parser.add_argument("--uri", default="", help="another server than the job's own")
    options = parser.parse_args(arguments)
    try:
        size = send(options.directory, options.uri)
    except (ValueError, ServerUnavailable, OSError) as error:
        print(f"not sent: {error}", file=sys.stderr)
        return 1
    print(f"the server has all of {options.directory} ({size} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
