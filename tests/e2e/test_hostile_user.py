"""A user who attacks: with paths of their jobs, with directories made in advance, with what a host has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: st-hostile
controller: {provider: sandbox, memory: 768M, compute: true}
nodesets:
  fish: {provider: sandbox, count: 1, memory: 512M}
users:
  mallory: {uid: 2001}
  alice: {uid: 2002}
"""
SECRETS = ("/etc/munge/munge.key", "/etc/shadow", "/root/.ssh", "/home/alice", "/shared/shoal-jobs/alice")
EVIL = "#!/bin/sh\\nid > /shared/owned\\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("hostile"), SPEC) as made:
        yield made


def as_mallory(cluster: Cluster, script: str, status: int | None = 0) -> str:
    """A shell script that mallory runs on the controller."""
    words = ("setpriv", "--reuid=mallory", "--regid=mallory", "--init-groups", "sh", "-c", f"cd /tmp; {script}")
    done = cluster.ssh("controller", shlex.join(words))
    assert status is None or done.returncode == status, done
    return done.stdout + done.stderr


def test_output_path_of_a_job_shows_root_no_file_of_roots(cluster: Cluster) -> None:
    job = as_mallory(cluster, "sbatch --parsable -o /etc/shadow --wrap true").strip()
    cluster.wait("it has ended", lambda: as_mallory(cluster, f"squeue -h -j {job}", status=None).strip()[:1] in "s")
    said = cluster.shoal("logs", job, status=None)
    assert "root:" not in said.stdout + said.stderr


def test_pipes_and_devices_in_a_job_directory_block_nobody(cluster: Cluster) -> None:
    place = "/tmp/mallory"
    job = as_mallory(
        cluster, f"mkdir -p {place} && sbatch --parsable -w controller -D {place} -o {place}/out --wrap 'sleep 3600'"
    ).strip()
    as_mallory(
        cluster,
        f"mkdir {place}/{job} && cd {place}/{job} && mkfifo progress.json rank-0.0.log && ln -s /dev/zero rank-1.0.log"
        " && ln -s /etc/shadow rank-2.0.log && truncate -s 8G rank-3.0.log",
    )
    cluster.wait("the job runs", lambda: job in as_mallory(cluster, "squeue -h -t R -o %i"))
    [view] = [view for view in cluster.json("jobs")["jobs"] if view["record"]["id"] == job]
    assert view["progress"] == {}
    lines = cluster.json("logs", job)["lines"]
    assert {line["rank"] for line in lines} <= {-1, 3} and "root:" not in str(lines)
    cluster.shoal("cancel", job)


def test_jobs_directory_made_in_advance_gives_nobody_roots_rights(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    as_mallory(cluster, f"mkdir -p /shared/jobs/code /shared/jobs/lib && printf '{EVIL}' > /shared/jobs/code/x.tar")
    begun = cluster.background("run", "--directory", "/shared/jobs", "hello.py", cwd=tmp_path)
    said, _ = begun.communicate(timeout=120)
    assert begun.returncode != 0 and "/shared/jobs belongs to mallory" in said
    assert "No such file" in cluster.ssh("controller", "ls /shared/owned").stderr
    # Nor can mallory take the place of the users' own directories.
    for script in ("mkdir shoal-jobs/eve", "mv shoal-jobs old", "rm -r shoal-jobs/alice"):
        assert any(
            text in as_mallory(cluster, f"cd /shared; {script}", status=1) for text in ("denied", "not permitted")
        )


def test_secrets_and_other_users_are_out_of_reach(cluster: Cluster) -> None:
    for path in SECRETS:
        assert "Permission denied" in as_mallory(cluster, f"cat {path} || ls {path}", status=None), path
    assert "root" not in as_mallory(cluster, "sudo -n id 2>&1 || true")
    assert "only permitted by root" in as_mallory(cluster, "sbatch --uid=0 --wrap id", status=None)
    job = cluster.on("controller", "sbatch", "--parsable", "--chdir=/tmp", "--wrap", "sleep 3600").strip()
    assert "denied" in as_mallory(cluster, f"scancel {job} 2>&1", status=None)
    assert job in as_mallory(cluster, "squeue -h -o %i")
    cluster.shoal("cancel", job)
