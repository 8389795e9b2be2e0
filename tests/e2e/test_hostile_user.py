"""A user who attacks: what hosts keep secret, other users and their jobs, root through what root reads and runs.

Each attack runs on the standing cluster, over WireGuard, and by hand (-m matrix) on one under `network: lan`. Beside
each attack is a control: the same with the rights that the attacker lacks, so that an attack which is merely mistyped
does not pass.

Other attacks have tests of their own, below tests/:
    answers of providers and MLflow   unit/providers/test_hostile_answers.py, unit/train/test_hostile_tracking_server.py
    code in a checkpoint (pickle)     unit/train/test_checkpoint_safety.py
    text for the terminal             unit/cli/test_hostile_text.py
    files of a job that root reads    unit/jobs/test_hostile_files.py, unit/jobs/test_job_directory.py
    keys, shares, groups in the file  unit/spec/test_dangerous_values.py
    a neighbour in a LAN (ARP)        unit/verbs/test_check.py: `check` warns; docs/network.md has the remedy
    first key of a rented machine     e2e/test_rented_nodes.py
    another user's runs, environments e2e/test_lab.py, with MLflow itself
"""

import base64
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.cluster import WITH_CGROUPS, Cluster
from tests.e2e.standing import PROVIDER_KEY, Standing, build_lagoon

from shoal.roles import accounting, elastic
from shoal.roles.orphaned_rentals import ACCOUNTS

COVERS = "agent remote roles jobs/staging jobs/delivery storage"
GROUP = "lagoon"
pytestmark = pytest.mark.sandbox

TOKEN = "token-of-alice-0123456789abcdef"
"""What alice gives her job in its environment."""
ALICE = 2004
HOSTS = ("controller", "fish1")
SEPARATOR = "=====end====="
SECRETS = {
    "controller": (
        *("/etc/munge/munge.key", "/etc/shadow", "/etc/ssh/ssh_host_ed25519_key"),
        *(accounting.SLURMDBD_CONF, accounting.PASSWORD, accounting.SQL, accounting.LOGIN),
        *(f"{elastic.STATE}/ledger.db", f"{elastic.KEYS}/acme", ACCOUNTS, elastic.SPEC, elastic.IDENTITY),
        *("/home/alice/notes", "/shared/shoal-jobs/alice/notes"),
    ),
    "fish1": ("/etc/munge/munge.key", "/etc/shadow", "/etc/ssh/ssh_host_ed25519_key", "/home/alice/notes"),
}
PRIVATE_KEY = "/etc/shoal/wireguard.key"
"""Of each host, with WireGuard."""


NOTES = "/home/alice/notes /shared/shoal-jobs/alice/notes"
REMOVED = {
    "controller": f"{NOTES} /shared/data/alice /shared/data/jobs /home/mallory/key*"
    " /tmp/mallory-* /tmp/slurm-*.out /tmp/sent",
    "fish1": "/home/alice/notes /home/alice/held.out /tmp/slurm-*.out /tmp/sent",
    "fish2": "/tmp/slurm-*.out",
}
"""What alice has to lose, and what the attacks leave."""


# In a LAN the same attacks once more; test_storage.py and test_spec_changes.py have its shares and firewall every day.
@pytest.fixture(scope="module", params=["wireguard", pytest.param("lan", marks=pytest.mark.matrix)])
def cluster(request: pytest.FixtureRequest, standing: Standing) -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = (standing if request.param == "wireguard" else build_lagoon(stack, "lan")).cluster
        for host, paths in SECRETS.items():
            for path in paths:
                if path.endswith("/notes"):
                    run_as(made, "alice", f"echo {TOKEN} > {path}; chmod 600 {path}", host)
        yield made
        for user in ("alice", "mallory"):
            made.on("controller", "scancel", f"--user={user}")
        for host, removed in REMOVED.items():
            made.on(host, "sh", "-c", f"rm -rf {removed}")


def network_of(cluster: Cluster) -> str:
    return cluster.file.read_text().split("network: ")[1].split()[0]


def attempt(cluster: Cluster, user: str, script: str, host: str = "controller") -> tuple[int, str]:
    """A shell script that a user runs on a host: its exit status, and what it printed."""
    words = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "env", f"HOME=/home/{user}")
    done = cluster.ssh(host, shlex.join((*words, "bash", "-c", f"cd /tmp; exec 2>&1; {script}")))
    return done.returncode, done.stdout + done.stderr


def attempt_all(
    cluster: Cluster, user: str, scripts: Sequence[str], host: str = "controller"
) -> dict[str, tuple[int, str]]:
    """Scripts that a user runs at the same time, each with its exit status and what it printed."""
    begin = [
        f"(timeout 120 bash -c {shlex.quote(f'set -o pipefail; {script}')} > $d/{n} 2>&1; echo $? > $d/{n}.status) &"
        for n, script in enumerate(scripts)
    ]
    show = f"wait; for n in {{0..{len(scripts) - 1}}}; do cat $d/$n.status $d/$n; printf {SEPARATOR}; done; rm -r $d"
    output = run_as(cluster, user, "d=$(mktemp -d)\n" + "\n".join((*begin, show)), host)
    parts = (part.partition("\n") for part in output.split(SEPARATOR))
    return {script: (int(status), text) for script, (status, _, text) in zip(scripts, parts, strict=False)}


def run_as(cluster: Cluster, user: str, script: str, host: str = "controller") -> str:
    status, output = attempt(cluster, user, script, host)
    assert status == 0, f"{user}@{host}: {script}\n{output}"
    return output


def job_of_alice(cluster: Cluster) -> str:
    """A job of hers that runs on the node, and has one of its two GPUs."""
    jobs = run_as(cluster, "alice", "squeue -h -n held -o %i").split()
    if not jobs:
        hold = shlex.quote("echo own $CUDA_VISIBLE_DEVICES; exec sleep 3600")
        options = "-J held -w fish1 --gpus=1 --mem=50M -o /home/alice/held.out"
        jobs = [run_as(cluster, "alice", f"TOKEN={TOKEN} sbatch --parsable {options} --wrap {hold}").strip()]
    running = f"squeue -h -j {jobs[0]} -o %T"
    cluster.wait("her job runs", lambda: run_as(cluster, "alice", running).strip() == "RUNNING")
    return jobs[0]


# ---- what hosts keep secret


READABLE = 'for path in {}; do head -c 1 "$path" > /dev/null 2>&1 && echo "$path"; done; true'


@pytest.mark.parametrize("host", HOSTS)
def test_secrets_are_for_root_and_their_owner_alone(cluster: Cluster, host: str) -> None:
    paths = [*SECRETS[host], *([PRIVATE_KEY] if network_of(cluster) == "wireguard" else [])]
    script = READABLE.format(" ".join(paths))
    assert cluster.on(host, "sh", "-c", script).split() == paths
    assert run_as(cluster, "mallory", script, host) == ""


def test_no_file_process_or_job_shows_a_secret_to_users(cluster: Cluster) -> None:
    job_of_alice(cluster)
    secrets = [cluster.on("controller", "cat", accounting.PASSWORD).strip(), PROVIDER_KEY, TOKEN]
    words = " ".join(f"-e {secret}" for secret in secrets)
    places = "/etc /run /srv /tmp /home /opt/shoal/wheels /root /var /shared"
    look = f"find {places} -type f -readable -size -200k -exec grep -lF {words} {{}} + 2> /dev/null; true"
    found = cluster.on("controller", "sh", "-c", look).split()
    assert {accounting.PASSWORD, f"{elastic.KEYS}/acme", "/home/alice/notes"} <= {*found}
    for host in HOSTS:
        assert attempt(cluster, "mallory", look, host)[1] == ""
    shown = run_as(cluster, "mallory", "scontrol -dd show job; scontrol show config; sacct -aPo all; ps axeww -o args")
    assert "held" in shown and not any(secret in shown for secret in secrets)


WRITABLE = "find / /run /shared \\( -path /proc -o -path /sys -o -path /dev -o -path /data \\) -prune -o"
SHARE = ("/shared/data", "/srv/shoal-shares/data")
"""The share on its server, and where members that mount it over SSH see it."""
FOR_ALL = ("/tmp", "/var/tmp", "/shared", "/run/lock", "/var/lib/shoal/images", *SHARE)
OWN = ("/home/mallory", "/shared/shoal-jobs/mallory", "/var/lib/shoal/user-jobs/mallory")


@pytest.mark.parametrize("host", HOSTS)
def test_users_can_write_only_to_their_own_directories_and_to_those_for_all(cluster: Cluster, host: str) -> None:
    script = f"{WRITABLE} \\( -type f -o -type d \\) -writable -print 2> /dev/null; true"
    paths = run_as(cluster, "mallory", script, host).split()
    others = {path for path in paths if not path.startswith(tuple(f"{place}/" for place in (*FOR_ALL, *OWN)))}
    assert {"/tmp", "/home/mallory"} <= others <= {*FOR_ALL, *OWN}
    modes = cluster.on(host, "sh", "-c", f"stat -c %a {' '.join(others - {*OWN})}").split()
    assert set(modes) == {"1777"}, "nobody removes what others have there"


DATABASE = (
    *("mariadb -u root -e 'select 1'", "mariadb -u slurm -e 'select 1'", "mariadb -u mysql -e 'select 1'"),
    *("mariadb -h 127.0.0.1 -u root -e 'select 1'", "mariadb -S /run/mysqld/mysqld.sock -u mallory -e 'select 1'"),
)

BECOME_ROOT = ("sudo -n id", "su root -c id < /dev/null", "runuser -u root id", "machinectl shell root@ /usr/bin/id")


def test_neither_the_database_nor_sudo_takes_a_users_word(cluster: Cluster) -> None:
    assert "1" in cluster.on("controller", "mariadb", "-u", "root", "-e", "select 1")
    for script, (status, output) in attempt_all(cluster, "mallory", DATABASE).items():
        assert status != 0 and ("Access denied" in output or "Can't connect" in output), f"{script}: {output}"
    assert cluster.on("controller", "sudo", "-n", "id", "-u") == "0\n"
    for script, (status, output) in attempt_all(cluster, "mallory", BECOME_ROOT).items():
        assert status != 0 and "uid=0" not in output, f"{script}: {output}"


# ---- other users, their jobs, and the cluster


OF_ALICE = (
    *("scontrol update JobId={job} TimeLimit=1:00:00", "scontrol write batch_script {job} - | grep sleep"),
    *("srun --overlap --jobid={job} id", "sbcast --jobid={job} -f /etc/hostname /tmp/sent", "scancel {job}"),
)
"""What only the owner of a job may do, the last one last."""
OF_ROOT = (
    *("scontrol update NodeName=fish1 Comment=mallory", "scontrol update PartitionName=main MaxTime=60"),
    "scontrol create reservation ReservationName=evil StartTime=now Duration=9 Users=mallory Nodes=fish1 Flags=OVERLAP",
    *("sacctmgr -i add account evil", "scontrol setdebug info", "sbatch --uid=alice --wrap id", "scontrol reconfigure"),
)
OF_NO_USER = (
    *("scontrol hold {job}", "scontrol requeue {job}", "scontrol suspend {job}", "scontrol top {job}"),
    *("srun --uid=alice id", "salloc --uid=alice id", "sbatch --uid=0 --wrap id"),
)
UNDO = (
    *("scontrol delete ReservationName=evil", "sacctmgr -i delete account evil"),
    *("scontrol update PartitionName=main MaxTime=UNLIMITED", "scontrol update NodeName=fish1 Comment="),
)


def test_users_can_neither_read_nor_change_jobs_of_others_nor_the_cluster(cluster: Cluster) -> None:
    job = job_of_alice(cluster)
    of_alice = [script.format(job=job) for script in OF_ALICE]
    before = shown_fields(cluster, job)
    attacks = [*of_alice, *OF_ROOT, *(script.format(job=job) for script in OF_NO_USER)]
    for script, (status, output) in attempt_all(cluster, "mallory", attacks).items():
        assert status not in (0, 124), f"{script}\n{output}"
    assert shown_fields(cluster, job) == before
    assert "mallory" not in cluster.on("controller", "scontrol", "show", "node", "fish1")
    run_as(cluster, "alice", "set -e -o pipefail; " + "; ".join(of_alice))
    cluster.on("controller", "bash", "-c", f"set -e; cd /tmp; {'; '.join(OF_ROOT)}")
    cluster.on("controller", "bash", "-c", "; ".join(UNDO))


def shown_fields(cluster: Cluster, job: str) -> set[str]:
    return {word for word in cluster.on("controller", "scontrol", "show", "job", job).split() if "RunTime=" not in word}


GPUS = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done"
HARM = "for pid in $(pgrep -u alice); do cat /proc/$pid/environ; kill -9 $pid; done; cat /home/alice/held.out"


@WITH_CGROUPS
def test_job_reaches_neither_the_gpu_nor_the_processes_of_another_job(cluster: Cluster) -> None:
    job = job_of_alice(cluster)
    srun = "srun -w fish1 --mem=50M"
    own = run_as(cluster, "alice", f"srun --overlap --jobid={job} bash -c '{GPUS}; true'")
    cluster.wait("it has printed", lambda: "own" in cluster.on("fish1", "cat", "/home/alice/held.out"))
    assert "own 0" in cluster.on("fish1", "cat", "/home/alice/held.out") and "open 0" in own
    for options, opened in (("", []), ("--gpus=1", ["open 1"])):
        _, output = attempt(cluster, "mallory", f"{srun} {options} bash -c {shlex.quote(f'{GPUS}; {HARM}; true')}")
        assert [line for line in output.splitlines() if line.startswith("open")] == opened, output
        assert "Operation not permitted" in output and "Permission denied" in output and TOKEN not in output
    assert job_of_alice(cluster) == job


SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20"


@WITH_CGROUPS
def test_ssh_needs_a_job_and_is_for_nobody_else(cluster: Cluster) -> None:
    job_of_alice(cluster)
    assert run_as(cluster, "alice", f"{SSH} fish1 hostname") == "fish1\n"
    key = run_as(cluster, "mallory", "[ -e ~/key ] || ssh-keygen -qN '' -t ed25519 -f ~/key; cat ~/key.pub").strip()
    plant = f"mkdir -p -m 700 ~/.ssh; echo {shlex.quote(key)} > ~/.ssh/authorized_keys"
    # With a job she may enter, with her key or without one, and joins that job: it has no GPU.
    inside = f"{plant}; {SSH} -i ~/key fish1 {shlex.quote(f'hostname; {GPUS}; true')} 2>&1"
    run_as(cluster, "mallory", f"srun -w fish1 --mem=20M bash -c {shlex.quote(plant)}")
    _, output = attempt(cluster, "mallory", f"salloc -Q -w fish1 --mem=20M bash -c {shlex.quote(inside)}")
    assert "fish1\n" in output and "open" not in output, output
    targets = ("fish1", "-i ~/key fish1", "alice@fish1", "-i ~/key alice@fish1", "root@fish1", "root@controller")
    for script, (status, output) in attempt_all(cluster, "mallory", [f"{SSH} {name} id" for name in targets]).items():
        assert status != 0 and "uid=" not in output, f"{script}: {output}"


FORGE = r"""
import os, socket, struct, sys
address, uid, name = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def text(value):
    data = value.encode()
    return struct.pack(">I", len(data)) + data + bytes(-len(data) % 4)

body = struct.pack(">I", 0) + text("forged") + struct.pack(">IIII", uid, uid, 1, uid)
head = struct.pack(">8I", 7, 0, 2, 100003, 4, 1, 1, len(body)) + body + bytes(8)
steps = [struct.pack(">I", 24), *(struct.pack(">I", 15) + text(part) for part in name)]
steps.append(struct.pack(">I16xQI", 25, 0, 4096))
call = head + text("") + struct.pack(">II", 0, len(steps)) + b"".join(steps)
own = ("", 600 + os.getpid() % 400) if os.getuid() == 0 else None
with socket.create_connection((address, 2049), 20, own) as server:
    server.sendall(struct.pack(">I", 0x80000000 | len(call)) + call)
    print(server.recv(65536))
"""
"""Reads a file of an NFS server (version 4.0) in the name of any user, as no kernel would: a forged AUTH_SYS."""


@pytest.mark.parametrize("host", HOSTS)
def test_users_cannot_pose_as_others_to_the_nfs_server(cluster: Cluster, host: str) -> None:
    run_as(cluster, "alice", f"mkdir -p -m 700 /data/alice; echo {TOKEN} > /data/alice/notes")
    program = base64.b64encode(FORGE.encode()).decode()
    server = cluster.on("controller", "getent", "ahostsv4", "controller").split()[0]
    script = f"echo {program} | base64 -d | python3 - {server} {ALICE} shared data alice notes"
    assert TOKEN in cluster.on("fish1", "sh", "-c", script), "root of a member may, from a port that is root's"
    assert TOKEN not in attempt(cluster, "mallory", script, host)[1]


# ---- what root reads and runs


ESCAPE = "\\033]52;c;ZXZpbA==\\a\\302\\2332J"
"""For printf: text for the terminal's clipboard, and U+009B, which begins a sequence that clears the screen."""


FORGED_JOB = "9999"


def test_files_and_names_of_a_job_neither_block_nor_deceive_the_operator(cluster: Cluster) -> None:
    place = f"/tmp/mallory-{network_of(cluster)}"
    forged = f"\\nJobId={FORGED_JOB} JobName=y UserId=alice({ALICE}) JobState=FAILED"
    sbatch = "sbatch --parsable -p desk -w controller"
    submit = f"{sbatch} -J \"$(printf 'evil{ESCAPE}{forged}')\" -D {place} --wrap 'sleep 3600'"
    read_shadow = f"{sbatch} -o /etc/shadow --wrap true"
    shadow, job = run_as(cluster, "mallory", f"mkdir -p {place}; {read_shadow}; {submit} -o {place}/out").split()
    files = (
        f"mkdir {place}/{job} && cd {place}/{job} && mkfifo progress.json rank-0.0.log && ln -s /dev/zero rank-1.0.log"
        f" && ln -s /etc/shadow rank-2.0.log && truncate -s 8G rank-3.0.log"
        f" && printf '1.0 hi{ESCAPE}\\n' > rank-4.0.log"
    )
    run_as(cluster, "mallory", files)
    cluster.wait("the job runs", lambda: job in run_as(cluster, "mallory", "squeue -h -t R -o %i"))
    printed = [cluster.shoal(*words).stdout for words in (("jobs", "--json"), ("logs", "--json", job), ("logs", job))]
    views = {view["record"]["id"]: view for view in json.loads(printed[0])["jobs"]}
    assert views[job]["progress"] == {} and views[job]["record"]["name"].startswith("evil\x1b")
    assert views[job]["record"]["user"] == "mallory" and FORGED_JOB not in views
    lines = json.loads(printed[1])["lines"]
    assert {line["rank"] for line in lines} <= {-1, 3, 4} and "root:" not in str(lines)
    assert "[4] hi" in printed[2] and not {"\x1b", "\x9b", "\a"} & {*"".join(printed)}
    said = cluster.shoal("logs", shadow, status=None)
    assert "root:" not in said.stdout + said.stderr
    run_as(cluster, "mallory", "scancel -u mallory")


EVIL = "#!/bin/sh\nid >> /tmp/owned\necho 3.11\n"
ID = "0123456789abcdef"
SQUATTED = f"""\
set -e
mkdir -p /shared/jobs/code /shared/jobs/lib
printf '{EVIL}' > /shared/jobs/code/x.tar
mkdir -p /data/environments/names /data/environments/{ID}/bin
cd /data/environments/{ID}
printf '{EVIL}' > bin/python
chmod 755 bin/python
echo '{{}}' > shoal-environment.json
echo '{{"name": "torch", "id": "{ID}", "path": "{ID}", "python": "3.11"}}' > ../names/torch.json
"""


def test_directories_made_in_advance_give_nobody_roots_rights(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    run_as(cluster, "mallory", SQUATTED)
    run = ("run", "--wait", "--partition", "desk", "--nodelist", "controller", "--gpus-per-node", "0", "hello.py")
    cluster.shoal(*run)
    said = cluster.shoal("run", "--directory", "/shared/jobs", "hello.py", status=None)
    assert said.returncode != 0 and "/shared/jobs belongs to mallory" in said.stderr
    for command in (("env", "list"), ("run", "--env", "torch", "hello.py")):
        assert re.search("/data/environments(/names)? belongs to mallory", cluster.shoal(*command, status=2).stderr)
    for host in HOSTS:
        assert cluster.on(host, "sh", "-c", "cat /tmp/owned 2> /dev/null; true") == ""
    assert "uid=2003" in run_as(
        cluster, "mallory", f"/data/environments/{ID}/bin/python; cat /tmp/owned; rm /tmp/owned"
    )
    run_as(cluster, "mallory", "rm -r /data/environments /shared/jobs")
    # Nor can mallory take the place of the users' own directories, or of those of root's jobs to come.
    root = f"/var/lib/shoal/jobs/{cluster.name}"
    ahead = (f"mkdir {root}/9999", f"ln -s /tmp/owned {root}/9999.out", f"mv {root} {root}.old")
    swaps = ("mkdir shoal-jobs/eve", "mv shoal-jobs a", "rm -r shoal-jobs/alice", "ln -s /etc shoal-jobs/alice/16.out")
    attacks = [f"cd /shared; {word}" for word in (*ahead, *swaps)]
    for script, (status, output) in attempt_all(cluster, "mallory", attacks).items():
        assert status != 0 and ("denied" in output or "not permitted" in output), f"{script}: {output}"


FORGED = "print('forged')"


def test_code_of_root_does_not_run_from_a_share_that_users_can_write_to(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node mounts it over SSH: there all files belong to the one account of all users."""
    (tmp_path / "hello.py").write_text(f"print('hello from {network_of(cluster)}')\n")
    monkeypatch.chdir(tmp_path)
    run = ("run", "--wait", "--directory", "/data/jobs", "--nodelist", "fish1", "--gpus-per-node", "0", "hello.py")
    for _ in range(2):
        shown = cluster.shoal(*run).stdout
        assert "hello from" in shown and "forged" not in shown
        files = "$(find /data/jobs -type f -writable 2> /dev/null)"
        change = f'for file in {files}; do echo "{FORGED}" > $file; done; true'
        run_as(cluster, "mallory", change, "fish1")
