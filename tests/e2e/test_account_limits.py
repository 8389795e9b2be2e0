"""Set and remove every account limit of the spec, on each release of Slurm: sacctmgr's syntax differs."""

from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running

COVERS = "slurm/accounting remote/slurm_accounts.py"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

LIMITS = (
    "max_jobs: 5, max_submit: 9, max_time: 1-00:00:00, max_gpus: 2, max_cpus: 4, max_nodes: 1, "
    "group_jobs: 7, group_gpus: 2, group_cpus: 8, gpu_hours: 100"
)
SPEC = """\
cluster: ac-limits
controller: {provider: sandbox, memory: 1G, image: IMAGE, compute: true, gpus: 2}
"""
ACCOUNTING = """\
accounting:
  accounts:
    lab: {users: [ann, bob], fairshare: 3, qos: [normal, fast], default_qos: fast, description: A lab (of two), LIMITS}
    sub: {parent: lab, users: {cat: {fairshare: 2, default_qos: normal, qos: [normal], LIMITS}, ann: {}}}
  qos:
    fast: {priority: 10, max_gpus_per_user: 1, LIMITS}
    slow: {}
""".replace("LIMITS", LIMITS)
LATER = """\
accounting:
  accounts:
    lab: {users: [ann]}
    sub: {users: [cat]}
  qos:
    fast: {max_time: infinite}
"""
ASSOCIATIONS = "sacctmgr -nP show assoc wopl format=account,user,share,grptres,grpjobs,grptresmins,maxtres,maxjobs,qos"
QOS = "sacctmgr -nP show qos format=name,priority,maxtrespu,maxwall,grptres,maxjobspu,grptresmins"


@pytest.mark.parametrize("image", ["debian12", "debian13"])
def test_limits_are_set_once_and_removed_with_the_spec_entry(tmp_path: Path, image: str) -> None:
    with running(tmp_path, SPEC.replace("IMAGE", image) + ACCOUNTING) as cluster:
        assert_limits_follow_the_spec(cluster)


def assert_limits_follow_the_spec(cluster: Cluster) -> None:
    """The cluster is up with ACCOUNTING as the end of its spec."""
    assert cluster.json("up")["unchanged"]
    assert "fast|10|gres/gpu=1|1-00:00:00|cpu=8,gres/gpu=2|5|gres/gpu=6000" in cluster.on("controller", *QOS.split())
    cluster.edit(ACCOUNTING, LATER)
    assert cluster.json("up")["changed"] == ["controller"]
    assert cluster.json("up")["unchanged"]
    associations = cluster.on("controller", *ASSOCIATIONS.split()).split()
    assert associations[2:] == ["lab||1||||||", "lab|ann|1||||||", "sub||1||||||", "sub|cat|1||||||"]
    assert cluster.on("controller", *QOS.split()).split() == ["normal|0|||||", "fast|0|||||"]
