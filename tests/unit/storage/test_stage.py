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
    text = stage.render_program().replace(stage.LIST, f"{tmp_path}/list").replace('[ "$(id -u)" = 0 ]', "true")
    text = re.sub('as="setpriv.*"', "as=", text.replace("/run/shoal-stage", f"{tmp_path}/stage"))
    text = text.replace("copy() {", f"PATH={tmp_path}:$PATH\ncopy() {{")
    done = subprocess.run(["sh", "-s", way], input=text, text=True, capture_output=True)
    calls = tmp_path / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_all_shares_are_copied_before_a_job_and_writable_shares_back(tmp_path: Path) -> None:
    come = ["shoal-copy@10.0.0.1:/data/ /data/", "shoal-copy@10.0.0.2:/apps/ /apps/"]
    assert run(tmp_path, "in") == (0, come)
    assert run(tmp_path, "out") == (0, [*come, "/data/ shoal-copy@10.0.0.1:/data/"])
    status, calls = run(tmp_path, "in", failing="/data/")
    assert (status, calls[3:]) == (1, come), "the others are copied"


@cases("word", "", "on", "in out")
def test_other_arguments_are_rejected(tmp_path: Path, word: str) -> None:
    assert run(tmp_path, word) == (2, [])


def test_root_does_not_copy_where_users_can_create_links() -> None:
    text = stage.render_program()
    assert "--reuid=shoal-share" in text and "copy() { $as rsync" in text and text.count("rsync") == 1
    out = next(line for line in text.splitlines() if line.strip().startswith("out.rw"))
    assert "--exclude=__pycache__/" in out, "compiled files are not copied back"
    [line] = [line for line in stage.render_sudoers("team").splitlines() if not line.startswith("#")]
    assert line == f"%team ALL=(root) NOPASSWD: {stage.PROGRAM} in, {stage.PROGRAM} out"


def test_copy_logins_are_limited_to_rsync_in_the_share_directory() -> None:
    lines = stage.sshd_block().splitlines()
    assert lines[0] == "Match User shoal-copy"
    inside = {line.strip() for line in lines[1:]}
    assert "ForceCommand /usr/bin/rrsync -no-lock /srv/shoal-shares" in inside
    assert {"DisableForwarding yes", "PermitTTY no"} <= inside
    assert f"AuthorizedKeysFile {sshfs.KEYS}/shoal-share" in inside
