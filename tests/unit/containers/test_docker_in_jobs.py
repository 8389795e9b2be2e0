"""`docker` in jobs, which is podman: what it translates, and what TaskProlog and Epilog do for it."""

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.remote import docker_command, program_text
from shoal.remote.docker_command import UsageError, command_line, gpu_indexes, requested_gpus
from shoal.roles.job_engines import containers_conf

JOB = {"DOCKER_HOST": "unix:///run/s", "SLURM_STEP_GPUS": "2,5"}
BOTH = "--device nvidia.com/gpu=2 --device nvidia.com/gpu=5"
FIRST, SECOND = "--device nvidia.com/gpu=2", "--device nvidia.com/gpu=5"
USER = pwd.getpwuid(os.getuid()).pw_name


@cases(
    "line, expected",
    ("ps -a", "ps -a"),
    ("run --gpus all -it x nvidia-smi", f"run {BOTH} -it x nvidia-smi"),
    ("run --rm -it --gpus=1 -v /a:/b -p8:8 x", f"run --rm -it {FIRST} -v /a:/b -p8:8 x"),
    ("container create --name --gpus --gpus device=1 x", f"container create --name --gpus {SECOND} x"),
    ("run -e A=b -u0 -w /w --init x --gpus all", "run -e A=b -u0 -w /w --init x --gpus all"),
    ("run -dw /w --gpus all x", f"run -dw /w {BOTH} x"),
    ("exec x run --gpus all", "exec x run --gpus all"),
    ("rm -f x", "rm --time=0 -f x"),
    ("container rm -vf x", "container rm --time=0 -vf x"),
    ("rm x", "rm x"),
    ("run -h box --gpus all x", f"run -h box {BOTH} x"),
    ("-H unix:///run/s run x", "run x"),
    ("--host=unix:///run/s ps", "ps"),
    ("--help", "--help"),
)
def test_lines_of_docker_are_lines_of_podman(line: str, expected: str) -> None:
    assert command_line(line.split(), JOB) == ["podman", *expected.split()]


@cases(
    "asked, expected",
    ("all", ["7", "8", "9"]),
    ("-1", ["7", "8", "9"]),
    ("2", ["7", "8"]),
    ("count=1,capabilities=utility", ["7"]),
    ('"device=0,2"', ["7", "9"]),
    ("device=0,2", ["7", "9"]),
    ("driver=nvidia,count=all", ["7", "8", "9"]),
)
def test_gpus_of_a_container_are_counted_in_the_job(asked: str, expected: list[str]) -> None:
    assert requested_gpus(asked, ["7", "8", "9"]) == expected


@cases(
    "line, environment, message",
    ("run --gpus all x", {}, "this job has no GPUs: ask Slurm for some (--gpus)"),
    ("run --gpus 3 x", JOB, "--gpus 3, and this job has 2: ask Slurm for more (--gpus)"),
    ("run --gpus device=5 x", JOB, "no GPU 5 in this job: its GPUs are 0 to 1"),
    ("run --gpus device=GPU-1 x", JOB, "no GPU GPU-1 in this job: its GPUs are 0 to 1"),
    ("run --gpus some x", JOB, "--gpus some: write all, a number, or device=0,1"),
    ("-H tcp://a:1 ps", JOB, "cannot reach tcp://a:1: in jobs it runs podman on this node; leave out -H"),
    ("--host", JOB, "cannot reach : in jobs it runs podman on this node; leave out --host"),
)
def test_what_no_job_has_is_an_error(line: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        command_line(line.split(), environment)
    assert str(raised.value) == message


def test_gpus_are_numbered_as_by_nvidias_tools(tmp_path: Path) -> None:
    for bus, minor in (("0000:03:00.0", 1), ("0000:81:00.0", 0)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t NVIDIA H200\nDevice Minor: \t {minor}\n")
    assert gpu_indexes(str(tmp_path)) == {"1": "0", "0": "1"}


def test_compose_is_a_program_of_the_user_or_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "plugins"
    monkeypatch.setattr(docker_command, "PLUGINS", (str(own), str(tmp_path)))
    with pytest.raises(UsageError) as raised:
        command_line(["compose", "up"], JOB)
    assert str(raised.value).startswith("no docker-compose on this node: ")
    (tmp_path / "docker-compose").write_text("")
    (tmp_path / "docker-compose").chmod(0o755)
    assert command_line(["compose", "up", "-d"], JOB) == [f"{tmp_path}/docker-compose", "up", "-d"]
    own.mkdir()
    (own / "docker-compose").symlink_to(tmp_path / "docker-compose")
    assert command_line(["compose"], JOB) == [f"{own}/docker-compose"]


class Node:
    """A node for the programs that Slurm runs: podman writes down what it is asked."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.jobs, self.store = place / "jobs" / USER, place / "store" / USER
        for path in (self.jobs, self.store, place / "bin", place / "conf"):
            path.mkdir(parents=True)
        (place / "conf/containers.conf").write_text("")
        self.program("podman", f'echo "${{SHOAL_PODMAN##*/}} $XDG_RUNTIME_DIR $*" >> {place}/log')
        bind = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); time.sleep(60)"
        self.program("systemd-socket-activate", f"exec python3 -c '{bind}' \"${{1#--listen=}}\"")
        self.program("setpriv", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')

    def program(self, name: str, text: str) -> None:
        (self.place / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.place / "bin" / name).chmod(0o755)

    def prolog(self, job: int, users: str = USER, **variables: str) -> list[str]:
        words = {"JOBS": self.jobs.parent, "STORE": self.store.parent, "PODMAN": self.place / "conf"}
        text = program_text("task_prolog.sh", **words, DOCKER="/docker", USERS=users, PROGRAM="")
        return self._run(text, job, **variables).splitlines()

    def epilog(self, job: int) -> None:
        text = program_text("job_epilog.sh", JOBS=self.jobs.parent, PROGRAM="").replace(
            "PATH=", f"PATH={self.path}:", 1
        )
        self._run(text, job, SLURM_JOB_USER=USER, SLURM_JOB_UID=str(os.getuid()))

    def log(self) -> list[str]:
        """What podman was asked since the last call."""
        path = self.place / "log"
        text = path.read_text() if path.exists() else ""
        path.write_text("")
        return text.replace(f"{self.jobs}/", "").splitlines()

    @property
    def path(self) -> str:
        return f"{self.place}/bin:{os.environ['PATH']}"

    def _run(self, text: str, job: int, **variables: str) -> str:
        environment = {"PATH": self.path, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "3", **variables}
        done = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, check=True)
        return done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for pid in made.jobs.glob("*/*.pid"):
        subprocess.run(["kill", pid.read_text().strip()], check=False)


def test_job_has_a_socket_and_podmans_state_of_its_own(node: Node) -> None:
    own, conf = node.jobs / "8", node.place / "conf"
    shared = [
        "unset DBUS_SESSION_BUS_ADDRESS",
        f"export XDG_RUNTIME_DIR={own}",
        f"export CONTAINERS_CONF={conf}/containers.conf",
        f"export CONTAINERS_STORAGE_CONF={conf}/storage.conf",
        f"export SHOAL_PODMAN={node.store}/jobs/8",
    ]
    docker = [
        f"export CONTAINERS_REGISTRIES_CONF={conf}/registries.conf",
        f"export DOCKER_HOST=unix://{own}/docker-3",
        "export DOCKER_BUILDKIT=0",
        f"export PATH=/docker:{node.path}",
    ]
    assert node.prolog(8) == shared + docker
    pid = (own / "docker-3.pid").read_text()
    assert (own / "docker-3").is_socket() and oct(own.stat().st_mode)[-3:] == "700"
    images = node.store / "jobs/8/overlay-images"
    assert images.is_symlink() and images.resolve() == node.store / "overlay-images"
    nested = {"DOCKER_HOST": f"unix://{node.jobs}/7/docker-0", "PATH": f"/docker:{node.path}"}
    assert node.prolog(8, **nested) == shared + docker, "from a job that has submitted this one"
    assert (own / "docker-3.pid").read_text() == pid, "one for all tasks of a step"
    assert node.prolog(8, users="eve adam") == shared
    assert node.prolog(8, DOCKER_HOST="tcp://own:1") == shared, "the user's own stays"
    assert node.log() == []


def test_next_job_removes_the_containers_of_one_that_has_ended(node: Node) -> None:
    for job in (7, 8):
        node.prolog(job)
        (node.store / f"jobs/{job}/libpod").mkdir()
    node.epilog(7)
    assert not (node.jobs / "7").exists() and (node.jobs / "8").is_dir()
    node.prolog(9)
    assert node.log() == ["7 7 pod rm --all --force --time 0", "7 7 rm --all --force --time 0 --volumes"]
    assert sorted(path.name for path in (node.store / "jobs").iterdir()) == ["8", "9"]
    (node.store / "jobs/9/libpod").mkdir()
    node.epilog(9)
    node.prolog(9)
    assert node.log()[:1] == ["9 9 pod rm --all --force --time 0"], "requeued"


def test_containers_of_builds_go_where_no_other_job_may_have_them(node: Node) -> None:
    node.prolog(7)
    (node.store / "overlay-containers/containers.json").write_text('[{"id":"a"}]')
    node.prolog(8)
    assert node.log() == []
    for job in (7, 8):
        node.epilog(job)
    node.prolog(9)
    assert node.log() == ["9 9 ps --all --external --quiet"]


@cases("proxy", "", "proxy: {http: 'http://proxy%1:3128', no_proxy: [n1, 10.0.0.0/8]}\n")
def test_podman_pulls_through_the_proxy(proxy: str) -> None:
    spec = spec_of(f"cluster: reef\ncontroller: {{host: c1, compute: true}}\n{proxy}")
    conf = containers_conf(spec.proxy)
    if not proxy:
        assert "proxy" not in conf
        return
    variables = '"http_proxy=http://proxy%1:3128", "https_proxy=http://proxy%1:3128", "no_proxy=n1,10.0.0.0/8"'
    assert f"\nenv = [{variables}]\n" in conf
