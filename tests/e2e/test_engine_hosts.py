"""Sandbox hosts under podman, and the containers of examples/: real ones, where podman is installed.

The whole of test_cluster.py runs on such hosts with `SHOAL_TEST_KIND=podman`, as root and as an ordinary user.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, Cluster, login_keys, taken_down
from tests.e2e.engines import engine_lists
from tests.e2e.leftovers import noted
from tests.e2e.test_sandbox_removal import quiet, ssh
from tests.sandbox_faults import SandboxFaults

from shoal.errors import ProviderError
from shoal.hosts.provider import Request
from shoal.sandbox import engine_image
from shoal.sandbox.engine import find_engine, needs_runc
from shoal.sandbox.layout import Layout
from shoal.sandbox.network import gateway
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape

COVERS = (
    "sandbox/engine sandbox/engine_hosts sandbox/engine_image sandbox/engine_checks examples/compose "
    "examples/node-image"
)
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("podman"), reason="needs root and podman"),
]
CLUSTER = "e2e-podman"


async def test_host_of_podman_keeps_its_files_and_leaves_nothing() -> None:
    sandbox, faults = SandboxProvider(), SandboxFaults(SandboxProvider().cache)
    layout = Layout(sandbox.cache, CLUSTER)
    request = Request("n1", Shape(engine="podman", cpus=1, memory_mb=700, gpus=2))
    with noted(CLUSTER):
        await sandbox.destroy(CLUSTER, quiet)
        try:
            [instance] = await sandbox.create(CLUSTER, [request], quiet)
            look = "systemctl is-system-running --wait; nproc; free -m | awk '/^Mem/ {print $2}'; nvidia-smi -L | wc -l"
            assert (await ssh(instance.target, look)).split() == ["running", "1", "700", "2"]
            await ssh(instance.target, "echo kept > /root/kept; echo 192.0.2.1 other >> /etc/hosts")
            await faults.reboot(CLUSTER, "n1")
            assert await ssh(instance.target, "cat /root/kept; tail -n 1 /etc/hosts") == "kept\n192.0.2.1 other"
            await faults.kill(CLUSTER, "n1")
            assert [one.state for one in await sandbox.instances(CLUSTER)] == ["stopped"]
            with pytest.raises(ProviderError, match="has hosts of another kind: n1 is of kind podman"):
                await sandbox.create(CLUSTER, [Request("n2", Shape())], quiet)
            assert await sandbox.create(CLUSTER, [request], quiet) == [instance]
            assert await ssh(instance.target, "cat /root/kept") == "kept"
        finally:
            await sandbox.destroy(CLUSTER, quiet)
    assert not layout.dir.exists()
    assert layout.id not in "".join(outputs(*engine_lists("podman")))


def outputs(*commands: list[str]) -> Iterator[str]:
    for command in commands:
        yield subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout


@pytest.fixture(scope="module")
def node_image() -> Iterator[str]:
    """The image of examples/node-image, on the sandbox's image of Debian 12 in place of one from a registry."""
    engine = find_engine("podman")
    base = asyncio.run(engine_image.ensure(engine, SandboxProvider().cache, "debian12", quiet))
    arguments = (
        "--isolation=chroot",
        "--build-arg",
        f"BASE={base}",
        "-t",
        "shoal-node",
        str(ROOT / "examples/node-image"),
    )
    asyncio.run(engine.run("build", *arguments))
    yield "localhost/shoal-node"
    asyncio.run(engine.run("rmi", "--force", "localhost/shoal-node"))


NODE_SPEC = """\
cluster: e2e-node-image
sandbox: podman
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 1, memory: 1G}
"""


@pytest.mark.matrix
def test_container_of_the_node_image_becomes_a_node(node_image: str, tmp_path: Path) -> None:
    engine = find_engine("podman")
    made = Cluster(tmp_path, NODE_SPEC)
    with login_keys("operator") as keys, taken_down(made):
        made.json("up")
        address = gateway(Layout(made.provider.cache, made.name).sites()["a"])
        key = (keys / "operator.pub").read_text().strip()
        run = (
            "--detach",
            "--name",
            "shoal-node",
            "--publish",
            f"{address}:2222:22",
            "--env",
            f"SHOAL_AUTHORIZED_KEY={key}",
        )
        asyncio.run(engine.run("run", *ULIMITS, *run, node_image))
        try:
            box = f"{{name: box1, address: {address}, port: 2222, identity: {keys / 'operator'}}}"
            made.file.write_text(f"{NODE_SPEC}  mine: {{hosts: [{box}], user: root}}\n")
            assert made.json("up")["whole"]
            assert made.json("up")["unchanged"]
            run_job_on_box(made)
            asyncio.run(engine.run("exec", "shoal-node", "touch", "/root/kept"))
            asyncio.run(engine.run("restart", "--time", "1", "shoal-node"))
            made.wait("its daemons are set up again", lambda: made.json("up")["whole"], 150)  # with the same host key
            asyncio.run(engine.run("exec", "shoal-node", "ls", "/root/kept"))
            run_job_on_box(made)
            made.file.write_text(NODE_SPEC)
            made.json("up")
        finally:
            asyncio.run(engine.run("rm", "--force", "--time", "0", "shoal-node"))


def run_job_on_box(made: Cluster) -> None:
    wait = ("sbatch", "--parsable", "--wait", "-p", "mine", "--wrap", "hostname")
    shown = made.on("controller", "scontrol", "show", "job", made.on("controller", *wait).strip())
    assert "JobState=COMPLETED" in shown and "NodeList=box1" in shown


ULIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=20000:20000")
"""Root of a virtual machine may not raise them to what podman wants."""

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
"""


@pytest.mark.matrix
@pytest.mark.skipif(not shutil.which("podman-compose"), reason="needs podman-compose")
def test_composition_of_the_examples_becomes_a_cluster(node_image: str, tmp_path: Path) -> None:
    conf = tmp_path / "containers.conf"
    runtime = "runc" if needs_runc() else "crun"
    conf.write_text(f'{CONTAINERS_CONF}cgroup_manager = "cgroupfs"\nruntime = "{runtime}"\n')
    place = ROOT / "examples/compose"
    with login_keys("operator") as keys:
        public = (keys / "operator.pub").read_text().strip()
        env = {**os.environ, "SHOAL_AUTHORIZED_KEY": public, "CONTAINERS_CONF": str(conf)}
        compose = ["podman-compose", "--file", str(place / "compose.yaml")]

        def run(*arguments: str) -> None:
            subprocess.run([*compose, *arguments], check=True, timeout=LIMIT, env=env)

        identity = f"identity: {keys / 'operator'}"
        text = (place / "shoal.yaml").read_text().replace("user: root}", f"user: root, {identity}}}")
        made = Cluster(tmp_path, f"{text}    {identity}\n")
        run("up", "--no-build", "--detach")
        try:
            made.wait("the hosts answer", lambda: made.shoal("check", status=None).returncode == 0)
            assert made.json("up")["whole"]
            assert sorted(made.on("controller", "srun", "-N2", "hostname").split()) == ["node1", "node2"]
            run("restart", "node1")  # podman gives it another address
            made.wait("node1 is back", lambda: made.shoal("up").returncode == 0, 150)
            assert sorted(made.on("controller", "srun", "-N2", "hostname").split()) == ["node1", "node2"]
            made.shoal("down", "--force", "--yes")
        finally:
            run("down", "--volumes")
            asyncio.run(find_engine("podman").run("network", "rm", "compose_cluster"))  # podman-compose keeps it
