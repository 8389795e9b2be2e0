"""Shares in `shoal status` and `shoal check`: space, quotas, mounts; and no wait for a server that is down."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fake_world import host_facts, spec_of

from shoal.agent.facts import FileFact
from shoal.hosts.api import Result, Target
from shoal.plan.connections import Connections
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


def test_free_space_and_quotas_are_parsed() -> None:
    assert parse_df(DF) == (504000, 490000)
    assert parse_df("df: /srv/data: No such file or directory\n") is None
    assert parse_quotas(DF + QUOTA) == {"alice": (2048, 5120), "bob": (3072, 2048)}
    assert parse_quotas(DF) == {}


def test_quotas_are_read_for_the_mount_point_of_the_directory(tmp_path: Path) -> None:
    """repquota takes a mount point or a device, and prints nothing for any other directory."""
    (tmp_path / "df").write_text(f"#!/bin/sh\ncat <<'END'\n{DF}END\n")
    (tmp_path / "repquota").write_text(f'#!/bin/sh\n[ "$*" = "-u -O csv -- /dev/sda1" ] && cat <<"END"\n{QUOTA}END\n')
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    look = ["sh", "-c", shares.SPACE_SCRIPT, "sh", "/srv/data"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(look, env=env, capture_output=True, text=True, check=True).stdout == DF + QUOTA
    missing = subprocess.run([*look[:-1], str(tmp_path / "no")], capture_output=True, check=False)
    assert missing.returncode != 0 and missing.stdout == b""


async def test_every_share_is_queried_on_its_server() -> None:
    async with fleet(FakeHost("c1", {("sh",): (DF + QUOTA).encode()}), FakeHost("n1", {("sh",): b""})) as hosts:
        home, data = await share_states(SPEC, hosts)
    assert (home.where, home.server, home.total_mb, home.free_mb) == ("/home", "c1", 504000, 490000)
    assert home.quotas["alice"] == (2048, 5120)
    assert data == ShareState("/data", "sshfs", "n1", trouble="not on n1 yet; run `shoal up`")


async def test_silent_unreachable_or_uncreated_server_is_reported_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "SHARE_TIMEOUT_S", 0.05)
    async with fleet(FakeHost("c1", {("sh",): hang}), FakeHost("n1", unreachable=True)) as hosts:
        troubles = [state.trouble for state in await share_states(SPEC, hosts)]
    assert troubles == ["c1 does not answer", "n1 does not answer"]
    async with fleet(FakeHost("c1", {("sh",): DF.encode()})) as hosts:
        assert (await share_states(SPEC, hosts))[1].trouble == "its host is not made yet"


def test_access_of_each_host_is_reported_with_the_limitation() -> None:
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


async def test_silent_share_is_reported_only_where_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The findings about /home, which is on an overlay, where the nodes' kernels have these file systems."""
    nodes = {"n1": "10.0.0.11", "n2": "10.0.0.12"}
    facts = {name: host_facts(name, at, filesystems=kernel_has) for name, at in nodes.items()}
    facts["c1"] = host_facts("c1", "10.0.0.1", filesystems=())
    async with fleet(FakeHost("c1", {python_command("probes", "handles", "/home"): b"/home overlayfs\n"})) as hosts:
        return [f"{finding.level}: {finding}" for finding in await unservable_share_findings(SPEC, facts, hosts)]


async def test_share_that_ganesha_cannot_serve_is_reported_with_the_affected_hosts() -> None:
    why = "/home is on overlayfs, which has no file handles for nfs-ganesha"
    assert await told_of_home("nfs4") == [
        f"error: c1: /home is not served by NFS, and n[1-2] cannot mount it, found {why}, set `path` to "
        "a directory on ext4 or XFS, or set `kind: sshfs`"
    ]
    assert await told_of_home() == [f"info: c1: /home is not served by NFS, found {why}"]


async def test_kernel_server_and_hanging_server_are_not_probed_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SHARE_TIMEOUT_S", 0.05)
    by_kernel = {"c1": host_facts("c1", "10.0.0.1", filesystems=("nfsd",))}
    async with fleet(FakeHost("c1")) as hosts:
        assert await unservable_share_findings(SPEC, by_kernel, hosts) == []
    async with fleet(FakeHost("c1", {("python3",): hang})) as hosts:
        assert await unservable_share_findings(SPEC, {"c1": host_facts("c1", "10.0.0.1", filesystems=())}, hosts) == []


def test_file_handles_are_probed_and_a_missing_directory_is_skipped() -> None:
    line = [sys.executable, *python_command("probes", "handles", "/proc", "/dev/shm", "/not/there")[1:]]
    assert subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout == "/proc proc\n"
