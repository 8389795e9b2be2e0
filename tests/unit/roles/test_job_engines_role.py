"""Docker and podman in jobs: which hosts get what, and which users have Docker."""

from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.specs import WITH_LOGIN

from shoal.agent.document import Document, File, Service
from shoal.agent.facts import Cgroup
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.job_engines import COMPOSE, DOCKER, PACKAGES, PODMAN, JobEnginesComponent
from shoal.slurm.conf import TASK_PROLOG

REEF = (
    WITH_LOGIN
    + """\
  cloud: {provider: lambda, type: gpu_1x_a10, max: 1, image: debian-12}
providers:
  lambda: {key: env:LAMBDA_API_KEY}
users:
  alice: {uid: 2001}
  bob: {uid: 2002, docker: true}
"""
)
WITH_DOCKER, WITH_PODMAN = REEF + "containers: {docker: true}\n", REEF + "containers: {podman: true}\n"
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11", "cloud1": "10.0.0.99"}
OFF = tuple(Service(name, enabled=False, running=False) for name in ("docker.socket", "docker"))


def cluster_of(text: str = WITH_DOCKER, **changes: dict[str, Any]) -> Cluster:
    facts = {name: replace(host_facts(name, at), **changes.get(name, {})) for name, at in ADDRESSES.items()}
    return assemble(spec_of(text), facts, ADDRESSES)


def base_of(cluster: Cluster, host: str) -> Document:
    member = next(member for member in cluster.members if member.name == host)
    return JobEnginesComponent().documents(cluster, member).get(Stage.BASE, ())


def texts_of(cluster: Cluster, host: str) -> dict[str, str]:
    items = [item for item in base_of(cluster, host) if isinstance(item, File)]
    return {item.path: item.content for item in items if isinstance(item.content, str)}


def packages_of(cluster: Cluster, host: str) -> tuple[str, ...]:
    member = next(member for member in cluster.members if member.name == host)
    return JobEnginesComponent().packages(cluster.spec, member, cluster.facts[host])


@cases(
    "host, has_podman, is_off",
    ("n1", True, True),
    ("cloud1", False, True),
    ("door", False, False),
    ("c1", False, False),
    ids=["node", "rented", "login", "controller"],
)
@cases("changes", {}, {"n1": {"cgroup": Cgroup()}}, ids=["cgroups", "no cgroups"])
def test_docker_of_permanent_nodes_is_podman_and_its_own_daemon_is_off_on_all(
    host: str, has_podman: bool, is_off: bool, changes: dict[str, Any]
) -> None:
    cluster = cluster_of(**changes)
    assert (f"{DOCKER}/docker" in texts_of(cluster, host)) is has_podman
    assert packages_of(cluster, host) == ((*PACKAGES, COMPOSE) if has_podman else ())
    assert all(item in base_of(cluster, host) for item in OFF) is is_off


def test_podman_alone_brings_no_docker() -> None:
    cluster = cluster_of(WITH_PODMAN)
    items, texts = base_of(cluster, "n1"), texts_of(cluster, "n1")
    assert f"{PODMAN}/containers.conf" in texts and f"{DOCKER}/docker" not in texts
    assert File(f"{DOCKER}/docker") in items and not any(item in items for item in OFF)
    assert packages_of(cluster, "n1") == PACKAGES
    assert 'case "  " in' in texts[TASK_PROLOG]


def test_docker_is_for_users_of_the_file_that_may_have_it() -> None:
    assert 'case " bob " in' in texts_of(cluster_of(), "n1")[TASK_PROLOG]
    assert [str(finding) for finding in JobEnginesComponent().findings(cluster_of())] == []
    [warning] = JobEnginesComponent().findings(cluster_of(WITH_PODMAN))
    assert str(warning) == (
        "users.bob.docker: bob cannot use Docker, found the file has no containers: {docker: true}, "
        "add it: docker in jobs is podman then; or delete this"
    )
