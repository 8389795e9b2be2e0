"""A cached spec is not read again, and is never mistaken for another."""

from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import LAB

from shoal.errors import SpecError, UsageError
from shoal.local_files import state_directory
from shoal.verbs.context import open_context, open_hosts
from shoal.verbs.spec_cache import CachedSpec

MIXED = """\
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1, user: ann, port: 2222, identity: ~/.ssh/key}}
nodesets:
  lab: {hosts: ["n[1-2]"], features: [a100]}
  fish: {provider: sandbox, count: 2, gpus: 2, memory: 2G}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "shoal.yaml").write_text(MIXED)
    return tmp_path / "shoal.yaml"


def test_cached_hosts_equal_those_of_the_spec(file: Path) -> None:
    read, recalled = open_hosts(file), open_hosts(file)
    assert not isinstance(read.known, CachedSpec) and isinstance(recalled.known, CachedSpec)
    assert (recalled.cluster, recalled.members, recalled.file) == (read.cluster, read.members, file)
    assert recalled.members == open_context(file).members
    assert recalled.spec == read.spec
    [kept] = state_directory().glob("hosts-*.json")
    assert kept.stat().st_mode & 0o777 == 0o600


@cases("storage, shares", ("", False), ("storage: {/data: {kind: nfs}}\n", True))
def test_presence_of_shares_is_cached(file: Path, storage: str, shares: bool) -> None:
    file.write_text(MIXED + storage)
    read, recalled = open_hosts(file), open_hosts(file)
    assert isinstance(recalled.known, CachedSpec)
    assert read.shares is recalled.shares is shares


def test_changed_file_is_read_again(file: Path) -> None:
    open_hosts(file)
    file.write_text(MIXED.replace("n[1-2]", "n[1-3]"))
    assert "n3" in [member.name for member in open_hosts(file).members]
    file.write_text(LAB + "wrong: 1\n")
    for _ in range(2):
        with pytest.raises(SpecError, match="unknown key"):
            open_hosts(file)
    file.unlink()
    with pytest.raises(SpecError, match=r"shoal\.yaml"):
        open_hosts(file)


def test_unwritable_cache_reads_the_file_every_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = file.with_name("other.yaml")
    other.write_text(MIXED)
    open_hosts(file), open_hosts(other)
    assert len(list(state_directory().glob("hosts-*.json"))) == 2, "equal texts have caches of their own"
    monkeypatch.setenv("XDG_STATE_HOME", str(file))  # which is no directory
    for _ in range(2):
        assert len(open_hosts(file).members) == 5


@cases("text", "", "{", "[]", '{"of": 1}', '{"of": "x", "cluster": "reef", "members": [1]}')
def test_invalid_cache_is_ignored(file: Path, text: str) -> None:
    open_hosts(file)
    [kept] = state_directory().glob("hosts-*.json")
    kept.write_text(text)
    assert len(open_hosts(file).members) == 5


def test_sandbox_without_a_file_is_cached_by_name(file: Path) -> None:
    file.unlink()
    for name in ("one", "two", "one", None):
        context = open_hosts(None, name)
        assert context.cluster == (name or "sandbox") and len(context.members) == 3
    with pytest.raises(UsageError, match="is not a cluster name"):
        open_hosts(None, "a b")
