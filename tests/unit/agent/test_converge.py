"""The result of each kind of item, applied for real below a temporary directory."""
# ruff: noqa: ASYNC240 - a test has nothing else to wait for

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from agent_place import ME, Place
from tests.support.cases import cases

from shoal.agent.document import Block, Command, Link, Packages, Secret, SecretRef, Service, User
from shoal.remote.agent.converge import as_result

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# Files


async def test_file_is_created_with_its_directories_owner_and_mode(place: Place) -> None:
    (made,) = await place.apply(place.file("a/b/c.conf", "x\n", mode=0o640))
    assert (made.status, made.action) == ("changed", f"create {place.path('a/b/c.conf')}")
    assert Path(place.path("a/b/c.conf")).read_text() == "x\n"
    assert stat.S_IMODE(os.stat(place.path("a/b/c.conf")).st_mode) == 0o640


@needs_root
async def test_file_of_another_user_and_group_is_created_as_theirs(place: Place) -> None:
    await place.apply(place.file("c.conf", "x\n", owner="daemon", group="mail"))
    made = Path(place.path("c.conf"))
    assert (made.owner(), made.group()) == ("daemon", "mail")


async def test_dry_run_shows_a_unified_diff_and_writes_nothing(place: Place) -> None:
    path = Path(place.path("c.conf"))
    path.write_text("same\nold\n")
    (found,) = await place.check(place.file("c.conf", "same\nnew\n"))
    assert found.diff == f"--- {path}\n+++ {path} (new)\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n"
    assert path.read_text() == "same\nold\n"


async def test_content_of_a_private_file_is_not_shown(place: Place) -> None:
    Path(place.path("c.conf")).write_text("password=old\n")
    os.chmod(place.path("c.conf"), 0o600)
    (found,) = await place.check(place.file("c.conf", "password=new\n", mode=0o600))
    assert found.diff == "(not shown: the file is not world-readable)"


async def test_file_edited_by_hand_is_reported_and_kept(place: Place) -> None:
    path = Path(place.path("c.conf"))
    await place.apply(place.file("c.conf", "one\n"))
    (clean,) = await place.check(place.file("c.conf", "two\n"))
    assert not clean.edited
    path.write_text("mine\n")
    (found,) = await place.check(place.file("c.conf", "two\n"))
    assert found.edited
    (changed,) = await place.apply(place.file("c.conf", "two\n"))
    assert changed.edited and path.read_text() == "two\n"
    backup = Path(changed.detail.removeprefix("it was edited by hand; a copy is kept as "))
    assert backup.read_text() == "mine\n"
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600 and stat.S_IMODE(backup.parent.stat().st_mode) == 0o700
    path.write_text("mine again\n")
    (removed,) = await place.apply(place.file("c.conf", None))
    assert removed.edited and not path.exists()


async def test_file_of_bytes_is_written_compared_and_not_taken_for_edited(place: Place) -> None:
    (created,) = await place.apply(place.file("plugin.so", b"\x7fELF\xff"))
    assert created.status == "changed" and Path(place.path("plugin.so")).read_bytes() == b"\x7fELF\xff"
    (same,) = await place.check(place.file("plugin.so", b"\x7fELF\xff"))
    assert same.status == "ok"
    (found,) = await place.check(place.file("plugin.so", b"\x7fELF\xfe"))
    assert not found.edited and found.diff == "(binary)"
    (closed,) = await place.check(place.file("private", "secret\n", mode=0o600))
    assert closed.diff == "(not shown: the file is not world-readable)"


async def test_edited_secret_is_not_kept(place: Place) -> None:
    secret = place.file("key", SecretRef("key"), mode=0o400)
    await place.apply(secret, key=b"one")
    Path(place.path("key")).write_bytes(b"other")
    (changed,) = await place.apply(
        place.file("key", SecretRef("key", sha256(b"two").hexdigest()), mode=0o400), key=b"two"
    )
    assert changed.status == "changed" and not changed.edited


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@needs_root
@cases("options, problem", ("ro", "is read-only"), ("size=8m", "has 8 MB left"), ids=["read-only", "full"])
async def test_directory_that_a_daemon_cannot_write_stops_the_document(
    place: Place, options: str, problem: str
) -> None:
    path = Path(place.path("daemon"))
    path.mkdir()
    with mounted(path, options):
        items = (place.directory("daemon", writable=True), place.file("after", "x"))
        planned, _ = await place.check(*items)
        failed, skipped = await place.apply(*items)
    for result in (planned, failed):
        assert result.status == "failed" and result.detail == f"{path} cannot be written: its file system {problem}"
    assert skipped.status == "skipped" and not Path(place.path("after")).exists()
    (made,) = await place.apply(place.directory("daemon", writable=True))
    assert made.status in ("ok", "changed")


async def test_only_the_mode_changes_when_only_the_mode_differs(place: Place) -> None:
    await place.apply(place.file("c", "x"))
    (found,) = await place.apply(place.file("c", "x", mode=0o600))
    assert (found.status, found.action) == ("changed", f"set mode 0600 on {place.path('c')}")
    assert stat.S_IMODE(os.stat(place.path("c")).st_mode) == 0o600


REFUSES_BAD = ("sh", "-c", "! grep Bad /dev/stdin | sed 's/^/reader: error: unknown key /' | grep .")


async def test_content_rejected_by_its_reader_is_not_written(place: Place) -> None:
    path = Path(place.path("c.conf"))
    path.write_text("Good=1\n")
    more = {"accepted_by": REFUSES_BAD, "advice": (("Bad", "delete options.Bad"),), "restarts": ("d",)}
    bad = place.file("c.conf", "Bad=1\n", **more)
    for (found,) in (await place.check(bad), await place.apply(bad)):
        assert found.status == "failed"
        assert found.detail == f"reader: error: unknown key Bad=1\n{path} was not changed"
        assert found.fix == "delete options.Bad" and path.read_text() == "Good=1\n"
    assert not Path(place.path("state/pending-restarts")).exists()
    (made,) = await place.apply(place.file("c.conf", "Good=2\n", accepted_by=REFUSES_BAD))
    assert made.status == "changed" and path.read_text() == "Good=2\n"


async def test_content_is_not_validated_when_the_reader_is_missing(place: Place) -> None:
    reader = ("env", "CONF=/dev/stdin", "no-such-reader")
    (made,) = await place.apply(place.file("c.conf", "Bad=1\n", accepted_by=reader))
    assert made.status == "changed"


async def test_link_is_created_once_and_does_not_replace_a_file(place: Place) -> None:
    Path(place.path("lib.so.2")).write_text("library")
    link = Link(place.path("lib.so"), "lib.so.2")
    assert (await place.check(link))[0].action == f"link {place.path('lib.so')} to lib.so.2"
    assert [(await place.apply(link))[0].status for _ in range(2)] == ["changed", "ok"]
    assert Path(place.path("lib.so")).read_text() == "library"
    os.unlink(place.path("lib.so.2"))
    assert (await place.apply(link))[0].detail == "there is no lib.so.2 yet"
    os.unlink(place.path("lib.so"))
    Path(place.path("lib.so")).write_text("somebody's own")
    assert (await place.apply(link))[0].status == "ok"
    assert Path(place.path("lib.so")).read_text() == "somebody's own"


async def test_unwanted_file_is_removed(place: Place) -> None:
    Path(place.path("c")).write_text("x")
    assert [(await place.apply(place.file("c", None)))[0].status for _ in range(2)] == ["changed", "ok"]
    assert not os.path.exists(place.path("c"))


async def test_link_in_place_of_a_file_is_replaced_and_its_target_kept(place: Place) -> None:
    Path(place.path("target")).write_text("precious")
    os.symlink(place.path("target"), place.path("c"))
    await place.apply(place.file("c", "new"))
    assert not os.path.islink(place.path("c")) and Path(place.path("c")).read_text() == "new"
    assert Path(place.path("target")).read_text() == "precious"


async def test_directory_in_place_of_a_file_fails_with_the_fix(place: Place) -> None:
    os.mkdir(place.path("c"))
    (found,) = await place.apply(place.file("c", "new"))
    path = place.path("c")
    assert found.status == "failed"
    assert found.detail == f"{path} is a directory, and a file is wanted there; move it away: mv {path} {path}.old"


async def test_missing_owner_is_a_change_in_a_dry_run_and_fails_when_applied(place: Place) -> None:
    items = (place.file("c", "x", owner="nobody-yet"), place.directory("d", group="nobody-yet"))
    os.mkdir(place.path("d"))
    Path(place.path("c")).write_text("x")
    assert [item.status for item in await place.check(*items)] == ["change", "change"]
    failed, skipped = await place.apply(*items)
    assert failed.detail == (
        f"there is no user nobody-yet on this host to own {place.path('c')}; name it earlier in the document"
    )
    assert (skipped.status, skipped.detail) == ("skipped", f"after the failure of file {place.path('c')}")


async def test_secret_file_is_compared_by_digest_without_its_value(place: Place) -> None:
    item = place.file("key", SecretRef("k", sha256(b"abc").hexdigest()), mode=0o400)
    assert [(await place.check(item))[0].status, (await place.apply(item, k=b"abc"))[0].status] == ["change", "changed"]
    assert (await place.check(item))[0].status == "ok"
    Path(place.path("key")).write_bytes(b"abd")
    assert (await place.check(item))[0].status == "change"
    (found,) = await place.apply(item)
    assert found.detail == f"the value of the secret for {place.path('key')} was not given"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=True)
    try:
        yield small
    finally:
        subprocess.run(["umount", str(small)], check=True)


@needs_root
async def test_full_disk_fails_the_item_with_sizes_and_keeps_the_old_file(place: Place, full_disk: Path) -> None:
    (full_disk / "c").write_text("old")
    (found,) = await place.apply(place.file("small/c", "x" * 100_000))
    assert found.status == "failed"
    assert found.detail.startswith(f"No space left on device: {full_disk} has 0 MB free of 0 MB; free some space")
    assert os.listdir(full_disk) == ["c"] and (full_disk / "c").read_text() == "old"


# Blocks


@cases(
    "before, after",
    pytest.param(None, b"# BEGIN shoal b\nx\n# END shoal b\n", id="no file"),
    pytest.param(b"a\xff\r\n", b"a\xff\r\n# BEGIN shoal b\nx\n# END shoal b\n", id="bytes of others stay"),
    pytest.param(b"a", b"a\n# BEGIN shoal b\nx\n# END shoal b\n", id="no newline at the end"),
    pytest.param(
        b"a\n# BEGIN shoal b\nold\nold\n# END shoal b\nz",
        b"a\n# BEGIN shoal b\nx\n# END shoal b\nz",
        id="replaced in its place",
    ),
    pytest.param(
        b"# BEGIN shoal bb\nother\n# END shoal bb\n",
        b"# BEGIN shoal bb\nother\n# END shoal bb\n# BEGIN shoal b\nx\n# END shoal b\n",
        id="a block of another name stays",
    ),
    pytest.param(b"# BEGIN shoal b\nold\n# END shoal b", b"# BEGIN shoal b\nx\n# END shoal b\n", id="cut at the end"),
)
async def test_block_is_added_to_a_file_and_the_rest_stays(place: Place, before: bytes | None, after: bytes) -> None:
    path = Path(place.path("hosts"))
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o604)
    item = Block(str(path), "b", "x")
    assert [(await place.apply(item))[0].status for _ in range(2)] == ["changed", "ok"]
    assert path.read_bytes() == after
    assert stat.S_IMODE(path.stat().st_mode) == (0o604 if before is not None else 0o644)


async def test_empty_block_is_removed(place: Place) -> None:
    path = Path(place.path("hosts"))
    path.write_bytes(b"a\n# BEGIN shoal b\nx\n# END shoal b\nz\n")
    assert [(await place.apply(Block(str(path), "b", "")))[0].status for _ in range(2)] == ["changed", "ok"]
    assert path.read_bytes() == b"a\nz\n"


async def test_block_in_a_linked_file_keeps_the_link(place: Place) -> None:
    Path(place.path("real")).write_text("a\n")
    os.symlink("real", place.path("hosts"))
    await place.apply(Block(place.path("hosts"), "b", "x"))
    assert os.path.islink(place.path("hosts")) and "BEGIN shoal b" in Path(place.path("real")).read_text()


async def test_block_without_its_end_line_fails_with_the_fix(place: Place) -> None:
    path = Path(place.path("hosts"))
    path.write_text("# BEGIN shoal b\nprecious\n")
    (found,) = await place.apply(Block(str(path), "b", "x"))
    assert found.detail == (
        f"{path} has a line `# BEGIN shoal b` without its `# END shoal b`; "
        "remove that line and what belongs to it, and run again"
    )
    assert path.read_text() == "# BEGIN shoal b\nprecious\n"


@needs_root
async def test_link_of_a_user_in_place_of_a_directory_is_not_followed(place: Place) -> None:
    (Path(place.path("target")) / "in").mkdir(parents=True)
    os.symlink(place.path("target"), place.path("planted"))
    os.lchown(place.path("planted"), 2001, 2001)
    wanted, planted = place.directory("planted/in", mode=0o700), place.path("planted")
    (found,) = await place.apply(wanted)
    assert found.detail == f"{planted} is a link that user 2001 made; remove it, or name another directory"
    os.lchown(planted, 0, 0)  # the administrator's own: disks are often joined in that way
    assert (await place.apply(wanted))[0].status == "changed"


# Commands


async def test_guarded_command_runs_until_its_guard_succeeds(place: Place) -> None:
    item = Command("make it", ("touch", place.path("x")), unless=("test", "-e", place.path("x")))
    assert (await place.check(item))[0].action == "run make it"
    assert [(await place.apply(item))[0].status for _ in range(2)] == ["changed", "ok"]


async def test_command_gets_its_input_and_is_retried(place: Place) -> None:
    script = f"cat > {place.path('in')}; test -e {place.path('second')} || {{ touch {place.path('second')}; exit 1; }}"
    (found,) = await place.apply(Command("flaky", ("sh", "-c", script), stdin="hello", retries=1))
    assert found.status == "changed" and Path(place.path("in")).read_text() == "hello"
    assert "flaky failed; trying again (1 of 1)" in place.told


@cases("size", 9, 3 << 20, ids=["small", "large"])
async def test_command_reads_a_secret_that_has_its_digest(place: Place, size: int) -> None:
    value, copy = os.urandom(size), Path(place.path("copy"))
    right, wrong = sha256(value).hexdigest(), "0" * 64

    def command(digest: str) -> Command:
        return Command("copy", ("sh", "-c", f"cat >{copy}"), stdin=SecretRef("value", digest))

    assert [item.status for item in await place.check(command(right))] == ["change"]
    (rejected,) = await place.apply(command(wrong), value=value)
    assert rejected.detail == f"what copy reads has arrived with another digest than {wrong}" and not copy.exists()
    (missing,) = await place.apply(command(right))
    assert missing.detail == "what copy reads was not given"
    (done,) = await place.apply(command(right), value=value)
    assert done.status == "changed" and copy.read_bytes() == value


@cases(
    "argv, timeout, detail",
    (("sh", "-c", "echo no such partition >&2; exit 4"), 9.0, "it ended with status 4\nno such partition"),
    (("sleep", "60"), 0.1, "it took longer than 0.1 s"),
    (("/no/such/program",), 9.0, "it ended with status 127\n/no/such/program: No such file or directory"),
    (("sh", "-c", "kill -9 $$"), 9.0, "it ended with status 137"),
)
async def test_failed_command_reports_its_exit_status_and_output(
    place: Place, argv: tuple[str, ...], timeout: float, detail: str
) -> None:
    (found,) = await place.apply(Command("it", argv, timeout=timeout))
    assert (found.status, found.detail) == ("failed", detail)


async def test_command_is_not_retried_once_its_guard_succeeds(place: Place) -> None:
    there = place.path("there")
    argv = ("sh", "-c", f"echo already there; touch {there}; exit 1")
    (found,) = await place.apply(Command("it", argv, unless=("test", "-e", there), retries=15))
    assert found.status == "changed"
    os.unlink(there)
    (found,) = await place.apply(Command("it", argv, unless=("test", "-e", there)))
    assert (found.status, found.detail) == ("failed", "it ended with status 1\nalready there")


async def test_command_before_the_file_that_triggers_a_reload_runs_last(place: Place) -> None:
    run = Command("reload", ("touch", place.path("reloaded")), on_change=True)
    items = (run, place.file("c", "x", reloads=("command reload",)))
    assert [item.status for item in await place.check(*items)] == ["ok", "change", "change"]
    results = await place.apply(*items)
    assert [(item.key, item.status) for item in results[1:]] == [
        (f"file {place.path('c')}", "changed"),
        ("command reload", "changed"),
    ]
    assert os.path.exists(place.path("reloaded"))
    assert [item.status for item in await place.apply(*items)] == ["ok", "ok"]


async def test_failed_reload_is_retried_by_the_next_run(place: Place) -> None:
    run = Command("reload", ("test", "-e", place.path("ready")), on_change=True)
    items = (place.file("c", "x", reloads=("command reload",)), run)
    assert [item.status for item in await place.apply(*items)] == ["changed", "failed"]
    Path(place.path("ready")).touch()
    assert [item.status for item in await place.apply(*items)] == ["ok", "changed"]
    assert [item.status for item in await place.apply(*items)] == ["ok", "ok"]


# What a dry run must foresee, and what it must not do


async def test_dry_run_predicts_a_command_guarded_by_an_unwritten_file(place: Place) -> None:
    tell = Command("tell", ("false",), unless=("grep", "-q", "new", place.path("told")))
    await place.apply(place.file("told", "new"))
    items = (place.file("told", "newer", reloads=("command tell",)), tell)
    foreseen = await place.check(*items)
    assert foreseen[-1].action == f"run tell (file {place.path('told')} changes)"
    assert [item.status for item in await place.apply(*items)] == ["changed", "ok"]  # the guard knows better by then
    assert [item.status for item in await place.check(*items)] == ["ok", "ok"]


async def test_dry_run_predicts_missing_users_packages_and_services(place: Place) -> None:
    items = (
        User("shoal-test-user", 64999, "shoal-test-group", groups=("nobody-yet",)),
        Packages(("shoal-no-such-package",)),
        Service("shoal-no-such-service", command=("true",)),
    )
    assert [item.status for item in await place.check(*items)] == ["change"] * 3


async def test_unknown_item_kind_fails_only_that_item(place: Place) -> None:
    class Novelty(Command):
        kind = "novelty"

    (found,) = await place.apply(Novelty("x", ("true",)))
    assert found.detail == "this agent knows no items of kind novelty"


async def test_secret_is_generated_once_and_closed_to_others(place: Place) -> None:
    secret = Secret(place.path("keys/database"), **ME, digits=40)
    (made,) = await place.apply(secret)
    assert (made.status, made.action, made.diff) == ("changed", f"make the secret {secret.path}", "(secret)")
    value = Path(secret.path).read_text()
    assert re.fullmatch("[0-9a-f]{40}\n", value) and stat.S_IMODE(os.stat(secret.path).st_mode) == 0o400
    assert (await place.apply(secret))[0].status == "ok" and Path(secret.path).read_text() == value
    os.chmod(secret.path, 0o644)
    (mended,) = await place.apply(secret)
    assert mended.action == f"set mode 0400 on {secret.path}"
    assert Path(secret.path).read_text() == value and stat.S_IMODE(os.stat(secret.path).st_mode) == 0o400


async def test_generated_secrets_differ(place: Place) -> None:
    await place.apply(Secret(place.path("one"), **ME), Secret(place.path("two"), **ME))
    assert Path(place.path("one")).read_text() != Path(place.path("two")).read_text()


async def test_secret_is_inserted_on_the_host_and_never_shown(place: Place) -> None:
    secret = Secret(place.path("password"), **ME)
    conf = place.file("d.conf", "User=slurm\nPass=@WORD@\n", mode=0o600, fills=(("@WORD@", secret.path),))
    _, planned = await place.check(secret, conf)
    assert (planned.status, planned.diff) == ("change", "(secret)")
    assert {item.status for item in await place.apply(secret, conf)} == {"changed"}
    word = Path(secret.path).read_text().strip()
    assert Path(conf.path).read_text() == f"User=slurm\nPass={word}\n"
    assert {item.status for item in await place.apply(secret, conf)} == {"ok"}
    Path(conf.path).write_text(f"User=root\nPass={word}\n")
    _, found = await place.apply(secret, conf)
    assert (found.action, found.diff) == (f"update {conf.path}", "(secret)")
    assert word not in repr(found) and not any(word in text for text in place.told)


def test_unexpected_error_is_reported_by_its_place_and_not_by_its_message() -> None:
    found = as_result(lambda: {"number": int("hunter2")}, {"key": "x"})
    assert found["status"] == "failed" and "hunter2" not in repr(found)
    assert re.fullmatch(rf"the agent met ValueError at {re.escape(__file__)}:\d+", found["detail"])


async def test_file_with_a_missing_secret_is_not_written(place: Place) -> None:
    conf = place.file("d.conf", "Pass=@WORD@\n", fills=(("@WORD@", place.path("none")),))
    (failed,) = await place.apply(conf)
    assert failed.status == "failed" and "the value of the secret for" in failed.detail
    assert not Path(conf.path).exists()
