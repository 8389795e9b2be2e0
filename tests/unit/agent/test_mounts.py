"""How a host detects and mounts shares: existing files are not hidden, and boot does not wait for a server."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote.agent import facts, file_io, mounts, services, unix_accounts
from shoal.remote.agent.context import ConvergeContext, OperatorConnection
from shoal.remote.agent.running import Failure

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime shared:2 - autofs systemd-1 rw,fd=40
31 22 0:41 / /data rw,relatime shared:3 - fuse.sshfs shoal-share@10.0.0.1:/data rw
32 22 0:42 / /nfs rw,relatime shared:4 - nfs4 10.0.0.1:/nfs rw
33 22 0:43 / /var rw,relatime shared:5 - xfs /dev/vdb rw
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of a host, by path, for all that is read as text."""
    files: dict[str, str] = {"/proc/self/mountinfo": MOUNTINFO}
    for module in (unix_accounts, facts, mounts):
        monkeypatch.setattr(module, "read_text", lambda path: files.get(path, ""))
    assert file_io.read_text("/proc/self/mountinfo") != MOUNTINFO
    return files


def test_share_is_not_counted_as_a_disk_nor_accessed(host: dict[str, str], monkeypatch: Any) -> None:
    asked: list[str] = []
    monkeypatch.setattr(facts, "disk_space", lambda path: asked.append(path) or (100, 50))
    assert unix_accounts.remote_mounts() == {"/home", "/data", "/nfs"}
    facts.disks()
    assert "/home" not in asked and "/" in asked


def test_mountable_filesystems_are_read_from_kernel_tables(host: dict[str, str]) -> None:
    host["/proc/self/status"] = "CapEff:\t000001ffffffffff\n"
    host["/proc/filesystems"] = "nodev\tsysfs\n\text4\n"
    assert facts.filesystems(["nfs4", "nfsd"], "6.1-none") == []
    host["/lib/modules/6.1-none/modules.dep"] = "kernel/fs/nfs/nfsv4.ko.xz: kernel/fs/nfs/nfs.ko.xz\n"
    assert facts.filesystems(["nfs4", "nfsd"], "6.1-none") == ["nfs4"]
    host["/proc/filesystems"] += "nodev\tnfsd\n"
    assert facts.filesystems(["nfs4", "nfsd"], "6.1-none") == ["nfs4", "nfsd"]
    host["/proc/self/status"] = "CapEff:\t00000000a80425fb\n"  # as in most containers
    assert facts.filesystems(["nfs4", "nfsd"], "6.1-none") == []


def test_mount_does_not_hide_existing_files(tmp_path: Path) -> None:
    mounts.reject_hidden_files(str(tmp_path / "none"), mounted=False)
    mounts.reject_hidden_files(str(tmp_path), mounted=False)
    (tmp_path / "lost+found").mkdir()
    mounts.reject_hidden_files(str(tmp_path), mounted=False)
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    with pytest.raises(Failure) as caught:
        mounts.reject_hidden_files(str(tmp_path), mounted=False)
    assert str(caught.value) == (
        f"{tmp_path} has files here that the share would hide: a, b, c, .... Move them away "
        f"(mv {tmp_path} {tmp_path}.old), or give the share another path"
    )
    (tmp_path / "ubuntu" / ".ssh").mkdir(parents=True)
    (tmp_path / "ubuntu" / ".ssh" / "authorized_keys").touch()
    with pytest.raises(Failure) as caught:
        mounts.reject_hidden_files(str(tmp_path), mounted=False)
    assert str(caught.value).endswith(
        "a, b, c, .... ubuntu could no longer log in. Give the share another path: homes may be on any, such as /homes "
        "with `homes: true`"
    )
    with pytest.raises(Failure, match="something else is mounted on"):
        mounts.reject_hidden_files(str(tmp_path), mounted=True)


def test_mount_option_is_used_only_where_the_program_supports_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sshfs"
    monkeypatch.setattr(mounts, "which", lambda name: str(program) if name == "sshfs" and program.exists() else None)
    item = {"fstype": "fuse.sshfs", "options": "rw,nosuid", "if_known": "no_contain_symlinks"}
    assert mounts.all_options(item) == "rw,nosuid"  # it is not installed yet
    program.write_text("#!/bin/sh\necho '    -o follow_symlinks  follow symlinks on the server'\n")
    program.chmod(0o755)
    assert mounts.all_options(item) == "rw,nosuid"
    program.write_text("#!/bin/sh\necho '    -o no_contain_symlinks allow all symlink targets' >&2\n")
    assert mounts.all_options(item) == "rw,nosuid,no_contain_symlinks"
    assert mounts.all_options({**item, "if_known": ""}) == "rw,nosuid"


@cases("autofs", True, False)
def test_share_mount_waits_for_its_server_and_does_not_block_boot(
    monkeypatch: pytest.MonkeyPatch, autofs: bool
) -> None:
    monkeypatch.setattr(mounts, "has_systemd", lambda: True)
    monkeypatch.setattr(mounts, "can_automount", lambda: autofs)
    item = {"where": "/my-data", "what": "10.0.0.1:/d", "fstype": "nfs4", "options": "hard,nofail", "automount": True}
    path, text = mounts.mount_record(item)
    assert path == "/etc/systemd/system/my\\x2ddata.mount"
    assert "TimeoutSec=infinity\n" in text and "After=network-online.target\n" in text
    assert ("[Automount]\nWhere=/my-data\n" in text) is autofs
    assert ("WantedBy=multi-user.target" in text) is not autofs


@cases("automount", True, False)
def test_new_mount_reloads_systemd_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, automount: bool) -> None:
    """A reload takes a minute on a slow host, and `enable` and `disable` would do it again."""
    calls: list[list[str]] = []
    monkeypatch.setattr(mounts, "run", lambda argv, timeout=0.0: calls.append(argv) or (0, ""))
    for module in (mounts, services):
        monkeypatch.setattr(module, "run_checked", lambda argv, problem: calls.append(argv))
    monkeypatch.setattr(mounts, "has_systemd", lambda: True)
    monkeypatch.setattr(mounts, "can_automount", lambda: True)
    monkeypatch.setattr(mounts, "UNITS", f"{tmp_path}/")
    item = {"where": str(tmp_path / "d"), "what": "10.0.0.1:/d", "fstype": "nfs4", "options": "hard", "mounted": True}
    context = ConvergeContext(OperatorConnection(), str(tmp_path), [], False, str)
    context.changed_units = {"/etc/systemd/system/other.service"}  # another unit of this run has changed as well
    mounts.make_mount({**item, "automount": automount}, context)
    verbs = [argv[1] for argv in calls if "--no-reload" not in argv]
    assert verbs == ["daemon-reload", "start"] and not context.changed_units, calls
    mounts.make_mount({**item, "automount": automount, "mounted": False}, context)
    assert [argv[1] for argv in calls if argv[1] == "daemon-reload"] == ["daemon-reload"] * 2
    assert all("--no-reload" in argv for argv in calls if argv[1] in ("enable", "disable")), calls


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse to make a mount"
)
def test_mount_with_a_dead_program_is_remounted(tmp_path: Path) -> None:
    where = str(tmp_path)
    item = {"where": where, "what": "shares@10.0.0.1:/d", "fstype": "fuse.sshfs", "options": "rw", "mounted": True}
    libc = ctypes.CDLL(None, use_errno=True)
    assert not mounts.is_dead(item)
    program = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={program},rootmode=40000,user_id=0,group_id=0".encode()
    assert libc.mount(b"shares", where.encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
    try:
        os.close(program)
        assert mounts.is_dead(item) and not mounts.is_dead({**item, "fstype": "nfs4"})
    finally:
        assert libc.umount2(where.encode(), 2) == 0


def test_account_is_locked_from_its_expiry_date(host: dict[str, str]) -> None:
    host["/etc/shadow"] = "alice:!:20000:0:99999:7:::\nbob:!:20000:0:99999:7::1:\ncarol:!:20000:0:99999:7::99999:\n"
    assert [unix_accounts.expired(name) for name in ("alice", "bob", "carol", "dave")] == [False, True, False, False]
