"""Docker and podman inside jobs, as ordinary users have them. The tests run in this order."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, login_keys, running

from shoal.roles.job_engines import DOCKER, HELPERS, JOBS, PODMAN, STORE
from shoal.slurm.conf import EPILOG

COVERS = "roles/job_engines remote/docker_command.py remote/netavark.sh remote/task_prolog.sh remote/job_epilog.sh"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]  # hosts install podman

SPEC = """\
cluster: st-engines
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 1, memory: 3G, cgroups: true, gpus: 2}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"], docker: true}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"], docker: true}
  eve: {uid: 2003, keys: ["file:KEYS/eve.pub"]}
containers: {engine: oci, docker: true}
"""
PROGRAMS = "sh sleep cat id ls touch python3 getent"
MAKE_ROOT = f"""\
rm -rf /run/root; mkdir -p /run/root/bin /run/root/tmp /run/root/usr/lib; chmod 1777 /run/root/tmp; cd /run/root
for program in {PROGRAMS}; do
    file=$(readlink -f "$(command -v $program)"); cp -L "$file" bin/$program
    ldd "$file" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p ".$(dirname "$library")"; cp -L "$library" ".$library"
    done
done
cp -a /usr/lib/python3.11 usr/lib
tar -cf /shared/mini.tar .; chmod 644 /shared/mini.tar
python3 -c '
import tarfile
zero = tarfile.TarInfo("devices/zero")
zero.type, zero.devmajor, zero.devminor, zero.mode = tarfile.CHRTYPE, 1, 5, 0o666
with tarfile.open("/shared/mini.tar", "a") as archive: archive.addfile(zero)
'
"""
CDI = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- {name: "0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}
- {name: "1", containerEdits: {deviceNodes: [{path: /dev/nvidia1}]}}
containerEdits: {deviceNodes: [{path: /dev/nvidiactl}]}
"""
"""What NVIDIA's tools write of two GPUs; they are not on the sandbox."""
OTHER_DOCKER = "printf '#!/bin/sh\\necho of the package\\n' > /usr/bin/docker; chmod 755 /usr/bin/docker"
CONTAINERFILE = (
    "mkdir -p app/data && cd app && echo hi > data/file && printf 'FROM mini\\nRUN id -u > /who\\n' > Dockerfile"
)
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
COMPOSE = f"""\
version: "3"
services:
  web:
    build: .
    command: python3 -m http.server 8000 --bind 0.0.0.0
    ports: ["18000:8000"]
    volumes: ["./data:/data:ro", "kept:/kept"]
  client:
    image: mini
    command: ["python3", "-c", "{ASK}", "http://web:8000/data/file"]
volumes: {{kept: {{}}}}
"""
SDK = """\
import docker
client = docker.from_env()
held = client.containers.run("mini", ["sleep", "600"], name="held", detach=True)
print("sdk", held.exec_run("cat /proc/self/cgroup").output.decode())
client.images.build(path=".", tag="by-sdk")
print([container.name for container in client.containers.list()])
held.remove(force=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann", "bob", "eve") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("engines"), text) as made:
            cdi = f"mkdir -p /etc/cdi; echo {shlex.quote(CDI)} > /etc/cdi/nvidia.yaml"
            made.on("n1", "sh", "-c", f"{MAKE_ROOT}\n{cdi}\n{OTHER_DOCKER}")
            yield made


def do(cluster: Cluster, command: str, user: str = "ann", status: int | None = 0, host: str = "controller") -> str:
    done = cluster.ssh(host, shlex.join(("runuser", "-l", user, "-c", command)))
    assert status is None or done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def job(cluster: Cluster, command: str, user: str = "ann", status: int | None = 0, options: str = "") -> str:
    """What a command in a job prints, without what srun says when it waits."""
    return do(cluster, f"srun -Q -n1 {options} sh -c {shlex.quote(command)}", user, status)


def start(cluster: Cluster, command: str, user: str = "ann") -> str:
    """The number of a job that goes on; it has run the command."""
    where = f"/shared/{user}.out"
    script = f"#!/bin/sh\n{command}\necho ready\nsleep 600\n"
    number = do(cluster, f"rm -f {where}; printf %s {shlex.quote(script)} | sbatch --parsable -o {where}", user).strip()
    cluster.wait("the job is ready", lambda: "ready" in cluster.on("controller", "cat", where), 120)
    return number


def cancel(cluster: Cluster, user: str = "ann") -> None:
    do(cluster, "scancel --me", user)
    cluster.wait("n1 is idle", lambda: cluster.states()["n1"] == {"IDLE"}, 120)


def test_docker_builds_and_runs_in_the_job(cluster: Cluster) -> None:
    assert "mini" in job(cluster, "docker import /shared/mini.tar mini && docker images")
    inside = job(cluster, "docker run --rm mini cat /proc/self/cgroup; echo job $SLURM_JOB_ID")
    number = inside.split()[-1]
    for controller in ("memory", "devices", "freezer"):
        assert f"{controller}:/slurm_n1/uid_2001/job_{number}/step_0" in inside
    assert job(cluster, f"{CONTAINERFILE} && docker build -q -t built . && docker run --rm built cat /who").endswith(
        "0\n"
    )
    assert job(cluster, "echo piped | docker run --rm -i built cat") == "piped\n", "images stay for the next job"
    terminal = "script -qec 'docker run --rm -it mini sh -c \"echo is a terminal; exit 7\"' /dev/null; echo $?"
    seen = job(cluster, terminal)
    assert "is a terminal" in seen and seen.endswith("7\n")
    assert len(do(cluster, "srun -Q -n2 docker images -q built").split()) == 2
    held = "docker run -d --name held mini sleep 600 > /dev/null; docker exec held id -u; docker rm -f held"
    assert job(cluster, held) == "0\nheld\n"
    made = "docker create --name idle mini true > /dev/null; docker rm idle"
    assert job(cluster, made) == "idle\n"
    for shell in ("bash -c", "bash -lc"):
        assert job(cluster, f"{shell} 'command -v docker'") == "/usr/local/lib/shoal/docker/docker\n"
    assert job(cluster, "docker images -q built | wc -l", options="--export=NONE") == "1\n"


def test_mounted_files_are_those_of_the_user(cluster: Cluster) -> None:
    run = "docker run --rm -v $PWD:/x -v named:/named mini sh -c 'touch /x/file /named/file'"
    assert job(cluster, f"cd $(mktemp -d) && {run} && stat -c %u file") == "2001\n"
    assert job(cluster, "docker run --rm -v named:/named mini ls /named") == "file\n", "it stays for the next job"
    do(cluster, "mkdir -m 700 /shared/closed && echo secret > /shared/closed/file", "bob")
    seen = job(cluster, "docker run --rm --privileged -v /shared:/x mini cat /x/closed/file", status=1)
    assert "Permission denied" in seen and "secret" not in seen
    assert "Permission denied" in job(cluster, "docker run --rm --privileged -v /etc:/x mini cat /x/shadow", status=1)
    assert "zero" not in job(cluster, "docker run --rm mini ls /devices", status=None), "an image brings no devices"


def test_gpus_are_those_of_the_job(cluster: Cluster) -> None:
    see = "mini sh -c 'ls /dev; for n in 0 1; do : < /dev/nvidia$n && echo open $n; done'"
    for option in ("--gpus all", "--gpus 1", "--gpus device=0"):
        seen = job(cluster, f"docker run --rm {option} {see}", options="--gpus=1", status=None).split("\n")
        assert "open 0" in seen and "open 1" not in seen and "nvidiactl" in seen and "nvidia1" not in seen
    both = job(cluster, f"docker run --rm --gpus all {see}", options="--gpus=2")
    assert "open 0" in both and "open 1" in both
    assert "this job has no GPUs" in job(cluster, f"docker run --rm --gpus all {see}", status=1)
    assert "this job has 1" in job(cluster, f"docker run --rm --gpus 2 {see}", options="--gpus=1", status=1)
    sdk = "import docker; run = docker.from_env().containers.run; "
    sdk += "print(run('mini', ['ls', '/dev'], devices=['/dev/nvidia0:/dev/nvidia0:rwm'], remove=True).decode())"
    assert "nvidia0\n" in job(cluster, f"python3 -c {shlex.quote(sdk)}", options="--gpus=1")
    other = job(cluster, f"podman run --rm --device nvidia.com/gpu=1 {see}", options="--gpus=1", status=None)
    assert "nvidia1" in other and "open 1" not in other


def test_compose_services_find_each_other_by_name(cluster: Cluster) -> None:
    do(cluster, f"{CONTAINERFILE} && echo {shlex.quote(COMPOSE)} > compose.yaml", host="n1")
    ask = f"python3 -c {shlex.quote(ASK)} http://127.0.0.1:18000/data/file"
    wait = f"for n in $(seq 50); do {ask} 2> /dev/null && break; sleep 0.2; done"
    lines = ("up -d web", "run --rm client", "exec -T web cat /who", "down -t 0")
    up, *rest = [f"docker compose {line} 2>&1" for line in lines]
    seen = job(cluster, f"cd app && {up} && {wait} && {' && '.join(rest)}")
    assert seen.count("hi\n") == 2, "from the node by its port, and from the client by the name"
    assert "\n0\n" in seen and "Removing network app_default" in seen
    assert "app_kept" in job(cluster, "ls /var/lib/shoal/podman/ann/volumes")


def test_sdk_asks_the_socket_of_the_job(cluster: Cluster) -> None:
    seen = job(cluster, f"cd app && python3 -c {shlex.quote(SDK)}; echo job $SLURM_JOB_ID")
    assert f"freezer:/slurm_n1/uid_2001/job_{seen.split()[-1]}/step_0" in seen and "['held']" in seen
    assert "by-sdk" in job(cluster, "docker images")


def test_other_users_reach_nothing_of_it(cluster: Cluster) -> None:
    number = start(cluster, "docker run -d --name private mini sleep 777; echo $DOCKER_HOST > /shared/host")
    socket = cluster.on("controller", "cat", "/shared/host").strip()
    assert socket == f"unix://{JOBS}/ann/{number}/docker-batch"
    ask = f"import docker; print([one.name for one in docker.DockerClient({socket!r}).containers.list()])"
    assert "Permission denied" in job(cluster, f"python3 -c {shlex.quote(ask)}", "bob", status=1)
    assert "private" in job(cluster, f"python3 -c {shlex.quote(ask)}"), "another job of the same user"
    assert job(cluster, "docker ps -aq; docker images -q", "bob") == ""
    assert job(cluster, "docker ps", "eve") == "of the package\n"
    assert job(cluster, "env | grep -c DOCKER; podman images -q", "eve") == "0\n"
    assert cluster.on("n1", "systemctl", "is-active", "docker", status=None).strip() == "inactive"
    assert cluster.on("n1", "pgrep", "-u", "root", "-f", "podman", status=1) == ""
    cancel(cluster)


def test_network_of_a_job_does_not_end_with_another_job_of_the_user(cluster: Cluster) -> None:
    serve = "docker run -d --network own --name {} mini python3 -m http.server 8000 --bind 0.0.0.0"
    first = start(cluster, f"docker network create own; {serve.format('first')}")
    wait = "docker ps -a --format {{.Names}}; until [ -e /shared/go ]; do sleep 0.2; done"
    ask = f"docker run --rm --network own mini python3 -c {shlex.quote(ASK)} http://second:8000/etc/hosts"
    line = f"{serve.format('second')}; {wait}; {ask}"
    do(cluster, f"sbatch -o /shared/second --wrap {shlex.quote(line)}")
    cluster.wait("it runs", lambda: "second" in cluster.on("controller", "cat", "/shared/second"), 120)
    do(cluster, f"scancel {first}")
    cluster.wait("the first has ended", lambda: cluster.on("n1", "ls", "-d", f"{JOBS}/ann/{first}", status=None) == "")
    do(cluster, "touch /shared/go")
    cluster.wait("it has asked", lambda: "localhost" in cluster.on("controller", "cat", "/shared/second"), 120)
    assert "first" not in cluster.on("controller", "cat", "/shared/second")
    cancel(cluster)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_nothing_survives_the_end_of_the_job(cluster: Cluster, engine: str) -> None:
    compose = "cd app && docker compose up -d web &&" if engine == "docker" else ""
    number = start(cluster, f"{compose} {engine} run -d --name left mini sleep 4711")
    assert "4711" in cluster.on("n1", "pgrep", "-af", "^sleep 4711")
    cancel(cluster)
    assert cluster.on("n1", "pgrep", "-u", "ann", status=1) == ""
    assert cluster.on("n1", "sh", "-c", f"ls -d /sys/fs/cgroup/*/slurm*/uid_*/job_{number}", status=None) == ""
    assert cluster.on("n1", "ls", f"{JOBS}/ann") == "lock\n"
    assert job(cluster, f"{engine} ps -aq; {engine} run --rm --name left mini id -u") == "0\n", "its name is free"
    assert cluster.on("n1", "stat", "-c", "%U %a", f"{STORE}/ann") == "ann 700\n"


def test_removed_settings_remove_everything(cluster: Cluster) -> None:
    cluster.edit("containers: {engine: oci, docker: true}", "containers: oci")
    cluster.json("up")
    assert cluster.on("n1", "ls", "-d", PODMAN, HELPERS, DOCKER, STORE, EPILOG, JOBS, status=None) == ""
    assert job(cluster, "echo $DOCKER_HOST works") == "works\n"
    assert cluster.json("up")["changed"] == []
    assert Path(cluster.file).read_text().count("docker: true") == 2
