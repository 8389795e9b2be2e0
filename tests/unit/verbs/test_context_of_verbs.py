"""What verbs start from: which cluster, which hosts, and where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.plan.fake_world import LAB, spec_of

from shoal.errors import ProviderError, SpecError, UsageError
from shoal.hosts.api import Target
from shoal.spec.members import default_spec
from shoal.verbs.context import Context, open_context, requests, state_directory
from shoal_simulators.fake_provider import FakeProvider

LAB_CONTEXT = Context(spec_of(LAB))


def names(hosts: str | None, nodeset: str | None = None) -> list[str]:
    return [member.name for member in LAB_CONTEXT.choose(hosts, nodeset)]


def test_hosts_are_chosen_by_hostlist_and_by_nodeset() -> None:
    assert names(None) == ["c1", "n1", "n2"]
    assert names("n[1-2]") == ["n1", "n2"]
    assert names("n2,c1") == ["n2", "c1"]
    assert names(None, "lab") == ["n1", "n2"]
    assert names("n2", "lab") == ["n2"]
    assert LAB_CONTEXT.choose_one("n1").name == "n1"


@pytest.mark.parametrize(
    ("hosts", "nodeset", "text"),
    [
        ("n3,n1,x", None, "cluster reef has no host n3, x\n  fix: use one of c1, n1, n2"),
        ("c1", "lab", "cluster reef has no host c1\n  fix: use one of n1, n2"),
        (None, "lob", "there is no nodeset 'lob' in cluster reef\n  fix: use one of controller, lab"),
        ("", None, "no host is named\n  fix: use one of c1, n1, n2"),
    ],
)
def test_hosts_that_are_not_there_are_named_with_those_that_are(
    hosts: str | None, nodeset: str | None, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        LAB_CONTEXT.choose(hosts, nodeset)
    assert str(caught.value) == text


def test_what_is_not_a_hostlist_is_refused_with_an_example() -> None:
    with pytest.raises(UsageError, match=r"'n\[1-' is not a hostlist: .*\n  fix: write gpu01,gpu02 or gpu\[01-16\]"):
        LAB_CONTEXT.choose("n[1-")


def test_where_one_host_is_asked_for_several_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        LAB_CONTEXT.choose_one("n[1-2]")
    assert str(caught.value) == "n[1-2] names 2 hosts, and this command takes one\n  fix: use n1"


async def test_a_host_that_is_yet_to_be_made_is_refused_with_the_way_to_make_it() -> None:
    fake = FakeProvider()
    context = Context(default_spec("reef"), providers=lambda name: fake)
    with pytest.raises(ProviderError) as caught:
        await context.fleet()
    assert str(caught.value) == "cluster reef: host controller is not made yet\n  fix: run `shoal up`"
    await fake.create("reef", requests(context.members, "sandbox"), lambda text, part: None)
    assert [target.address for target in (await context.targets()).values()] == [
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.3",
    ]


async def test_a_host_of_the_file_is_reached_as_the_file_says() -> None:
    text = "cluster: r\ncontroller: {host: 'bob@box:2222', compute: true, identity: /keys/k}\n"
    context = Context(spec_of(text))
    assert list((await context.targets()).values()) == [
        Target("box", None, port=2222, user="bob", identity=Path("/keys/k"))
    ]


def test_without_a_file_it_is_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_context().spec == default_spec("sandbox")
    assert open_context(cluster="mine").cluster == "mine"


def test_below_the_folder_of_a_file_nobody_gets_a_sandbox_by_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shoal.yaml").write_text(LAB)
    below = tmp_path / "src/model"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with pytest.raises(UsageError) as caught:
        open_context()
    assert str(caught.value) == (
        f"there is no shoal.yaml here, and one in {tmp_path}\n"
        "  fix: use -f ../../shoal.yaml, or --cluster sandbox for the sandbox"
    )
    assert open_context(Path("../../shoal.yaml")).cluster == "reef"
    assert open_context(cluster="sandbox").spec == default_spec("sandbox")


async def test_without_a_file_it_is_said_that_hosts_of_ones_own_need_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fake = FakeProvider()
    with pytest.raises(ProviderError, match=r"for your own hosts, change to the directory of their shoal\.yaml"):
        await replace(open_context(), providers=lambda name: fake).fleet()


def test_the_file_here_is_taken_and_then_names_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shoal.yaml").write_text(LAB)
    assert open_context().cluster == "reef"
    with pytest.raises(UsageError) as caught:
        open_context(cluster="demo")
    assert str(caught.value) == (
        "the cluster's name is in shoal.yaml; --cluster demo names one that has no file\n"
        "  fix: leave out --cluster and unset SHOAL_CLUSTER, or run this where there is no shoal.yaml"
    )


def test_a_file_that_is_named_and_not_there_is_no_sandbox(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        open_context(tmp_path / "other.yaml")


@pytest.mark.parametrize("name", ["a b", "../up", "Reef", "x" * 60])
def test_a_name_that_no_cluster_can_have_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        open_context(cluster=name)
    assert str(caught.value) == (
        f"{name!r} is not a cluster name\n  fix: use lower-case letters, digits and -, as in reef"
    )


def test_host_keys_are_kept_for_each_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert LAB_CONTEXT.known_hosts == tmp_path / "shoal" / "reef" / "known_hosts"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/bob")
    assert state_directory("reef") == Path("/home/bob/.local/state/shoal/reef")
