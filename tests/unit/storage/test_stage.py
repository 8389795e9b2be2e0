"""Shares that are copied: what the program does, run as it is with stand-ins for rsync and root."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from shoal.storage import sshfs, stage
from shoal.storage.stage import Copied

SHARES = [Copied("/data", "10.0.0.1"), Copied("/apps", "10.0.0.2", read_only=True)]


def run(tmp_path: Path, way: str, *, failing: str = "") -> tuple[int, list[str]]:
    """The program with its list and lock in a directory of ours; rsync writes down where from and where to."""
    (tmp_path / "list").write_text(stage.copied(SHARES))
    (tmp_path / "rsync").write_text(
        f'#!/bin/sh\nfor one; do from=${{to-}}; to=$one; done\necho "$from $to" >> {tmp_path}/calls\n'
        f'[ "$to" != "{failing}" ]\n'
    )
    (tmp_path / "rsync").chmod(0o755)
    text = stage.program().replace(stage.LIST, f"{tmp_path}/list").replace("/run/shoal-stage", f"{tmp_path}/stage")
    text = (
        re.sub('as="setpriv.*"', "as=", text)
        .replace('[ "$(id -u)" = 0 ]', "true")
        .replace("copy() {", f"PATH={tmp_path}:$PATH\ncopy() {{")
    )
    done = subprocess.run(["sh", "-s", way], input=text, text=True, capture_output=True)
    calls = tmp_path / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_before_a_job_every_share_comes_and_after_it_those_that_may_be_written_go_back(tmp_path: Path) -> None:
    come = ["shoal-copy@10.0.0.1:/data/ /data/", "shoal-copy@10.0.0.2:/apps/ /apps/"]
    assert run(tmp_path, "in") == (0, come)
    assert run(tmp_path, "out") == (0, [*come, "/data/ shoal-copy@10.0.0.1:/data/"])


def test_what_python_compiled_in_a_copy_does_not_go_back() -> None:
    out = next(line for line in stage.program().splitlines() if line.strip().startswith("out.rw"))
    assert "--exclude=__pycache__/" in out


def test_one_share_that_fails_keeps_no_other_from_being_copied_and_is_told(tmp_path: Path) -> None:
    status, calls = run(tmp_path, "in", failing="/data/")
    assert status == 1 and len(calls) == 2


@pytest.mark.parametrize("word", ["", "on", "in out"])
def test_any_other_word_is_refused(tmp_path: Path, word: str) -> None:
    assert run(tmp_path, word) == (2, [])


def test_no_root_copies_what_users_can_put_links_into() -> None:
    assert "--reuid=shoal-share" in stage.program() and "copy() { $as rsync" in stage.program()
    assert stage.program().count("rsync") == 1


def test_users_may_run_the_two_commands_as_root_and_nothing_else() -> None:
    [line] = [line for line in stage.sudoers("team").splitlines() if not line.startswith("#")]
    assert line == f"%team ALL=(root) NOPASSWD: {stage.PROGRAM} in, {stage.PROGRAM} out"


def test_who_comes_to_copy_may_use_rsync_in_the_shares_directory_and_nothing_else() -> None:
    lines = stage.sshd_block().splitlines()
    assert lines[0] == "Match User shoal-copy"
    inside = {line.strip() for line in lines[1:]}
    assert {
        "ForceCommand /usr/bin/rrsync -no-lock /srv/shoal-shares",
        "DisableForwarding yes",
        "PermitTTY no",
    } <= inside
    assert f"AuthorizedKeysFile {sshfs.KEYS}/shoal-share" in inside
