"""A simulated cloud beside a test's cluster, as `shoal simulate` runs it for anybody; its machines are real hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster
from tests.e2e.leftovers import TAG, noted


@contextmanager
def renting(
    directory: Path, spec: str, kind: str, key: tuple[str, str], *options: str
) -> Iterator[tuple[Cluster, str]]:
    """A cluster that is up and rents from such a cloud, and the cloud's address. The spec says URL for it.

    `key` is the variable that the account's key is in, and the key.
    """
    name = spec.split("cluster:")[1].split()[0]
    with noted(name), _simulated(name, kind, *options) as url:
        cluster = Cluster(directory, spec.replace("URL", url))
        cluster.env[key[0]] = key[1]
        try:
            assert cluster.json("up")["whole"]
            yield cluster, url
        finally:
            cluster.down()


@contextmanager
def _simulated(cluster: str, kind: str, *options: str) -> Iterator[str]:
    line = [sys.executable, "-m", "shoal", "simulate", kind, "--cluster", cluster, "--json", *options]
    env = {**os.environ, TAG: cluster}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env)
    try:
        assert process.stdout is not None
        said = ""
        while not said.rstrip().endswith("}"):
            part = process.stdout.readline()
            assert part, f"shoal simulate ended: {said}"
            said += part
        yield str(json.loads(said)["url"])
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)


def bill(url: str) -> dict[str, Any]:
    """The cloud's own bill."""
    with urllib.request.urlopen(f"{url}/_simulator/bill", timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def balanced(cluster: Cluster, url: str) -> bool:
    """Whether the ledger and the bill agree: a machine may end there a few seconds before its list shows it here."""
    told, asked = cluster.json("cost")["total"], bill(url)
    few_seconds = sum(3 * machine["usd_hour"] / 3600 for machine in asked["machines"])
    return asked["usd"] > 0 and abs(told - asked["usd"]) <= few_seconds
