"""Shares and users on real hosts: the same files and users on all hosts, a killed server, and access rights."""

import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import KIND, LIMIT, ON_DEBIAN_12, SLOWNESS, Cluster, running

COVERS = (
    "storage roles/storage roles/shares roles/users roles/user_ids verbs/shares remote/share_copy.sh "
    "remote/share_removal.sh remote/sftp_proxy.py"
)
pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: st-shares
controller: {{provider: sandbox, memory: 768M}}
nodesets:
  fish: {{provider: sandbox, count: 2, memory: 512M, cgroups: true}}
storage:
  /home: {{kind: nfs}}
  /data: {{kind: nfs, host: fish2, path: /shared/data}}
  /apps: {{kind: sshfs, read_only: true}}
  /scratch: {{kind: stage}}
users:
  alice: {{uid: 2001, groups: [team], keys: ["file:{keys}/alice.pub"]}}
  bob: {{uid: 2002, groups: [team], keys: ["file:{keys}/bob.pub"]}}
"""

WRITER = """\
import os, sys, time
out = os.open("/data/written", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for line in range(150):
    os.write(out, b"%d\\n" % line)
    os.fsync(out)
    with open("/var/tmp/synced", "w") as note:
        note.write(str(line))
    time.sleep(0.05)
"""
"""Notes on the node's own disk which line the share has promised to keep."""


SSH = "ssh -i /etc/shoal/storage/key -o UserKnownHostsFile=/etc/shoal/storage/known_hosts -o BatchMode=yes"
"""As a host goes to another for a share."""
CLIENT = "DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends libnfs-utils"
"""NFS without a kernel's."""


class Lab(Cluster):
    """The cluster with its people."""

    keys: Path

    def login(self, user: str, host: str, script: str) -> subprocess.CompletedProcess[str]:
        """A shell script run by a person who logs in with their own key."""
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes"]
        line = [
            "ssh",
            "-q",
            *options,
            "-i",
            str(self.keys / user),
            f"{user}@{self.instances()[host].address}",
            "bash -s",
        ]
        return subprocess.run(line, input=script, capture_output=True, text=True, timeout=120 * SLOWNESS)

    def says(self, user: str, host: str, script: str) -> str:
        done = self.login(user, host, script)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def shell(self, host: str, script: str) -> str:
        """The same as root."""
        done = self.ssh(host, f"sh -c {shlex.quote(script)}")
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def address(self, host: str) -> str:
        address = self.instances()[host].address
        assert address
        return address


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("shares")
    for user in ("alice", "bob"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / user], check=True, timeout=LIMIT)
    with running(place, SPEC.format(keys=place)) as made:
        made.__class__ = Lab
        assert isinstance(made, Lab)
        made.keys = place
        yield made


def test_users_have_equal_ids_on_all_hosts_and_a_second_up_has_no_changes(lab: Lab) -> None:
    [seen] = {
        lab.on(host, "sh", "-c", "id alice; id bob; getent group team shoal-users")
        for host in ("controller", "fish1", "fish2")
    }
    assert "uid=2001(alice) gid=2001(alice)" in seen and "(team)" in seen
    again = lab.json("up")
    assert again["whole"] and not again["changed"], again


def test_job_of_a_user_on_two_nodes_writes_to_the_home_directory(lab: Lab) -> None:
    work = "srun -N2 sh -c 'echo hello > ~/from.$SLURMD_NODENAME; id -u; stat -c %a:%u ~'"
    output = lab.says("alice", "controller", work)
    assert sorted(output.split()) == ["2001", "2001", "700:2001", "700:2001"]
    for host in ("controller", "fish1", "fish2"):
        # As alice: over kernel NFS root is nobody, who may not look into her home.
        seen = lab.shell(host, "runuser -u alice -- sh -c \"stat -c '%u %g %n' /home/alice/from.*\"").splitlines()
        assert seen == ["2001 2001 /home/alice/from.fish1", "2001 2001 /home/alice/from.fish2"]
    assert lab.login("bob", "controller", "cat /home/alice/from.fish1").returncode != 0
    peek = lab.login("bob", "controller", "srun -w fish1 cat /home/alice/from.fish1")
    assert peek.returncode != 0 and "Permission denied" in peek.stderr


@ON_DEBIAN_12
def test_ssh_to_a_node_needs_a_job_there(lab: Lab) -> None:
    assert lab.login("alice", "fish1", "true").returncode != 0
    lab.says("alice", "controller", "sbatch -w fish1 -o /dev/null --wrap 'sleep 600'")
    lab.wait("her job runs", lambda: lab.says("alice", "controller", "squeue -h -o %T").strip() == "RUNNING")
    assert "/job_" in lab.says("alice", "fish1", "cat /proc/self/cgroup")
    assert lab.login("alice", "fish2", "true").returncode != 0
    assert lab.login("bob", "fish1", "true").returncode != 0
    lab.says("alice", "controller", "scancel -u alice")
    assert lab.login("alice", "controller", "true").returncode == 0


@ON_DEBIAN_12
def test_ssh_from_node_to_node_works_inside_a_job_and_nowhere_else(lab: Lab) -> None:
    """As mpirun does with a list of hosts: no key, no password, no question about a host key."""
    ssh = "ssh -o BatchMode=yes -o PreferredAuthentications=hostbased,publickey"
    hosts = "$(scontrol show hostnames)"
    each = f"for host in {hosts}; do {ssh} $host 'grep -q /job_ /proc/self/cgroup && hostname'; done"
    lab.says("alice", "controller", f"sbatch --wait -N2 -o both.out --wrap {shlex.quote(each)}")
    assert lab.says("alice", "controller", "cat both.out") == "fish1\nfish2\n"
    lab.says("alice", "controller", "sbatch -w fish1 -o /dev/null --wrap 'sleep 600'")
    lab.wait("her job runs", lambda: lab.says("alice", "controller", "squeue -h -o %T").strip() == "RUNNING")
    assert lab.says("alice", "controller", f"{ssh} fish1 hostname") == "fish1\n", "as mpirun does inside salloc"
    for where in ("fish2", "controller", "root@fish2", "bob@fish1"):
        said = lab.login("alice", "fish1", f"{ssh} {where} hostname")
        assert said.returncode == 255, (where, said)
    assert lab.ssh("fish1", f"{ssh} fish2 hostname").returncode == 255, "never for root"
    assert lab.login("bob", "controller", f"{ssh} fish1 hostname").returncode == 255
    lab.says("alice", "controller", "scancel -u alice")


def test_job_continues_and_no_synced_data_is_lost_when_a_server_is_killed(lab: Lab) -> None:
    lab.says("alice", "controller", f"cat > writer.py <<'E'\n{WRITER}\nE")
    job = lab.says("alice", "controller", "sbatch --parsable -w fish1 -o writer.out --wrap 'python3 writer.py'").strip()

    def synced() -> int:
        return int(lab.ssh("fish1", "cat /var/tmp/synced 2> /dev/null").stdout or -1)

    lab.wait("it writes", lambda: synced() >= 20)
    lab.fault("kill", "fish2")
    promised = synced()
    # Nothing that asks about the cluster touches the share.
    assert lab.json("status", timeout=100 * SLOWNESS)["nodes"]
    # What looks at it has an end, although no signal ends who waits in the kernel.
    findings = {
        (finding["host"], finding["what"])
        for finding in lab.json("check", timeout=100 * SLOWNESS, status=1)["findings"]
    }
    assert {("controller", "/data does not answer"), ("fish1", "/data does not answer")} <= findings
    assert "RUNNING" in lab.on("controller", "squeue", "-h", "-o", "%T", "-j", job)
    assert lab.json("up", timeout=300 * SLOWNESS)["created"] == ["fish2"]
    ended = ("scontrol", "show", "job", job)
    lab.wait("it ends", lambda: "JobState=COMPLETED" in lab.on("controller", *ended), 180)
    written = lab.shell("fish2", "cat /data/written").split()
    assert promised >= 20 and written == [str(line) for line in range(150)]
    assert lab.shell("fish1", "cat /data/written").split() == written


def test_staged_share_is_copied_before_a_job_and_back_after_the_job(lab: Lab, tmp_path: Path) -> None:
    lab.shell("controller", "echo 20 > /scratch/number; mkdir -m 1777 /scratch/results")
    work = "import os\nnumber = int(open('/scratch/number').read()) + 1\n"
    work += "open('/scratch/results/' + os.uname().nodename, 'w').write(str(number))"
    (tmp_path / "work.py").write_text(work + "\n")
    lab.shoal("run", "-N2", "--wait", "work.py", cwd=tmp_path)
    assert lab.shell("controller", "cd /scratch/results && head -n1 *").split() == [
        *("==>", "fish1", "<==", "21"),
        *("==>", "fish2", "<==", "21"),
    ]
    refused = lab.ssh("fish1", f"{SSH} shoal-copy@{lab.address('controller')} id 2>&1")
    assert refused.returncode != 0 and "uid=" not in refused.stdout


def test_status_and_check_report_shares(lab: Lab) -> None:
    output = {share["where"]: share for share in lab.json("status")["shares"]}
    assert list(output) == ["/home", "/data", "/apps", "/scratch"]
    assert all(share["free_mb"] > 0 and not share["trouble"] for share in output.values())
    report = [finding["what"] for finding in lab.json("check")["findings"]]
    assert "/data on controller,fish1: mounted over SSH (sshfs)" in report
    assert "/scratch on fish[1-2]: copied before a job and back after it (rsync)" in report


def test_files_written_over_ssh_are_open_to_all_users_on_the_server(lab: Lab) -> None:
    lab.says("alice", "controller", "srun -w fish1 sh -c 'mkdir /data/hers && echo 1 > /data/hers/file'")
    lab.shell("fish2", "runuser -u bob -- sh -c 'echo 2 > /data/hers/file && mv /data/hers/file /data/hers/his'")
    assert lab.says("alice", "controller", "cat /data/hers/his") == "2\n"


FUSE = """\
install -d -o alice /var/tmp/server /var/tmp/hers
printf '#!/bin/sh\\nexec /usr/lib/openssh/sftp-server\\n' > /usr/local/bin/local-sftp
chmod 755 /usr/local/bin/local-sftp
runuser -u alice -- sshfs -o ssh_command=/usr/local/bin/local-sftp here:/var/tmp/server /var/tmp/hers
"""
"""A mount of alice's own. Root cannot look into it."""


def test_operator_fetches_results_that_root_cannot_read(lab: Lab, tmp_path: Path) -> None:
    lab.shell("fish1", FUSE)
    try:
        assert lab.ssh("fish1", "ls /var/tmp/hers").returncode != 0
        # A job cannot start there: slurmstepd changes to its directory with root as the real user.
        work = "cd /var/tmp/hers && mkdir $SLURM_JOB_ID 999 && echo 42 | tee $SLURM_JOB_ID/result > 999/result"
        line = shlex.quote(f"{work} && mkdir -m 0 $SLURM_JOB_ID/closed")
        job = lab.says("alice", "controller", f"sbatch --wait --parsable -w fish1 -D /tmp -o out --wrap {line}").strip()
        # Slurm knows no job 999, and so no owner of its files.
        for number, skipped in ((job, [{"name": "closed", "why": "closed to the job's user"}]), ("999", [])):
            fetched = lab.json("fetch", number, "--directory", "/var/tmp/hers", "--to", str(tmp_path / number))
            assert (tmp_path / number / "result").read_text() == "42\n"
            assert (fetched["skipped"], fetched["failures"]) == (skipped, {})
    finally:
        lab.shell("fish1", "umount -l /var/tmp/hers")


def test_symbolic_links_on_a_share_work_on_every_host(lab: Lab) -> None:
    """An environment's Python is an absolute link, and a cache of models is full of those with `..` in them."""
    lab.shell("fish2", "mkdir -p /data/links/in && cd /data/links && echo found > file && chmod -R a+rX .")
    lab.shell("fish2", "ln -s ../file /data/links/in/relative && ln -s /data/links/file /data/links/absolute")
    for host in ("controller", "fish1", "fish2"):
        assert lab.shell(host, "cat /data/links/in/relative /data/links/absolute") == "found\nfound\n"


def test_up_mounts_a_share_that_was_unmounted_or_lost_its_sshfs(lab: Lab) -> None:
    lab.shell("controller", "umount -l /data")
    lab.shell("fish1", "pkill -KILL -f '[s]hfs.*/data'")
    assert lab.ssh("fish1", "ls /data").returncode != 0
    report = lab.json("up")
    assert report["whole"] and report["changed"] == ["controller", "fish1"]
    for host in ("controller", "fish1"):
        lab.shell(host, "mountpoint -q /data && ls /data")


def test_only_members_read_an_nfs_share_and_their_root_is_squashed(lab: Lab) -> None:
    lab.wait("a client is installed", lambda: lab.ssh("fish1", CLIENT).returncode == 0, 300)
    lab.shell("fish2", "install -d -m 0755 /data/roots; echo theirs > /data/roots/file; echo open > /data/open")
    at = f"nfs://{lab.address('fish2')}/shared/data"
    as_root = "version=4&uid=0&gid=0"
    # The server was started again: until all that knew it before had their say it opens nothing.
    lab.wait("it is open", lambda: lab.ssh("fish1", f"nfs-cat '{at}/open?{as_root}'").stdout == "open\n")
    into = f"echo mine > /tmp/mine; nfs-cp /tmp/mine '{at}/WHERE?{as_root}' 2>&1"
    assert lab.ssh("fish1", into.replace("WHERE", "roots/mine")).returncode != 0
    lab.shell("fish1", into.replace("WHERE", "mine"))
    assert lab.shell("fish2", "stat -c %u /data/mine; ls /data/roots") == "65534\nfile\n"
    # An address that is no member's, with the firewall out of the way.
    server, stranger = lab.address("fish2"), lab.address("fish1").rpartition(".")[0] + ".200"
    device = lab.shell("fish1", f"ip -o route get {server}").split(" dev ")[1].split()[0]
    lab.shell("fish2", "systemctl stop shoal-firewall")
    try:
        lab.shell("fish1", f"ip addr add {stranger}/32 dev {device}; ip route add {server} dev {device} src {stranger}")
        refused = lab.ssh("fish1", f"timeout 60 nfs-cat '{at}/open?{as_root}' 2>&1")
        assert refused.returncode not in (0, 124) and "NFS4ERR" in refused.stdout, refused.stdout
    finally:
        lab.ssh("fish1", f"ip route del {server}; ip addr del {stranger}/32 dev {device}")
        lab.shell("fish2", "systemctl start shoal-firewall")
    assert lab.shell("fish1", f"nfs-cat '{at}/open?{as_root}'") == "open\n"


def test_root_of_a_member_is_not_root_over_ssh_and_gets_no_shell(lab: Lab) -> None:
    lab.shell("fish1", "echo x > /data/by-root")
    assert lab.shell("fish2", "stat -c %U /data/by-root") == "shoal-share\n"
    assert lab.ssh("fish1", "chown root /data/by-root").returncode != 0
    assert lab.ssh("fish1", "touch /data/roots/mine").returncode != 0
    assert lab.ssh("fish1", "touch /apps/mine").returncode != 0
    to = f"shoal-share@{lab.address('fish2')}"
    shell = lab.ssh("fish1", f"{SSH} {to} id 2>&1")
    assert shell.returncode != 0 and "uid=" not in shell.stdout, shell.stdout
    listed = lab.shell("fish1", f"echo 'ls -1 /' | sftp -q -b - {SSH.removeprefix('ssh')} {to}")
    assert "/data" in listed and "/etc" not in listed
    # The key of one host from the address of another.
    stolen = lab.shell("fish1", "cat /etc/shoal/storage/key")
    thief = f"cat > /tmp/key && chmod 600 /tmp/key && ssh -i /tmp/key -o BatchMode=yes -o StrictHostKeyChecking=no {to}"
    assert "Permission denied" in subprocess_input(lab, "controller", f"{thief} 2>&1; rm -f /tmp/key", stolen)


def subprocess_input(lab: Lab, host: str, script: str, stdin: str) -> str:
    target = lab.instances()[host]
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-i", str(target.identity)]
    line = ["ssh", "-q", *options, f"root@{target.address}", script]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120 * SLOWNESS).stdout


def test_ports_of_shares_are_closed_from_outside_the_cluster(lab: Lab) -> None:
    for port in (2049, 111):
        with pytest.raises(OSError):
            socket.create_connection((lab.address("fish2"), port), timeout=3).close()


def test_secrets_of_shares_are_not_readable_by_others(lab: Lab) -> None:
    for host in ("controller", "fish1", "fish2"):
        output = lab.shell(
            host, "find /etc/shoal /etc/ssh/shoal-keys -type f -perm /044 -exec grep -l 'PRIVATE KEY' {} +; true"
        )
        assert output == ""
        if KIND == "vm" and host == "controller":
            continue  # with kernel NFS it goes to no other host over SSH, and has no key
        assert lab.shell(host, "stat -c '%a %U' /etc/shoal/storage/key").split() in (["600", "root"],)


def test_removed_user_is_locked_and_keeps_files_and_can_be_added_again(lab: Lab) -> None:
    lab.says("bob", "controller", "echo kept > kept")
    text = lab.file.read_text()
    waiting = lab.says("bob", "controller", "sbatch --parsable --begin=now+1hour -o /dev/null --wrap true").strip()
    lab.file.write_text(re.sub(r"  bob:.*\n", "", text).replace("  /apps: {kind: sshfs, read_only: true}\n", ""))
    refused = lab.shoal("up", status=1)
    assert f"this change would end jobs ({waiting}); nothing was changed" in refused.stdout + refused.stderr
    assert lab.login("bob", "controller", "true").returncode == 0
    lab.on("controller", "scancel", waiting)
    lab.wait("his job is gone", lambda: not lab.on("controller", "squeue", "-h", "-u", "bob"))
    assert lab.json("up")["whole"]
    assert lab.login("bob", "controller", "true").returncode != 0
    assert lab.shell("controller", "cat /home/bob/kept; stat -c %u /home/bob") == "kept\n2002\n"
    mounts = lab.on("fish1", "cat", "/proc/mounts")
    # Kernel NFS mounts all homes at once; over SSH each user's home is a mount of its own.
    assert f" {'/home' if KIND == 'vm' else '/home/alice'} " in mounts
    assert " /home/bob " not in mounts and " /apps " not in mounts
    lab.file.write_text(text)
    assert lab.json("up")["whole"]
    assert lab.says("bob", "controller", "cat kept") == "kept\n"


def test_shares_are_mounted_again_after_a_reboot(lab: Lab) -> None:
    lab.shell("fish2", "echo there > /data/there")
    lab.shell("controller", "echo there > /home/alice/there")
    lab.fault("reboot", "fish1")
    lab.wait("it is back", lambda: lab.answers("fish1"))
    for place in ("/home/alice/there", "/data/there"):
        lab.wait(
            f"{place} is there",
            lambda place=place: (
                lab.ssh("fish1", f"timeout {20 * SLOWNESS} runuser -u alice -- cat {place}").returncode == 0
            ),
        )
    assert not lab.json("up")["changed"]


TRIXIE = """\
cluster: st-trixie
controller: {{provider: sandbox, memory: 768M, image: debian13}}
nodesets:
  fish: {{provider: sandbox, count: 2, memory: 512M, image: debian13}}
storage:
  /home: {{kind: nfs}}
  /data: {{kind: nfs, host: fish2, path: /shared/data}}
  /scratch: {{kind: stage}}
users:
  alice: {{uid: 2001, groups: [team], keys: ["file:{keys}/alice.pub"]}}
"""


@pytest.mark.matrix
def test_shares_work_on_debian_13(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "alice"], check=True, timeout=LIMIT)
    with running(tmp_path, TRIXIE.format(keys=tmp_path)) as lab:
        lab.__class__ = Lab
        assert isinstance(lab, Lab)
        lab.keys = tmp_path
        test_job_continues_and_no_synced_data_is_lost_when_a_server_is_killed(lab)
        test_staged_share_is_copied_before_a_job_and_back_after_the_job(lab, tmp_path)
        lab.wait("a client is installed", lambda: lab.ssh("fish1", CLIENT).returncode == 0, 300)
        at = f"nfs://{lab.address('fish2')}/shared/data/written?version=4"
        lab.wait("NFS answers", lambda: lab.ssh("fish1", f"nfs-cat '{at}'").stdout.endswith("\n149\n"))
        assert not lab.json("up")["changed"]
