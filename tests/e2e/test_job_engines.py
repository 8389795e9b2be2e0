"""Docker and podman inside jobs: what works, and attempts to get out of the job. The tests run in this order."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, login_keys, running

from shoal.remote.docker_guard import SOCKET
from shoal.roles.job_engines import ACCOUNT, JOBS, NETWORK, PACKAGE, PODMAN_STORE, STORE, UNIT
from shoal.slurm.conf import EPILOG

COVERS = "roles/job_engines remote/docker_guard remote/docker_daemon.sh remote/docker_runtime.py"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]  # hosts install Docker and podman

SPEC = """\
cluster: st-engines
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 1, memory: 3G, cgroups: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"], docker: true}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"], docker: true}
  eve: {uid: 2003, keys: ["file:KEYS/eve.pub"]}
containers: {engine: oci, podman: true, docker: true}
"""
PROGRAMS = "sh sleep cat id ls cp chmod touch head tail"
MAKE_ROOT = f"""\
rm -rf /run/root; mkdir -p /run/root/bin /run/root/tmp; chmod 1777 /run/root/tmp; cd /run/root
for program in {PROGRAMS}; do
    file=$(readlink -f "$(command -v $program)"); cp -L "$file" bin/$program
    ldd "$file" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p ".$(dirname "$library")"; cp -L "$library" ".$library"
    done
done
tar -cf /shared/mini.tar .; chmod 644 /shared/mini.tar
python3 -c '
import tarfile
zero = tarfile.TarInfo("devices/zero")
zero.type, zero.devmajor, zero.devminor, zero.mode = tarfile.CHRTYPE, 1, 5, 0o666
with tarfile.open("/shared/mini.tar", "a") as archive: archive.addfile(zero)
'
"""
OPEN_GROUPS = "for name in cpu cpuacct blkio; do mount -o remount,bind,rw /sys/fs/cgroup/$name; done"
"""Docker uses these groups, too; the sandbox makes the others writable."""
MIRROR = "https://mirror.invalid/"
SETTINGS = {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "x"}}, "registry-mirrors": [MIRROR]}
WRITE_SETTINGS = f"mkdir -p /etc/docker && echo {shlex.quote(json.dumps(SETTINGS))} > /etc/docker/daemon.json"
FORWARD = "/proc/sys/net/ipv4/ip_forward"
REUSE = f"""\
import os, socket, sys, time
sys.path.insert(0, {PACKAGE.rpartition("/")[0]!r})
from docker_guard.caller import Peer, Rejection
server = socket.socket(socket.AF_UNIX); server.bind("/run/reuse.sock"); server.listen()
def connect():
    client = socket.socket(socket.AF_UNIX); client.connect("/run/reuse.sock"); return client
group = "/sys/fs/cgroup/freezer/slurm_n1/uid_0/job_99"
os.makedirs(group, exist_ok=True)
keep, give = socket.socketpair()
first = os.fork()
if not first:  # connects, hands its connection to its parent, and ends
    client = connect(); socket.send_fds(give, [b"x"], [client.fileno()]); os._exit(0)
_, [client], _, _ = socket.recv_fds(keep, 1, 1)
accepted, _ = server.accept()
os.waitpid(first, 0)
for _ in range(200):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file: file.write(str(first - 1))
    second = os.fork()
    if not second:
        open(group + "/cgroup.procs", "w").write("0"); time.sleep(60); os._exit(0)
    time.sleep(0.2)
    if second == first: break
    os.kill(second, 9); os.waitpid(second, 0)
assert second == first, "the number was not used again"
try: print("taken for job", Peer(accepted).caller().job)
except Rejection as error: print("rejected:", error)
os.kill(second, 9); os.waitpid(second, 0)
own = connect(); accepted, _ = server.accept()
open(group + "/cgroup.procs", "w").write("0")
print("its own job:", Peer(accepted).caller().job)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann", "bob", "eve") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("engines"), text) as made:
            made.on("n1", "sh", "-c", MAKE_ROOT + OPEN_GROUPS)
            made.on("n1", "sh", "-c", WRITE_SETTINGS)
            made.on("n1", "sh", "-c", f"echo 0 > {FORWARD}")  # as on a new machine
            yield made


def do(cluster: Cluster, command: str, user: str = "ann", status: int | None = 0, host: str = "controller") -> str:
    done = cluster.ssh(host, shlex.join(("runuser", "-l", user, "-c", command)))
    assert status is None or done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def job(cluster: Cluster, command: str, user: str = "ann", status: int | None = 0) -> str:
    """What a command in a job prints, without what srun says when it waits."""
    return do(cluster, f"srun -Q -n1 sh -c {shlex.quote(command)}", user, status)


def start(cluster: Cluster, command: str, user: str = "ann") -> str:
    """The number of a job that goes on; it has run the command."""
    where = f"/shared/{user}.out"
    script = f"#!/bin/sh\n{command}\necho ready\nsleep 600\n"
    number = do(cluster, f"rm -f {where}; printf %s {shlex.quote(script)} | sbatch --parsable -o {where}", user).strip()
    cluster.wait("the job is ready", lambda: "ready" in cluster.on("controller", "cat", where), 120)
    return number


def test_docker_builds_and_runs_in_the_job(cluster: Cluster) -> None:
    job(cluster, "docker import /shared/mini.tar mini")
    inside = job(cluster, "docker run --rm mini cat /proc/self/cgroup /proc/self/uid_map; echo job $SLURM_JOB_ID")
    number = inside.split()[-1]
    assert cluster.on("n1", "cat", "/proc/sys/net/ipv6/conf/docker2001/disable_ipv6") == "1\n"
    # The operator's mirrors, and not the operator's runtime.
    shown = job(cluster, "docker info -f '{{.DefaultRuntime}} {{.RegistryConfig.Mirrors}}'")
    assert shown == f"shoal [{MIRROR}]\n"
    assert f"memory:/slurm_n1/uid_2001/job_{number}/" in inside and f"cpuset:/slurm_n1/uid_2001/job_{number}/" in inside
    account = cluster.on("n1", "grep", f"^{ACCOUNT}2001:", "/etc/subuid").split(":")[1]
    assert [line.split()[1] for line in inside.splitlines() if line.startswith("         0")] == [account]
    context = "cd $(mktemp -d) && printf 'FROM mini\\nRUN id -u > /who\\n' > Dockerfile"
    assert job(cluster, f"{context} && docker build -q -t built . && docker run --rm built cat /who").endswith("0\n")
    context = "cd $(mktemp -d) && printf 'FROM mini\\nRUN cat /proc/net/dev > /links\\n' > Dockerfile"
    for option, has_network in (("", True), ("--network none", False)):
        build = f"docker build -q --no-cache {option} -t linked . && docker run --rm linked cat /links"
        assert ("eth0" in job(cluster, f"{context} && {build}")) is has_network
    assert job(cluster, "echo piped | docker run --rm -i mini cat") == "piped\n"
    terminal = "script -qec 'docker run --rm -it mini sh -c \"echo is a terminal; exit 7\"' /dev/null; echo $?"
    assert job(cluster, terminal).split()[-3:] == ["a", "terminal", "7"]
    assert job(cluster, "echo $DOCKER_CONFIG $DOCKER_BUILDKIT").split()[0].startswith(f"{JOBS}/ann/docker-")
    cluster.wait("the Epilog has ended", lambda: cluster.on("n1", "ls", f"{JOBS}/ann") == "", 60)
    assert job(cluster, "id -nG").split() == ["ann", "shoal-users"]
    assert (
        cluster.on("n1", "systemctl", "is-active", "docker.socket", "docker", status=None).split() == ["inactive"] * 2
    )


def test_files_of_the_node_are_there_with_the_users_rights_alone(cluster: Cluster) -> None:
    own = "cd $(mktemp -d) && chmod 755 . && ln -s / root &&"
    run = "docker run --rm -v $PWD:/x mini sh -c 'id -u; touch /x/file; cp /bin/sh /x/sh; chmod u+s /x/sh'"
    assert job(cluster, f"{own} {run}; stat -c %u file sh").split() == ["2001", "2001", "2001"]
    assert job(cluster, "docker run --rm -v /shared:/x:ro mini ls /x").count("mini.tar") == 1
    left = f"{own} docker run -d --name held -v $PWD:/x mini sleep 500 > /dev/null;"
    assert "runs as you, ann" in job(cluster, f"{left} docker exec -u 0 held id", status=1)
    assert job(cluster, f"{left} docker exec held id -u") == "2001\n"
    assert "use those" in job(cluster, f"{left} docker cp /etc/hostname held:/x/name", status=1)
    closed = "mkdir -m 700 /shared/closed && mkdir -m 755 /shared/closed/open && echo secret > /shared/closed/open/file"
    do(cluster, f"{closed} && chmod 644 /shared/closed/open/file", "bob", host="n1")
    seen = job(cluster, "docker run --rm -v /shared/closed/open:/x mini cat /x/file", status=125)
    assert "you may not reach it" in seen and "secret" not in seen


@pytest.mark.parametrize("mount", ["-v $PWD:/x", "-v $PWD:/x -v named:/devices", "-v $PWD:/x -v named:/devices:ro", ""])
def test_devices_of_an_image_do_not_open(cluster: Cluster, mount: str) -> None:
    """Also not for a process of the job that is in no container's cgroup, and finds the container's files."""
    run = f"cd $(mktemp -d) && chmod 755 . && docker run -d {mount} mini sleep 888"
    pid = "$(docker inspect -f '{{.State.Pid}}' $container)"
    number = start(cluster, f"container=$({run}) && echo {pid} > /tmp/pid-of-container")
    path = f"/proc/{cluster.on('n1', 'cat', '/tmp/pid-of-container').strip()}/root/devices/zero"
    assert cluster.on("n1", "stat", "-c", "%F %a", path) == "character special file 666\n"
    for user in ("root", *(["ann"] if mount else [])):
        assert "Permission denied" in do(cluster, f"head -c 1 {path}", user, status=1, host="n1")
    do(cluster, f"scancel {number}")


def test_ids_that_a_user_may_take_do_not_reach_the_files_of_images(cluster: Cluster) -> None:
    """Users have a range of ids for podman's containers, and newuidmap gives it to anything else of theirs, too."""
    job(cluster, "docker create -v devices:/devices mini id")
    place = job(cluster, "docker info -f '{{.DockerRootDir}}'").strip()
    look = f"setpriv --reuid 1 --regid 1 --clear-groups stat {place}/volumes/devices/_data/zero 2>&1"
    assert "Permission denied" in job(cluster, f"unshare -U --map-auto --map-root-user {look}", status=1)
    assert "Permission denied" in job(cluster, f"stat {place}/volumes/devices/_data/zero 2>&1", status=1)


def test_link_in_place_of_a_mounted_directory_is_rejected(cluster: Cluster) -> None:
    made = "cd $(mktemp -d) && mkdir d && docker create --name swapped -v $PWD/d:/x mini ls /x > /dev/null &&"
    assert job(cluster, f"{made} touch d/own && docker start -a swapped") == "own\n"
    for place, message in (("/etc", "it is not yours"), ("/shared", "it has become a link")):
        seen = job(cluster, f"{made} rmdir d && ln -s {place} d && docker start -a swapped", status=1)
        assert message in seen and "hostname" not in seen and "mini.tar" not in seen


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--privileged", "--privileged is not available in jobs"),
        ("-v /:/host", "cannot mount /: it is not yours"),
        ("-v /etc:/etc2:ro", "cannot mount /etc: it is not yours"),
        ("--mount type=bind,source=/root,target=/x", "cannot mount /root: it is not yours"),
        ("-v /tmp/link-to-root:/x", "cannot mount /tmp/link-to-root: it is not yours"),
        ("-v /run/docker.sock:/s", "cannot mount /run/docker.sock: it is not yours"),
        ("--pid=host", "--pid is not available in jobs"),
        ("--ipc=host", "--ipc is not available in jobs"),
        ("--uts=host", "--uts is not available in jobs"),
        ("--userns=host", "--userns is not available in jobs"),
        ("--network=host", "--network=host is not available in jobs"),
        ("--cap-add SYS_ADMIN", "--cap-add is not available in jobs"),
        ("--device /dev/fuse", "--device is not available in jobs"),
        ("--security-opt seccomp=unconfined", "--security-opt is not available in jobs"),
        ("--cgroup-parent /", "--cgroup-parent is not available in jobs"),
        ("-p 80:80", "ports below 1024 are root's"),
        ("-v /tmp:/x -u 0", "cannot mount /tmp: it is not yours"),
    ],
)
def test_ways_out_of_a_container_are_rejected(cluster: Cluster, option: str, message: str) -> None:
    ended = job(cluster, f"ln -sfn / /tmp/link-to-root; docker run --rm {option} mini id", status=125)
    assert message in ended and "uid=" not in ended


def test_requests_that_no_job_may_make_are_rejected(cluster: Cluster) -> None:
    asked = {
        "docker volume create --opt type=none --opt o=bind --opt device=/ v": "DriverOpts is not available",
        "docker network create -d macvlan m": "networks of the driver bridge only",
        "docker swarm init": "jobs may not ask Docker for POST /swarm/init",
        "docker plugin install x": "jobs may not ask Docker for",
        "cd $(mktemp -d); printf 'FROM mini' > Dockerfile; docker build --network=host .": "networkmode=host",
    }
    for command, message in asked.items():
        assert message in job(cluster, command, status=1)
    python = "import socket; s=socket.socket(socket.AF_UNIX); s.connect('/run/docker.sock'); "
    python += (
        "s.sendall(b'POST /v1.23/containers/x/start HTTP/1.1\\r\\nHost: d\\r\\n\\r\\n'); print(s.makefile().read())"
    )
    assert "too old" in job(cluster, f"python3 -c {shlex.quote(python)}")


def test_callers_outside_a_job_and_other_users_are_rejected(cluster: Cluster) -> None:
    outside = do(cluster, "docker ps", host="n1", status=1)
    assert "docker works inside a job of Slurm only" in outside
    assert "you may not use Docker" in job(cluster, "docker ps", "eve", status=1)
    start(cluster, "docker run -d --name private mini sleep 777")
    assert "No such container" in job(
        cluster, "docker import /shared/mini.tar m; docker exec private id", "bob", status=1
    )
    assert "private" not in job(cluster, "docker ps -a; docker images", "bob")
    assert job(cluster, "docker images -q mini", "bob") == ""
    do(cluster, "scancel --me")


def test_container_has_no_privileged_port_outside(cluster: Cluster) -> None:
    """A server of NFS takes what comes from one for the node's own kernel, with any user's id."""
    number = start(cluster, "docker run -d mini sleep 900 | xargs docker inspect -f '{{.State.Pid}}' > /tmp/pid")
    listen = "import socket; print(socket.create_server(('', 4712)).accept()[1][1])"
    unit = ("systemd-run", "--collect", "-p", "StandardOutput=truncate:/tmp/port", "python3", "-c", listen)
    cluster.on("controller", *unit)
    cluster.wait("it listens", lambda: ":4712" in cluster.on("controller", "ss", "-Hltn"), 60)
    connect = f"s.bind(('', 700)); s.connect(({cluster.addresses()['controller']!r}, 4712))"
    python = f"python3 -c {shlex.quote(f'import socket; s = socket.socket(); {connect}')}"
    cluster.on("n1", "sh", "-c", f"nsenter --net=/proc/$(cat /tmp/pid)/ns/net {python}")
    cluster.wait("it has seen the port", lambda: cluster.on("controller", "cat", "/tmp/port") != "", 60)
    assert int(cluster.on("controller", "cat", "/tmp/port")) >= 1024
    do(cluster, f"scancel {number}")


def test_reused_process_number_is_no_identity(cluster: Cluster) -> None:
    seen = cluster.on("n1", "python3", "-c", REUSE)
    assert seen.splitlines()[0].startswith("rejected: docker works inside a job")
    assert seen.splitlines()[1] == "its own job: 99"


def test_connection_ends_with_the_process_that_opened_it(cluster: Cluster) -> None:
    """A process outside the job that gets a connection of the job's cannot use it once the job has ended."""
    give = "import array,socket,sys,time; s=socket.socket(socket.AF_UNIX); s.connect('/run/docker.sock'); "
    give += "p=socket.socket(socket.AF_UNIX); p.connect('/tmp/pass.sock'); socket.send_fds(p,[b'x'],[s.fileno()])"
    take = "import socket,time; l=socket.socket(socket.AF_UNIX); l.bind('/tmp/pass.sock'); l.listen(); c,_=l.accept(); "
    take += "_,f,_,_=socket.recv_fds(c,1,1); time.sleep(5); s=socket.socket(fileno=f[0]); "
    take += "s.sendall(b'GET /info HTTP/1.1\\r\\nHost: d\\r\\n\\r\\n'); print(s.makefile().read())"
    line = f"rm -f /tmp/pass.sock; (setsid python3 -c {shlex.quote(take)} > /tmp/taken 2>&1 &)"
    do(cluster, line, host="n1")
    job(cluster, f"python3 -c {shlex.quote(give)}")
    cluster.wait("it has asked", lambda: cluster.on("n1", "cat", "/tmp/taken") != "", 60)
    assert "inside a job of Slurm only" in cluster.on("n1", "cat", "/tmp/taken")


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_nothing_survives_the_end_of_the_job(cluster: Cluster, engine: str) -> None:
    load = "" if engine == "docker" else "podman import -q /shared/mini.tar mini;"
    number = start(cluster, f"{load} {engine} run -d --name left mini sleep 4711")
    assert "4711" in cluster.on("n1", "pgrep", "-af", "^sleep 4711")
    do(cluster, f"scancel {number}")
    cluster.wait("nothing is left", lambda: cluster.on("n1", "pgrep", "-f", "^sleep 4711", status=None) == "", 120)
    cluster.wait("n1 is idle", lambda: cluster.states()["n1"] == {"IDLE"}, 120)
    assert cluster.on("n1", "sh", "-c", f"ls -d /sys/fs/cgroup/*/slurm*/uid_*/job_{number}", status=None) == ""
    assert "left" not in job(cluster, "docker ps -a" if engine == "docker" else "podman ps")


def test_podman_runs_in_the_job_without_root(cluster: Cluster) -> None:
    inside = job(cluster, "podman run --rm mini cat /proc/self/cgroup; echo job $SLURM_JOB_ID")
    assert f"memory:/slurm_n1/uid_2001/job_{inside.split()[-1]}/step_0/task_0" in inside
    assert cluster.on("n1", "stat", "-c", "%U %a", f"{PODMAN_STORE}/ann") == "ann 700\n"


def test_removed_settings_remove_everything(cluster: Cluster) -> None:
    job(cluster, "docker network create own && docker run --rm --network own mini id")
    bridges = ("sh", "-c", f"ip -4 -o address | grep {NETWORK}[.]")
    assert cluster.on("n1", "cat", FORWARD) == "1\n" and len(cluster.on("n1", *bridges).splitlines()) >= 2
    cluster.edit(", podman: true, docker: true", "")
    cluster.json("up")
    assert cluster.on("n1", "ls", "-d", UNIT, STORE, PODMAN_STORE, EPILOG, JOBS, PACKAGE, SOCKET, status=None) == ""
    assert (
        cluster.on("n1", "grep", "-l", f"{ACCOUNT}\\|{STORE}", "/etc/passwd", "/etc/subuid", "/proc/mounts", status=1)
        == ""
    )
    assert cluster.on("n1", "cat", FORWARD) == "0\n" and cluster.on("n1", *bridges, status=1) == ""
    assert cluster.on("n1", "nft", "list", "tables").count("docker") == 0
    assert job(cluster, "echo $DOCKER_CONFIG works") == "works\n"
    assert cluster.json("up")["changed"] == []
    assert Path(cluster.file).read_text().count("docker: true") == 2
