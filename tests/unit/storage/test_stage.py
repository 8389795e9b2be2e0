"""Shares that are copied: the real program, with stand-ins for rsync and root."""

import re
import subprocess
from pathlib import Path

from tests.support.cases import cases

from shoal.storage import sshfs, stage
from shoal.storage.stage import StagedShare

SHARES = [StagedShare("/data", "10.0.0.1"), StagedShare("/apps", "10.0.0.2", read_only=True)]


def run(tmp_path: Path, way: str, *, failing: str = "") -> tuple[int, list[str]]:
    """The program with its list and lock in a directory of ours; rsync writes down where from and where to."""
    (tmp_path / "list").write_text(stage.render_list(SHARES))
    (tmp_path / "rsync").write_text(
        f'#!/bin/sh\nfor one; do from=${{to-}}; to=$one; done\necho "$from $to" >> {tmp_path}/calls\n'
        f'[ "$to" != "{failing}" ]\n'
    )
    (tmp_path / "rsync").chmod(0o755)
    text = (
        stage.render_program().replace(stage.LIST, f"{tmp_path}/list").replace("/run/shoal-stage", f"{tmp_path}/stage")
    )
    text = (
        re.sub('as="setpriv.*"', "as=", text)
        .replace('[ "$(id -u)" = 0 ]', "true")
        .replace("copy() {", f"PATH={tmp_path}:$PATH\ncopy() {{")
    )
    done = subprocess.run(["sh", "-s", way], input=text, text=True, capture_output=True)
    calls = tmp_path / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_all_shares_are_copied_before_a_job_and_writable_shares_back(tmp_path: Path) -> None:
    come = ["shoal-copy@10.0.0.1:/data/ /data/", "shoal-copy@10.0.0.2:/apps/ /apps/"]
    assert run(tmp_path, "in") == (0, come)
    assert run(tmp_path, "out") == (0, [*come, "/data/ shoal-copy@10.0.0.1:/data/"])


def test_compiled_python_files_are_not_copied_back() -> None:
    out = next(line for line in stage.render_program().splitlines() if line.strip().startswith("out.rw"))
    assert "--exclude=__pycache__/" in out


def test_failed_share_is_reported_and_the_others_copied(tmp_path: Path) -> None:
    status, calls = run(tmp_path, "in", failing="/data/")
    assert status == 1 and len(calls) == 2


@cases("word", "", "on", "in out")
def test_other_arguments_are_rejected(tmp_path: Path, word: str) -> None:
    assert run(tmp_path, word) == (2, [])


def test_root_does_not_copy_where_users_can_create_links() -> None:
    assert "--reuid=shoal-share" in stage.render_program() and "copy() { $as rsync" in stage.render_program()
    assert stage.render_program().count("rsync") == 1


def test_users_can_run_only_the_two_commands_as_root() -> None:
    [line] = [line for line in stage.render_sudoers("team").splitlines() if not line.startswith("#")]
    assert line == f"%team ALL=(root) NOPASSWD: {stage.PROGRAM} in, {stage.PROGRAM} out"


def test_copy_logins_are_limited_to_rsync_in_the_share_directory() -> None:
    lines = stage.sshd_block().splitlines()
    assert lines[0] == "Match User shoal-copy"
    inside = {line.strip() for line in lines[1:]}
    assert {
        "ForceCommand /usr/bin/rrsync -no-lock /srv/shoal-shares",
        "DisableForwarding yes",
        "PermitTTY no",
    } <= inside
    assert f"AuthorizedKeysFile {sshfs.KEYS}/shoal-share" in inside
