"""What verbs start from: which cluster, which hosts, and their addresses."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of, error_text
from tests.support.fake_world import LAB, spec_of

from shoal.errors import ProviderError, SpecError, UsageError
from shoal.hosts.api import Target
from shoal.local_files import state_directory
from shoal.spec.members import default_spec
from shoal.verbs.context import Context, open_context, requests
from shoal_simulators.fake_provider import FakeProvider

LAB_CONTEXT = Context(spec_of(LAB))


def names(hosts: str | None, nodeset: str | None = None) -> list[str]:
    return [member.name for member in LAB_CONTEXT.choose(hosts, nodeset)]


def test_hosts_are_chosen_by_hostlist_and_nodeset() -> None:
    assert names(None) == ["c1", "n1", "n2"]
    assert names("n[1-2]") == ["n1", "n2"]
    assert names("n2,c1") == ["n2", "c1"]
    assert names(None, "lab") == ["n1", "n2"]
    assert names("n2", "lab") == ["n2"]
    assert LAB_CONTEXT.choose_one("n1").name == "n1"


@cases(
    "hosts, nodeset, text",
    ("n3,n1,x", None, "cluster reef has no host n3, x\n  fix: use one of c1, n1, n2"),
    ("c1", "lab", "cluster reef has no host c1\n  fix: use one of n1, n2"),
    (None, "lob", "there is no nodeset 'lob' in cluster reef\n  fix: use one of controller, lab"),
    ("", None, "no host is named\n  fix: use one of c1, n1, n2"),
)
def test_unknown_hosts_are_reported_with_the_existing_hosts(hosts: str | None, nodeset: str | None, text: str) -> None:
    assert error_text(UsageError, LAB_CONTEXT.choose, hosts, nodeset) == text
    assert error_text(UsageError, LAB_CONTEXT.choose_one, "n[1-2]") == (
        "n[1-2] names 2 hosts, and this command takes one\n  fix: use n1"
    )


def test_invalid_hostlist_is_rejected_with_an_example() -> None:
    with pytest.raises(UsageError, match=r"'n\[1-' is not a hostlist: .*\n  fix: write gpu01,gpu02 or gpu\[01-16\]"):
        LAB_CONTEXT.choose("n[1-")


async def test_uncreated_host_is_rejected_with_the_command_that_creates_the_host() -> None:
    fake = FakeProvider()
    context = Context(default_spec("reef"), providers=lambda name: fake)
    missing = "cluster reef: host controller is not made yet\n  fix: run `shoal up`"
    assert await error_of(ProviderError, context.fleet()) == missing
    await fake.create("reef", requests(context.members, "sandbox"), lambda text, part: None)
    made = [target.address for target in (await context.targets()).values()]
    assert made == ["192.0.2.1", "192.0.2.2", "192.0.2.3"]


async def test_host_is_reached_as_configured() -> None:
    text = "cluster: r\ncontroller: {host: 'bob@box:2222', compute: true, identity: /keys/k}\n"
    context = Context(spec_of(text))
    assert list((await context.targets()).values()) == [
        Target("box", None, port=2222, user="bob", identity=Path("/keys/k"))
    ]


async def test_sandbox_is_used_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_context().spec == default_spec("sandbox")
    assert open_context(cluster="mine").cluster == "mine"
    fake = FakeProvider()
    with pytest.raises(ProviderError, match=r"for your own hosts, change to the directory of their shoal\.yaml"):
        await replace(open_context(), providers=lambda name: fake).fleet()
    with pytest.raises(SpecError, match="no such file"):
        open_context(tmp_path / "other.yaml")


def test_subdirectory_of_a_spec_does_not_fall_back_to_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shoal.yaml").write_text(LAB)
    below = tmp_path / "src/model"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert error_text(UsageError, open_context) == (
        f"there is no shoal.yaml here, and one in {tmp_path}\n"
        "  fix: use -f ../../shoal.yaml, or --cluster sandbox for the sandbox"
    )
    assert open_context(Path("../../shoal.yaml")).cluster == "reef"
    assert open_context(cluster="sandbox").spec == default_spec("sandbox")


def test_file_in_the_current_directory_is_used_and_sets_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shoal.yaml").write_text(LAB)
    assert open_context().cluster == "reef"
    assert error_text(UsageError, open_context, cluster="demo") == (
        "the cluster's name is in shoal.yaml; --cluster demo names one that has no file\n"
        "  fix: leave out --cluster and unset SHOAL_CLUSTER, or run this where there is no shoal.yaml"
    )


@cases("name", "a b", "../up", "Reef", "x" * 60)
def test_invalid_cluster_name_is_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert error_text(UsageError, open_context, cluster=name) == (
        f"{name!r} is not a cluster name\n  fix: use lower-case letters, digits and -, as in reef"
    )


def test_host_keys_are_stored_per_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert LAB_CONTEXT.known_hosts == tmp_path / "shoal" / "reef" / "known_hosts"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/bob")
    assert state_directory("reef") == Path("/home/bob/.local/state/shoal/reef")
