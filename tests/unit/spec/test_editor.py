"""Removing a host from the file changes nothing else in it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.cases import cases
from tests.support.errors import error_text

from shoal.errors import UsageError
from shoal.spec.editor import without_host, write
from shoal.spec.loader import load_all, read_text
from shoal.spec.members import members

TEXT = """\
# the lab's cluster
cluster:   reef
controller: {host: ctl}   # upstairs

login: {hosts: ['front1',   front2]}
nodesets:
  lab:
    hosts:
    # the old ones
    - gpu01     # slow
    - {name: gpu02, address: 10.0.0.2}
    - name: gpu03   # three lines
      address: 10.0.0.3
      port: 22

    # the new ones
    - ubuntu@new[01-04]:2222
    -   name: "x[1-2]"
  flow: {hosts: [a, "b[1-3]",  c], weight: 2}
  fish:
    provider: sandbox
    count: 3   # enough
  one: {provider: sandbox, count: 1}
  lone: {hosts: [d]}
"""


def remove_host(path: Path, name: str) -> None:
    write(path, without_host(read_text(path), name, path))


EDITS = {
    "gpu01": ("    - gpu01     # slow\n", ""),
    "gpu02": ("    - {name: gpu02, address: 10.0.0.2}\n", ""),
    "gpu03": ("    - name: gpu03   # three lines\n      address: 10.0.0.3\n      port: 22\n", ""),
    "new02": ("ubuntu@new[01-04]:2222", "ubuntu@new[01,03-04]:2222"),
    "x2": ('"x[1-2]"', '"x1"'),
    "a": ("[a, ", "["),
    "b2": ('"b[1-3]"', '"b[1,3]"'),
    "c": (",  c]", "]"),
    "front1": ("'front1',   ", ""),
    "front2": (",   front2", ""),
    "fish3": ("count: 3", "count: 2"),
}


@cases("newline", "\n", "\r\n")
@cases("name", *EDITS)
def test_only_the_host_is_removed(name: str, newline: str, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_bytes(TEXT.replace("\n", newline).encode())
    path.chmod(0o640)
    remove_host(path, name)
    before, after = EDITS[name]
    assert TEXT.count(before) == 1
    assert path.read_bytes().decode() == TEXT.replace(before, after).replace("\n", newline)
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


REFUSALS = {
    "ctl": "ctl is the controller\n  fix: a cluster cannot do without; `shoal down` ends it",
    "fish1": "fish1 is not the last host of `nodesets.fish`, which has 3 numbered from 1\n  fix: remove fish3 first",
    "one1": "one1 is the only host of `nodesets.one`\n"
    "  fix: delete `nodesets.one` from the file, and from the partitions' nodesets",
    "d": "d is the only host of `nodesets.lone`\n"
    "  fix: delete `nodesets.lone` from the file, and from the partitions' nodesets",
    "nemo": "{path} has no host nemo\n  fix: its hosts are a,b[1-3],c,ctl,d,fish[1-3],front[1-2],gpu[01-03],"
    "new[01-04],one1,x[1-2]",
}


@cases("name", *REFUSALS)
def test_impossible_removal_is_rejected_and_nothing_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(TEXT)
    assert error_text(UsageError, remove_host, path, name) == REFUSALS[name].format(path=path)
    assert path.read_text() == TEXT


def test_unsupported_layout_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    text = "cluster: reef\ncontroller: {host: ctl}\nnodesets:\n  lab:\n    hosts:\n    -\n      a\n    - b\n"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        remove_host(path, "a")
    assert str(caught.value) == f"{path} has a layout that Shoal cannot edit\n  fix: take a out of it by hand"
    assert path.read_text() == text


def test_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(TEXT)
    link = tmp_path / "shoal.yaml"
    link.symlink_to("real.yaml")
    remove_host(link, "gpu01")
    assert link.is_symlink()
    assert "gpu01" not in (tmp_path / "real.yaml").read_text()


@given(st.lists(st.sampled_from([*EDITS, *REFUSALS, "x1", "new01", "new04"]), max_size=8))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_repeated_removals_keep_the_other_hosts(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text(TEXT)
    for name in names:
        before = {member.name for member in members(load_all(path)[0])}
        try:
            remove_host(path, name)
        except UsageError:
            assert {member.name for member in members(load_all(path)[0])} == before
        else:
            assert {member.name for member in members(load_all(path)[0])} == before - {name}
