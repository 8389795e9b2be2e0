"""Bringing the code to a host, for real on this machine's disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import CommandFailed
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal.jobs.bundle import Bundle, runtime, working_tree
from shoal.jobs.ship import Found, look, mark, send, who_needs_it


def here(name: str = "here") -> LocalHost:
    return LocalHost(Target(name), through_sudo=False)


@pytest.fixture
def tree(tmp_path: Path) -> Bundle:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print(1)\n")
    return working_tree(tmp_path / "project", "train.py")


async def test_what_is_there_is_not_sent_again(tmp_path: Path, tree: Bundle) -> None:
    root, ours = str(tmp_path / "deep" / "jobs"), runtime()
    async with here() as host:
        first = await look(host, root, tree.hash, ours.hash)
        assert (first.shared, first.code, first.runtime) == (False, False, False) and len(first.id) == 24
        assert await send(host, root, tree, ours, first) == len(tree.data) + len(ours.data)
        again = await look(host, root, tree.hash, ours.hash)
        assert again == Found(first.id, False, True, True)
        assert await send(host, root, tree, ours, again) == 0
    assert (Path(root) / "code" / f"{tree.hash}.tar").read_bytes() == tree.data
    assert (Path(root) / "lib" / ours.hash / "runner.py").exists()
    assert sorted(os.listdir(root)) == [".id", "code", "lib"], "nothing half-done is left"
    assert os.stat(root).st_mode & 0o7777 == 0o1777


async def test_two_that_send_at_once_do_not_harm_each_other(tmp_path: Path, tree: Bundle) -> None:
    root, ours = str(tmp_path / "jobs"), runtime()
    async with here() as host:
        nothing = await look(host, root, tree.hash, ours.hash)
        for _ in range(2):  # the second one does not know of the first
            await send(host, root, tree, ours, nothing)
    assert os.listdir(Path(root) / "lib") == [ours.hash]


async def test_shared_storage_is_known_by_its_number_and_marked(tmp_path: Path, tree: Bundle) -> None:
    root = str(tmp_path / "jobs")
    async with here("n1") as one, here("n2") as two:
        found = {host.name: await look(host, root, "a", "b") for host in (one, two)}
        assert found["n1"].id == found["n2"].id and who_needs_it(found) == ("n1",)
        await mark(one, root, True)
        assert (await look(two, root, "a", "b")).shared
        await mark(one, root, False)
        assert not (await look(two, root, "a", "b")).shared


def test_hosts_with_their_own_disks_all_need_it() -> None:
    assert set(who_needs_it({"n1": Found("1"), "n2": Found("2"), "n3": Found("1")})) == {"n1", "n2"}


async def test_a_place_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with here("n1") as host:
        with pytest.raises(CommandFailed, match=r"n1: cannot make .*/file/jobs: .*Not a directory"):
            await look(host, str(tmp_path / "file" / "jobs"), "a", "b")
