"""What is said of shares: room, quotas, how hosts have them; and no wait for a server that is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.plan.fake_world import host_facts, spec_of

from shoal.agent.facts import FileFact
from shoal.hosts.api import Result, Target
from shoal.plan.fleet import Connections
from shoal.remote import python_command
from shoal.roles.shares import RECORD
from shoal.verbs import shares
from shoal.verbs.shares import (
    ShareState,
    parse_df,
    parse_quotas,
    share_probes,
    share_states,
    share_ways,
    unservable_share_findings,
)
from shoal_simulators.fake_host import FakeConnector, FakeHost, FakeProgram

SPEC = spec_of(
    """
cluster: reef
controller: {host: c1}
nodesets:
  lab: {hosts: [n1, n2]}
storage:
  /home: {kind: nfs}
  /data: {kind: sshfs, host: n1, path: /srv/data}
"""
)
DF = """\
Filesystem     1048576-blocks  Used Available Capacity Mounted on
/dev/sda1              504000 14000    490000       3% /
"""
QUOTA = """\
User,BlockStatus,FileStatus,BlockUsed,BlockSoftLimit,BlockHardLimit,BlockGrace,FileUsed,FileSoftLimit,FileHardLimit
root,ok,ok,20,0,0,,2,0,0
alice,ok,ok,2097152,4194304,5242880,,12,0,0
bob,soft,ok,3145728,2097152,0,6days,12,0,0
"""


async def hang(program: FakeProgram) -> int:
    await asyncio.Event().wait()
    return 0


def fleet(*hosts: FakeHost) -> Connections:
    return Connections({host.name: Target(host.name) for host in hosts}, FakeConnector(*hosts))


def test_room_and_quotas_are_read_from_what_the_server_says() -> None:
    assert parse_df(DF) == (504000, 490000)
    assert parse_df("df: /srv/data: No such file or directory\n") is None
    assert parse_quotas(DF + QUOTA) == {"alice": (2048, 5120), "bob": (3072, 2048)}
    assert parse_quotas(DF) == {}


def test_quotas_are_asked_of_the_file_system_that_the_directory_is_in(tmp_path: Path) -> None:
    """repquota takes a mount point or a device, and says nothing of any other directory."""
    (tmp_path / "df").write_text(f"#!/bin/sh\ncat <<'END'\n{DF}END\n")
    (tmp_path / "repquota").write_text(f'#!/bin/sh\n[ "$*" = "-u -O csv -- /dev/sda1" ] && cat <<"END"\n{QUOTA}END\n')
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    look = ["sh", "-c", shares.SPACE_SCRIPT, "sh", "/srv/data"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(look, env=env, capture_output=True, text=True, check=True).stdout == DF + QUOTA


def test_a_directory_that_is_not_there_yet_is_told_as_nothing(tmp_path: Path) -> None:
    said = subprocess.run(
        ["sh", "-c", shares.SPACE_SCRIPT, "sh", str(tmp_path / "no")], capture_output=True, check=False
    )
    assert said.returncode != 0 and said.stdout == b""


async def test_every_share_is_asked_of_the_host_that_keeps_it() -> None:
    async with fleet(FakeHost("c1", {("sh",): (DF + QUOTA).encode()}), FakeHost("n1", {("sh",): b""})) as hosts:
        home, data = await share_states(SPEC, hosts)
    assert (home.where, home.server, home.total_mb, home.free_mb) == ("/home", "c1", 504000, 490000)
    assert home.quotas["alice"] == (2048, 5120)
    assert data == ShareState("/data", "sshfs", "n1", trouble="not on n1 yet; run `shoal up`")


async def test_a_server_that_hangs_or_is_gone_or_not_made_is_said_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "SHARE_TIMEOUT_S", 0.05)
    async with fleet(FakeHost("c1", {("sh",): hang}), FakeHost("n1", unreachable=True)) as hosts:
        assert [state.trouble for state in await share_states(SPEC, hosts)] == [
            "c1 does not answer",
            "n1 does not answer",
        ]
    async with fleet(FakeHost("c1", {("sh",): DF.encode()})) as hosts:
        assert (await share_states(SPEC, hosts))[1].trouble == "its host is not made yet"


def test_how_each_host_has_a_share_is_said_with_what_keeps_it_from_better() -> None:
    facts = {
        "c1": host_facts("c1", "10.0.0.1"),
        "n1": host_facts("n1", "10.0.0.11", filesystems=("nfs4",), fuse=True),
        "n2": host_facts("n2", "10.0.0.12", fuse=False),
    }
    assert [str(finding) for finding in share_ways(SPEC, facts)] == [
        "/home on c1: its own directory",
        "/home on n1: mounted by NFS",
        "/home on n2: copied before a job and back after it (rsync), found its kernel has no NFS; it has no FUSE",
        "/data on c1,n2: copied before a job and back after it (rsync), found it has no FUSE",
        "/data on n1: its own directory",
    ]


async def test_a_share_that_does_not_answer_is_found_where_it_is_mounted_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = {RECORD: FileFact(text="# ours\nautomount /home/alice\nmount /srv/x\n")}
    facts = {"n2": host_facts("n2", "10.0.0.12", files=record), "n1": host_facts("n1", "10.0.0.11")}
    stale = Result(1, stderr=b"stat: cannot read file system information: Transport endpoint is not connected\n")
    monkeypatch.setattr(shares, "SHARE_TIMEOUT_S", 0.05)
    for answer, said in [(stale, "Transport endpoint is not connected"), (hang, "not within 0.05 s")]:
        async with fleet(FakeHost("n2", {("stat",): answer}), FakeHost("n1")) as hosts:
            [finding] = await share_probes(SPEC, facts, hosts)
        assert str(finding) == (
            f"n2: /home/alice does not answer, found {said}, check that c1 is up and that n2 reaches it; "
            "programs that use the share wait until then"
        )
    async with fleet(FakeHost("n2", {("stat",): b"ok"})) as hosts:
        assert await share_probes(SPEC, facts, hosts) == []


async def told_of_home(*kernel_has: str) -> list[str]:
    """What is said of /home, which is on an overlay, where the nodes' kernels have these file systems."""
    nodes = {"n1": "10.0.0.11", "n2": "10.0.0.12"}
    facts = {name: host_facts(name, at, filesystems=kernel_has) for name, at in nodes.items()}
    facts["c1"] = host_facts("c1", "10.0.0.1", filesystems=())
    async with fleet(FakeHost("c1", {python_command("probes", "handles", "/home"): b"/home overlayfs\n"})) as hosts:
        return [f"{finding.level}: {finding}" for finding in await unservable_share_findings(SPEC, facts, hosts)]


async def test_a_share_that_ganesha_serves_to_nobody_is_told_with_who_misses_it() -> None:
    why = "/home is on overlayfs, which has no file handles for nfs-ganesha"
    assert await told_of_home("nfs4") == [
        f"error: c1: /home is not served by NFS, and n[1-2] cannot mount it, found {why}, set `path` to "
        "a directory on ext4 or XFS, or set `kind: sshfs`"
    ]
    assert await told_of_home() == [f"info: c1: /home is not served by NFS, found {why}"]


async def test_the_kernels_own_server_and_one_that_hangs_are_not_asked_for_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "SHARE_TIMEOUT_S", 0.05)
    by_kernel = {"c1": host_facts("c1", "10.0.0.1", filesystems=("nfsd",))}
    async with fleet(FakeHost("c1")) as hosts:
        assert await unservable_share_findings(SPEC, by_kernel, hosts) == []
    async with fleet(FakeHost("c1", {("python3",): hang})) as hosts:
        assert await unservable_share_findings(SPEC, {"c1": host_facts("c1", "10.0.0.1", filesystems=())}, hosts) == []


def test_handles_are_asked_of_each_directory_and_one_that_is_not_there_yet_is_not_spoken_of() -> None:
    line = [sys.executable, *python_command("probes", "handles", "/proc", "/dev/shm", "/not/there")[1:]]
    assert subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout == "/proc proc\n"
