"""The check after each file on a standing cluster: what a test leaves behind is found, of each kind."""

import shlex

import pytest
from tests.e2e.left_behind import grows
from tests.e2e.standing import Standing, differences

COVERS = "tests/e2e/standing.py tests/e2e/left_behind.py"
GROUP = "reef"
pytestmark = pytest.mark.sandbox

LEAVE = {
    "user": ("fish1", "useradd -u 3001 eve", "userdel eve"),
    "mount": ("fish1", "mkdir /mnt/left; mount -t tmpfs tmpfs /mnt/left", "umount /mnt/left; rmdir /mnt/left"),
    "firewall": ("fish1", "nft add table inet left", "nft delete table inet left"),
    "file": ("fish1", "touch /etc/left", "rm /etc/left"),
    "service": ("fish1", "systemd-run --quiet --unit=left sleep 600", "systemctl stop left"),
    "process": ("fish2", "setsid runuser -u alice sleep 4321 &> /dev/null &", "pkill -f 'sleep 432[1]'"),
    "job": ("controller", "sbatch --hold -J left -o /dev/null --wrap true", "scancel -n left"),
    "node": (
        "controller",
        "scontrol update nodename=fish2 state=drain reason=left",
        "scontrol update nodename=fish2 state=resume",
    ),
    "partition": (
        "controller",
        "scontrol update partitionname=main maxtime=7",
        "scontrol update partitionname=main maxtime=unlimited",
    ),
    "reservation": (
        "controller",
        "scontrol create reservation reservationname=left starttime=now+1hour duration=9 users=root nodes=fish1",
        "scontrol delete reservationname=left",
    ),
    "setting": ("controller", "scontrol setdebug debug", "scontrol setdebug info"),
    "account": ("controller", "sacctmgr -i add account left", "sacctmgr -i delete account left"),
}
"""What is left, where, how, and how it is taken away again."""
SHARES = ("fish2", "touch /shared/left", "rm /shared/left")


def shell(standing: Standing, host: str, text: str) -> None:
    done = standing.cluster.ssh(host, shlex.join(("bash", "-c", text)))
    assert done.returncode == 0, done


def test_everything_that_is_left_behind_is_found(standing: Standing) -> None:
    for host, leave, _ in (*LEAVE.values(), SHARES):
        shell(standing, host, leave)
    try:
        found = differences(standing.before, standing.snapshot())
    finally:
        for host, _, undo in (*LEAVE.values(), SHARES):
            shell(standing, host, undo)
    for kind, (host, _, _) in LEAVE.items():
        assert any(line.startswith(f"{host}: {kind} that was not there: ") for line in found), (kind, found)
    assert any("file that was not there: /shared/left" in line for line in found), found
    assert differences(standing.before, standing.snapshot()) == []


def test_change_that_plan_shows_is_found(standing: Standing) -> None:
    """A setting that somebody has taken out of a file that `up` writes."""
    shell(standing, "controller", "cp -p /etc/slurm/slurm.conf /etc/slurm/kept; echo '# left' >> /etc/slurm/slurm.conf")
    try:
        found = differences(standing.before, standing.snapshot())
    finally:
        shell(standing, "controller", "mv /etc/slurm/kept /etc/slurm/slurm.conf")
    assert any(line.startswith("the cluster: plan that was not there: ") for line in found), found


@pytest.mark.parametrize(
    ("path", "may_grow"),
    [
        ("/shared/jobs/17/tree/train.py", True),
        ("/shared/shoal-jobs/alice/17.out", True),
        ("/shared/shoal-jobs/alice/environments/names/mine.json", False),
        ("/shared/shoal-jobs/alice", False),
        ("/home/alice/.cache/pip/x", True),
        ("/home/alice/work/train.py", False),
        ("/usr/local/bin/nsys", False),
    ],
)
def test_only_records_of_jobs_and_caches_may_grow(path: str, may_grow: bool) -> None:
    assert grows(path) is may_grow
