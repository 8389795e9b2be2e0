"""Hosts under podman or docker: their commands, their image, and the findings about a machine that cannot run them."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal.errors import ProviderError
from shoal.hosts.provider import Request
from shoal.sandbox import engine, engine_hosts, engine_image
from shoal.sandbox.engine_checks import PACKAGES, EngineFacts, find_problems
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.hosts import Controller, NodeSet
from shoal.spec.machines import Sandbox
from shoal.spec.member import Shape
from shoal.spec.members import default_spec, members
from shoal.spec.model import Spec

LAYOUT = Layout(Path("/var/cache/shoal"), "reef")
HOST = HostRecord(
    "n1", 0, "10.70.1.2", "localhost/image:1", "", Shape(gpus=1, memory_mb=700, engine="podman"), port=23001
)
GOOD = EngineFacts(programs=frozenset(PACKAGES))


@cases("name", "podman", "docker")
def test_command_that_makes_a_host_matches_its_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda number: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    arguments = engine.create_arguments(LAYOUT, HOST, engine.network_prefix(LAYOUT), name)
    unlike = "sandbox/create-podman" if name == "docker" else ""
    assert_golden(f"sandbox/create-{name}", "\n".join([name, *arguments]) + "\n", unlike)


def test_node_image_of_the_examples_has_the_same_first_process() -> None:
    example = Path(__file__).parents[3] / "examples/node-image/entry"
    assert example.read_text() == engine_image.ENTRY
    # `docker build` takes no Containerfile.
    assert "COPY entry" in (example.parent / "Dockerfile").read_text()


def test_states_are_read_beside_warnings() -> None:
    output = (
        'time="2026-11-17" level=error msg="User-selected graph driver"\n'
        "shoal-abc-n1 Up 3 seconds ago\nshoal-abc-n2 Exited (137) 2 days ago\n"
        "shoal-abc-n3 running\nshoal-abc-n4 Up 2 hours (Paused)\nother-n5 running\n"
    )
    found = engine_hosts.parse_containers(output, "shoal-abc-")
    assert {name[-2:]: engine_hosts.STATES.get(state, "stopped") for name, state in found.items()} == {
        "n1": "running",
        "n2": "stopped",
        "n3": "running",
        "n4": "frozen",
    }


def test_port_is_free_and_in_no_record() -> None:
    first = engine_hosts.free_port(LAYOUT, ())
    second = engine_hosts.free_port(LAYOUT, {first})
    assert first != second
    assert all(
        engine_hosts.FIRST_PORT <= port < engine_hosts.FIRST_PORT + engine_hosts.PORTS for port in (first, second)
    )


def test_group_given_by_root_is_entered_only_where_ours_is_not_writable(tmp_path: Path) -> None:
    own, given = "9:name=systemd:/login\n0::/\n", tmp_path / "systemd/ann"
    assert engine.delegated_cgroup(tmp_path, "ann", own) is None
    given.mkdir(parents=True)
    (given / "cgroup.procs").touch()
    assert engine.delegated_cgroup(tmp_path, "ann", own) == given
    (tmp_path / "systemd/login").mkdir()
    (tmp_path / "systemd/login/cgroup.procs").touch()
    assert engine.delegated_cgroup(tmp_path, "ann", own) is None


def texts(name: str, facts: EngineFacts, *shapes: Shape) -> list[str]:
    requests = [Request(f"n{index}", shape) for index, shape in enumerate(shapes)]
    return [f"{finding.level} {finding}" for finding in find_problems(name, requests, facts)]


def test_suitable_machine_has_no_findings() -> None:
    shape = Shape(cpus=1, memory_mb=700, gpus=2, image="debian13")
    assert texts("podman", GOOD, replace(shape, engine="podman")) == []
    assert texts("docker", GOOD, replace(shape, engine="docker")) == []
    assert texts("podman", replace(GOOD, rootless=True, user="ann"), Shape(engine="podman")) == []


def test_missing_engine_is_an_error_with_the_packages() -> None:
    bare = EngineFacts(programs=frozenset(), rootless=True, hybrid=True, user="ann")
    assert texts("podman", bare) == [
        "error hosts of kind podman need these programs: podman, netavark, iptables, runc, newuidmap, slirp4netns, "
        "run `apt-get install --no-install-recommends podman netavark iptables runc uidmap slirp4netns`"
    ]
    assert texts("docker", replace(bare, daemon="no such file")) == [
        "error hosts of kind docker need these programs: docker, "
        "run `apt-get install --no-install-recommends docker.io`"
    ]
    assert texts("docker", replace(bare, linux=False)) == [
        "error hosts of kind docker need these programs: docker, install Docker Desktop or podman"
    ]


def test_user_without_a_group_or_subordinate_ids_is_told_what_root_must_do() -> None:
    lacking = replace(GOOD, rootless=True, user="ann", cgroup=False, subordinate_ids=False)
    ids, group = texts("podman", lacking)
    assert ids == (
        "error rootless podman needs subordinate user ids, found no line for ann in /etc/subuid, "
        "as root, run `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 ann`"
    )
    assert group == (
        "error rootless podman has no cgroup in which systemd could run, "
        "log in by SSH or at the console, so that systemd runs a manager for you (not with `su`)"
    )
    assert (
        "`mkdir -p /sys/fs/cgroup/systemd/ann && chown -R ann /sys/fs/cgroup/systemd/ann`"
        in (texts("podman", replace(lacking, hybrid=True))[1])
    )


def test_docker_without_its_daemon_is_an_error() -> None:
    [found] = texts("docker", replace(GOOD, daemon="Cannot connect to the Docker daemon"))
    assert found.startswith(
        "error the docker daemon does not answer, found Cannot connect to the Docker daemon, start it"
    )


@cases(
    "shape, text",
    (Shape(engine="podman", site="b"), "podman has one site, found site b"),
    (Shape(engine="podman", disk_mb=500), "podman cannot limit a disk, found 500M"),
    (Shape(engine="podman", cgroups=True), "podman has no cgroups for Slurm, found cgroups: true"),
    (Shape(), "not of kind podman as other hosts, use one kind for all hosts"),
    (Shape(engine="podman", image="arch"), "unknown image, found 'arch'"),
)
def test_host_that_an_engine_cannot_run_is_an_error(shape: Shape, text: str) -> None:
    [found] = texts("podman", GOOD, shape)
    assert found.startswith(f"error n0: {text}")


def test_one_word_makes_every_host_a_container_of_an_engine() -> None:
    spec = Spec(
        cluster="reef",
        sandbox=Sandbox(kind="docker"),
        controller=Controller(provider="sandbox"),
        nodesets={"a": NodeSet(provider="sandbox", count=1)},
    )
    assert {(member.shape.engine, member.shape.vm) for member in members(spec)} == {("docker", False)}
    assert {member.shape.engine for member in members(default_spec(kind="podman"))} == {"podman"}
    assert {member.shape.engine for member in members(default_spec())} == {""}


async def test_kinds_do_not_mix_in_one_cluster(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "reef")
    layout.host_dir("n1").mkdir(parents=True)
    layout.save_host(replace(HOST, shape=Shape()))
    provider = SandboxProvider(tmp_path)
    provider.check = lambda requests: []  # type: ignore[method-assign]
    with pytest.raises(ProviderError, match="reef has hosts of another kind: n1 is of kind container or vm"):
        await provider.create("reef", [Request("n2", Shape(engine="podman"))], lambda text, part: None)
    layout.save_host(HOST)
    with pytest.raises(ProviderError, match="n1 is of kind podman"):
        await provider.create("reef", [Request("n2", Shape())], lambda text, part: None)
    assert Layout(tmp_path, "reef").hosts()["n1"] == HOST


DOCKER = """\
cd "$(dirname "$0")"
echo "$*" >> log
[ "$1" != images ] || cat images
"""


@cases("images", "localhost/shoal-sandbox-debian12:1\nlocalhost/shoal-sandbox-sid:2\n", "")
async def test_files_of_jobs_are_removed_when_all_hosts_are_gone(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "docker", DOCKER)
    (tmp_path / "images").write_text(images)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def fail(path: Path) -> None:
        raise ProviderError(f"rm: cannot remove {path}: Permission denied")

    monkeypatch.setattr(engine_hosts, "remove_tree", fail)
    layout = Layout(tmp_path / "cache", "reef")
    layout.dir.mkdir(parents=True)
    (layout.dir / engine_hosts.ENGINE_FILE).write_text("docker\n")
    if images:
        await engine_hosts.destroy(layout)
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert last.startswith("run --rm ") and "shoal-sandbox-debian12:1 /shared -mindepth 1 -delete" in last
    else:
        with pytest.raises(ProviderError, match="only docker may use, and no image is left") as error:
            await engine_hosts.destroy(layout)
        assert error.value.hint == f"remove it: sudo rm -rf {layout.shared}"
