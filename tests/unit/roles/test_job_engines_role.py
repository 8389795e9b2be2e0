"""Docker and podman in jobs: which hosts get what, and where nobody may use Docker."""

import json
from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.specs import WITH_LOGIN

from shoal.agent.document import Document, File, Service, User
from shoal.agent.facts import Cgroup, FileFact, UnixIds
from shoal.remote.docker_guard import CONFIG
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.job_engines import DOCKER_PACKAGES, SERVICE, UNIT, JobEnginesComponent
from shoal.roles.users import USERS_GROUP, UsersComponent

REEF = (
    WITH_LOGIN
    + """\
  cloud: {provider: lambda, type: gpu_1x_a10, max: 1, image: debian-12}
providers:
  lambda: {key: env:LAMBDA_API_KEY}
users:
  alice: {uid: 2001}
  bob: {uid: 2002, docker: true}
containers: {docker: true}
"""
)
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11", "cloud1": "10.0.0.99"}
OFF = tuple(Service(name, enabled=False, running=False) for name in ("docker.socket", "docker"))


def cluster_of(text: str = REEF, **changes: dict[str, Any]) -> Cluster:
    """Docker is there on every host, as images of providers have it."""
    facts = {
        name: replace(host_facts(name, at, groups={"docker": UnixIds(998)}), **changes.get(name, {}))
        for name, at in ADDRESSES.items()
    }
    return assemble(spec_of(text), facts, ADDRESSES)


def base_of(cluster: Cluster, host: str) -> Document:
    member = next(member for member in cluster.members if member.name == host)
    return JobEnginesComponent().documents(cluster, member).get(Stage.BASE, ())


def users_of(cluster: Cluster, host: str) -> dict[str, User]:
    member = next(member for member in cluster.members if member.name == host)
    items = UsersComponent().documents(cluster, member)[Stage.BASE]
    return {item.name: item for item in items if isinstance(item, User)}


def packages_of(cluster: Cluster, host: str) -> tuple[str, ...]:
    member = next(member for member in cluster.members if member.name == host)
    return JobEnginesComponent().packages(cluster.spec, member, cluster.facts[host])


WITHOUT_CGROUPS = {"n1": {"cgroup": Cgroup()}}


@cases("changes", {}, WITHOUT_CGROUPS, ids=["guard", "no cgroups"])
@cases("host", *ADDRESSES)
def test_nobody_is_in_the_group_of_docker_beside_the_guard(host: str, changes: dict[str, Any]) -> None:
    """Its members are as good as root where Docker's own daemon runs, and jobs have the groups of the controller."""
    users = users_of(cluster_of(**changes), host)
    for user in users.values():
        assert "docker" not in user.groups and user.not_in == ("docker",)


@cases(
    "host, changes, has_guard, is_off",
    ("n1", {}, True, True),
    ("n1", WITHOUT_CGROUPS, False, True),
    ("cloud1", {}, False, True),
    ("door", {}, False, False),
    ("c1", {}, False, False),
    ids=["node", "no cgroups", "rented", "login", "controller"],
)
def test_docker_of_nodes_is_behind_the_guard_or_off(
    host: str, changes: dict[str, Any], has_guard: bool, is_off: bool
) -> None:
    items = base_of(cluster_of(**changes), host)
    assert (Service(SERVICE) in items) is has_guard
    assert all(item in items for item in OFF) is is_off


def test_docker_is_installed_only_where_the_guard_can_run() -> None:
    assert [set(DOCKER_PACKAGES) <= set(packages_of(cluster_of(), host)) for host in ADDRESSES] == [
        False, False, True, False
    ]  # fmt: skip
    assert packages_of(cluster_of(**WITHOUT_CGROUPS), "n1") == ()


def test_host_that_loses_the_guard_loses_docker() -> None:
    there = host_facts("n1", "10.0.0.11").files | {UNIT: FileFact(there=True)}
    cluster = cluster_of(n1={"cgroup": Cgroup(), "files": there})
    items = base_of(cluster, "n1")
    assert Service(SERVICE, enabled=False, running=False) in items and File(UNIT) in items
    assert all(item in items for item in OFF)
    assert users_of(cluster, "n1")["bob"].not_in == ("docker",)
    warnings = [str(finding) for finding in JobEnginesComponent().findings(cluster)]
    assert len(warnings) == 1 and "Docker does not work in jobs" in warnings[0]


def test_guard_knows_users_by_their_ids_without_a_restart() -> None:
    [config] = [item for item in base_of(cluster_of(), "n1") if isinstance(item, File) and item.path == CONFIG]
    assert isinstance(config.content, str) and config.restarts == ()
    settings = json.loads(config.content)
    assert (settings["users"], settings["group"]) == ([2002], USERS_GROUP)


def test_cluster_without_users_has_no_guard() -> None:
    without = REEF[: REEF.index("users:")] + "containers: {docker: true}\n"
    items = base_of(cluster_of(without), "n1")
    assert Service(SERVICE) not in items and all(item in items for item in OFF)
