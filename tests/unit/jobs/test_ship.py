"""Sending the code to a host, for real on this machine's disk."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.errors import CommandFailed
from shoal.hosts.api import Result, Target
from shoal.hosts.local import LocalHost
from shoal.jobs.bundle import Bundle, runtime, working_tree
from shoal.jobs.ship import KEEP_NEWEST, StorageState, clean, inspect_storage, mark, one_host_per_storage, send
from shoal.remote.runner import node as job_code


def here(name: str = "here") -> LocalHost:
    return LocalHost(Target(name), through_sudo=False)


@pytest.fixture
def tree(tmp_path: Path) -> Bundle:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print(1)\n")
    return working_tree(tmp_path / "project", "train.py")


async def test_present_files_are_not_sent_again(tmp_path: Path, tree: Bundle) -> None:
    root, ours = str(tmp_path / "deep" / "jobs"), runtime()
    async with here() as host:
        first = await inspect_storage(host, root, tree.hash, ours.hash)
        assert (first.shared, first.code, first.runtime) == (False, False, False) and len(first.id) == 24
        assert await send(host, root, tree, ours, first) == len(tree.data) + len(ours.data)
        again = await inspect_storage(host, root, tree.hash, ours.hash)
        assert again == StorageState(first.id, code=True, runtime=True)
        assert await send(host, root, tree, ours, again) == 0
    assert (Path(root) / "code" / f"{tree.hash}.tar").read_bytes() == tree.data
    lib = Path(root) / "lib" / ours.hash
    program = lib / "programs/runner/rank.py"
    [compiled] = program.parent.glob("__pycache__/rank.*.pyc")
    assert program.exists() and str(program).encode() in compiled.read_bytes(), "tracebacks name the file where it is"
    assert sorted(os.listdir(root)) == [".id", "code", "lib"], "nothing half-done is left"
    assert os.stat(root).st_mode & 0o7777 == 0o1777


async def test_links_that_a_user_made_lead_root_nowhere(tmp_path: Path, tree: Bundle) -> None:
    root, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    root.mkdir()
    root.chmod(0o1777)
    async with here("n1") as host:
        assert (await inspect_storage(host, str(root), tree.hash, "11b")).id
        assert not elsewhere.exists() and (root / ".id").stat().st_mode & 0o777 == 0o644
        (root / ".id").unlink()
        (root / ".id").symlink_to(elsewhere)
        with pytest.raises(CommandFailed, match="id is no file"):
            await inspect_storage(host, str(root), tree.hash, "11b")
        (root / ".shared").symlink_to(elsewhere)
        await mark(host, str(root), True)
    assert not elsewhere.exists() and (root / ".shared").is_file()


@cases("place", "code", "lib")
async def test_bundle_directory_made_by_a_user_is_rejected(tmp_path: Path, tree: Bundle, place: str) -> None:
    root, theirs = tmp_path / "jobs", tmp_path / "theirs"
    theirs.mkdir()
    root.mkdir()
    (root / place).symlink_to(theirs)
    async with here("n1") as host:
        with pytest.raises(CommandFailed) as caught:
            await inspect_storage(host, str(root), tree.hash, "11b")
        assert str(caught.value) == (
            f"n1: {root}/{place} is a link, or does not belong to root\n"
            "  fix: remove it there, or use another --directory"
        )
        if os.geteuid() == 0:
            (root / place).unlink()
            (root / place).mkdir()
            os.chown(root / place, 65534, 65534)
            with pytest.raises(CommandFailed, match="does not belong to root"):
                await inspect_storage(host, str(root), tree.hash, "11b")
    assert list(theirs.iterdir()) == []


class Cut(LocalHost):
    """A host whose connection ends before all has arrived there."""

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", **more: Any) -> Result:
        return await super().run(argv, stdin=stdin[: len(stdin) // 2], **more)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
@cases("kind", "root", "parent", "link", "open")
async def test_directory_in_the_hands_of_a_user_is_rejected(tmp_path: Path, tree: Bundle, kind: str) -> None:
    share = tmp_path / "share"
    share.mkdir()
    share.chmod(0o1777)
    (share / "theirs").mkdir()
    os.chown(share / "theirs", 65534, 65534)
    root = {"root": share / "theirs", "parent": share / "theirs/jobs", "open": share / "open/jobs"}.get(kind)
    if kind == "link":
        root = share / "jobs"
        root.symlink_to(tmp_path)
        os.chown(root, 65534, 65534, follow_symlinks=False)
    if kind == "open":
        (share / "open").mkdir()
        (share / "open").chmod(0o777)
    host = LocalHost(Target("n1"), through_sudo=False)
    text = {"open": "others may write to", "link": "Permission denied|belongs to nobody"}.get(
        kind, "belongs to nobody, who could replace the job's code"
    )
    with pytest.raises(CommandFailed, match=text):
        await inspect_storage(host, str(root), tree.hash, tree.hash)
    assert not list(share.rglob("*.tar"))


async def test_incomplete_bundle_is_not_kept(tmp_path: Path, tree: Bundle) -> None:
    root, host = tmp_path / "jobs", Cut(Target("n1"), through_sudo=False)
    await inspect_storage(host, str(root), tree.hash, "11b")
    with pytest.raises(CommandFailed, match=r"n1: cannot keep the job's code in .*: only a part of it arrived"):
        await send(host, str(root), tree, runtime(), StorageState("1", runtime=True))
    assert list((root / "code").glob("[!.]*")) == []


async def test_concurrent_sends_do_not_conflict(tmp_path: Path, tree: Bundle) -> None:
    root, ours = str(tmp_path / "jobs"), runtime()
    async with here() as host:
        nothing = await inspect_storage(host, root, tree.hash, ours.hash)
        for _ in range(2):  # the second one does not know of the first
            await send(host, root, tree, ours, nothing)
    assert os.listdir(Path(root) / "lib") == [ours.hash]


async def test_shared_storage_is_identified_by_its_id_and_marked(tmp_path: Path, tree: Bundle) -> None:
    root = str(tmp_path / "jobs")
    async with here("n1") as one, here("n2") as two:
        found = {host.name: await inspect_storage(host, root, "a", "b") for host in (one, two)}
        assert found["n1"].id == found["n2"].id and one_host_per_storage(found) == ("n1",)
        await mark(one, root, True)
        assert (await inspect_storage(two, root, "a", "b")).shared
        await mark(one, root, False)
        assert not (await inspect_storage(two, root, "a", "b")).shared


class Elsewhere(LocalHost):
    """A host with another name and process numbers than this machine."""

    async def run(self, argv: Sequence[str], **more: Any) -> Result:
        apart = ["unshare", "--pid", "--fork", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        return await super().run([*apart, *argv], **more)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
async def test_concurrent_hosts_agree_on_the_id_of_new_shared_storage(tmp_path: Path) -> None:
    for turn in range(8):
        root = str(tmp_path / str(turn) / "jobs")
        hosts = [Elsewhere(Target(f"n{number}"), through_sudo=False) for number in range(4)]
        found = await asyncio.gather(*(inspect_storage(host, root, "a", "b") for host in hosts))
        assert len({state.id for state in found}) == 1 and len(found[0].id) == 24


def test_each_separate_storage_needs_a_copy() -> None:
    assert set(one_host_per_storage({"n1": StorageState("1"), "n2": StorageState("2"), "n3": StorageState("1")})) == {
        "n1",
        "n2",
    }


async def test_unusable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with here("n1") as host:
        with pytest.raises(CommandFailed, match=r"n1: cannot use .*/file/jobs: .*Not a directory"):
            await inspect_storage(host, str(tmp_path / "file" / "jobs"), "a", "b")


LONG_AGO = time.time() - 30 * 24 * 3600


def aged(path: Path, order: int) -> Path:
    os.utime(path, (LONG_AGO + order, LONG_AGO + order))
    return path


def crowd(root: Path, count: int) -> None:
    """Archives that were not used for a month; the first is the oldest."""
    for place in ("code", "lib"):
        (root / place).mkdir(parents=True)
    for number in range(count):
        (root / "code" / f"c{number:02}.tar").write_text("")
        aged(root / "code" / f"c{number:02}.tar", number)
        (root / "lib" / f"l{number:02}").mkdir()
        aged(root / "lib" / f"l{number:02}", number)


async def test_old_bundles_are_removed_except_the_newest_and_those_in_use(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    crowd(root, KEEP_NEWEST + 4)
    async with here() as host:
        assert (await inspect_storage(host, str(root), "none", "none")).old
        await clean(host, str(root), [], ["c01", "l02"])
        left = [
            sorted(path.name for path in (root / place).iterdir() if path.name[0] != ".") for place in ("code", "lib")
        ]
        assert [len(names) for names in left] == [KEEP_NEWEST + 1, KEEP_NEWEST + 1]
        assert left[0][:2] == ["c01.tar", "c04.tar"] and left[1][:2] == ["l02", "l04"]


async def test_recently_used_bundles_stay(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    crowd(root, KEEP_NEWEST + 3)
    for path in (root / "code").glob("*.tar"):
        os.utime(path)
    async with here() as host:
        await clean(host, str(root), [], [])
    assert len(list((root / "code").glob("*.tar"))) == KEEP_NEWEST + 3
    assert len(list((root / "lib").iterdir())) == KEEP_NEWEST


async def test_submission_protects_its_bundle_from_a_concurrent_cleanup(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    crowd(root, KEEP_NEWEST + 2)
    async with here() as one, here() as two:
        assert (await inspect_storage(one, str(root), "c00", "l00")).code
        await clean(two, str(root), [], [])  # whose list of jobs does not have the first one's yet
    assert (root / "code" / "c00.tar").exists() and (root / "lib" / "l00").exists()
    assert not (root / "code" / "c01.tar").exists()


async def test_cleanup_waits_for_a_running_submission(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    crowd(root, KEEP_NEWEST + 1)
    late = "echo held; read line; touch $0"
    holder = await asyncio.create_subprocess_exec(
        *("flock", root / "code" / ".lock", "sh", "-c", late, root / "code" / "c00.tar"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert await holder.stdout.readline() == b"held\n"
    async with here() as host:
        cleaning = asyncio.ensure_future(clean(host, str(root), [], []))
        done, _ = await asyncio.wait([cleaning], timeout=0.3)
        assert not done
        await holder.communicate(b"\n")
        await cleaning
    assert (root / "code" / "c00.tar").exists()


def job_tree(root: Path, number: str, tree: Bundle, order: int) -> Path:
    """A job of a month ago: its code unpacked as on the nodes, its log, and what the script wrote between its files."""
    place = root / number
    place.mkdir()
    (place / "code.tar").write_bytes(tree.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CODE", str(place / "code.tar"))
        job_code.working_tree(str(place))
    (place / "code.tar").unlink()
    (place / "rank-0.0.log").write_text("1.0 a\n")
    aged(place / "tree.lock", order)
    return place


async def test_cleanup_removes_sent_files_of_old_trees_and_keeps_job_output(tmp_path: Path, tree: Bundle) -> None:
    root = tmp_path / "jobs"
    crowd(root, 0)
    first, used, wrote = (job_tree(root, number, tree, order) for order, number in enumerate(("1", "2_3", "3")))
    (wrote / "tree" / "checkpoints").mkdir()
    (wrote / "tree" / "checkpoints" / "step-5").write_text("precious")
    for number in range(KEEP_NEWEST):
        job_tree(root, str(100 + number), tree, 10 + number)
    async with here() as host:
        assert (await inspect_storage(host, str(root), "none", "none")).old
        await clean(host, str(root), ["2_3"], [])
    assert sorted(path.name for path in first.iterdir()) == ["rank-0.0.log"]
    assert (used / "tree" / "train.py").exists()
    assert [path.name for path in sorted((wrote / "tree").rglob("*"))] == ["checkpoints", "step-5"]
    assert (root / "100" / "tree" / "train.py").exists()
