"""How each host accesses a share, and the files of shares as whole texts."""

import subprocess
from pathlib import Path
from shutil import which

import pytest
from tests.support.cases import cases

from shoal.agent.facts import Facts
from shoal.spec.storage import SharedDirectory
from shoal.storage import nfs, sshfs
from shoal.storage.nfs import Export, ShareAccess, choose_access, kernel_serves_nfs
from shoal.storage.sshfs import MemberKey

HEADER = "# Written by shoal; changes here are lost.\n"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5"


def test_export_names_each_member_and_squashes_root() -> None:
    some = [Export("/home", ("10.0.0.12", "10.0.0.2")), Export("/apps", ("10.0.0.2",), read_only=True)]
    assert nfs.render_exports(some) == (
        HEADER + "/home 10.0.0.2(rw,sync,secure,no_subtree_check,root_squash,sec=sys) "
        "10.0.0.12(rw,sync,secure,no_subtree_check,root_squash,sec=sys)\n"
        "/apps 10.0.0.2(ro,sync,secure,no_subtree_check,root_squash,sec=sys)\n"
    )
    assert nfs.render_exports([Export("/home", ())]) == HEADER


def test_kernel_server_uses_a_single_version_and_address() -> None:
    assert nfs.nfs_conf("10.0.0.1") == (
        HEADER + "[nfsd]\nhost=10.0.0.1\nvers2=n\nvers3=n\nvers4=y\nvers4.0=n\nvers4.1=n\nvers4.2=y\n"
        "udp=n\ntcp=y\nrdma=n\n"
    )


def test_ganesha_listens_on_a_single_address_and_accepts_only_members() -> None:
    text = nfs.ganesha_conf("10.0.0.1", [Export("/srv/data", ("10.0.0.12", "10.0.0.2")), Export("/apps", (), True)])
    head, data, apps = text.split("EXPORT {\n")
    assert "    Bind_addr = 10.0.0.1;\n" in head and "    Protocols = 4;\n" in head
    assert "    Squash = Root_Squash;\n" in head and "Access_Type" not in head
    assert "    PrivilegedPort = true;\n" in head, "users' programs cannot pose as other users"
    assert data == (
        "    Export_Id = 1;\n    Path = /srv/data;\n    Pseudo = /srv/data;\n    FSAL { Name = VFS; }\n"
        "    CLIENT {\n        Clients = 10.0.0.2, 10.0.0.12;\n        Access_Type = RW;\n"
        "        Squash = Root_Squash;\n        Protocols = 4;\n        PrivilegedPort = true;\n    }\n}\n"
    )
    assert "        Clients = 127.0.0.1;\n        Access_Type = RO;\n" in apps
    assert text.count("{") == text.count("}")


def test_only_a_newer_ganesha_gets_the_setting_for_containers() -> None:
    assert "Allow_Set_Io_Flusher_Fail = true;" in nfs.ganesha_conf("10.0.0.1", [], io_flusher=True)
    assert "Flusher" not in nfs.ganesha_conf("10.0.0.1", [])
    releases = [("debian", "12"), ("debian", "13"), ("debian", ""), ("ubuntu", "24.04"), ("ubuntu", "26.04")]
    assert [nfs.supports_io_flusher(*release) for release in releases] == [False, True, True, False, True]


def test_both_servers_restart_until_the_host_has_its_address() -> None:
    again = "[Unit]\nStartLimitIntervalSec=0\n\n[Service]\nRestart=on-failure\nRestartSec=3\n"
    assert nfs.server_drop_in() == HEADER + again
    unit = nfs.ganesha_unit()
    assert "StartLimitIntervalSec=0\n" in unit and "Restart=always\n" in unit
    assert "rpcbind" not in unit and "lock" not in unit and f"-f {nfs.GANESHA_CONF}\n" in unit


@pytest.mark.skipif(not which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_units_without_a_warning(tmp_path: Path) -> None:
    """With stand-ins for the programs and units that only a server has."""
    own = {nfs.GANESHA_UNIT: nfs.ganesha_unit().replace("/usr/bin/ganesha.nfsd", "/bin/true")}
    own[nfs.SERVER_DROP_IN] = nfs.server_drop_in()
    own |= dict(map(nfs.unneeded_unit_drop_in, nfs.UNNEEDED_UNITS))
    package = "[Unit]\nWants=rpcbind.socket rpc-statd.service\n[Service]\nType=oneshot\nExecStart=/bin/true\n"
    own["nfs-server.service"] = package
    own |= dict.fromkeys(("rpcbind.service", "rpc-statd.service"), "[Service]\nExecStart=/bin/true\n")
    own["rpcbind.socket"] = "[Socket]\nListenStream=/run/rpcbind.sock\n"
    for path, text in own.items():
        place = tmp_path / path.removeprefix("/etc/systemd/system/")
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    units = [str(tmp_path / name) for name in ("shoal-nfs.service", "nfs-server.service")]
    line, env = ["systemd-analyze", "verify", "--man=no", *units], {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    checked = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_nfs_mounts_are_hard_and_ignore_set_uid() -> None:
    options = nfs.mount_options(8, read_only=False).split(",")
    assert {"rw", "hard", "vers=4.2", "nconnect=8", "nosuid", "nodev", "_netdev", "nofail"} <= set(options)
    assert nfs.mount_options(4, read_only=True).startswith("ro,")


def test_member_key_is_valid_only_for_sftp_from_its_address() -> None:
    keys = [MemberKey("n2", "10.0.0.12", KEY), MemberKey("n1", "fd00::11", KEY)]
    text = sshfs.render_authorized_keys(keys)
    assert text == (
        f'restrict,from="fd00::11",command="internal-sftp" {KEY} shoal n1\n'
        f'restrict,from="10.0.0.12",command="internal-sftp" {KEY} shoal n2\n'
    )
    users = f"{KEY} alice@desk\n{KEY} shoal n3\n"
    assert sshfs.parse_authorized_keys(users + text) == {"n1": keys[1], "n2": keys[0]}
    assert sshfs.strip_comment(f"{KEY} root@n1\n") == KEY
    assert sshfs.strip_comment("") == sshfs.strip_comment("-----BEGIN OPENSSH PRIVATE KEY-----\n") == ""
    known_hosts = sshfs.render_known_hosts({"10.0.0.2": KEY, "10.0.0.1": KEY})
    assert known_hosts == f"{HEADER}10.0.0.1 {KEY}\n10.0.0.2 {KEY}\n"


def test_share_account_is_confined_and_other_logins_unchanged() -> None:
    lines = sshfs.sshd_conf().splitlines()
    assert lines[1] == "Match User shoal-share"
    inside = {line.strip() for line in lines[2:]}
    assert {"ChrootDirectory /srv/shoal-shares", "ForceCommand internal-sftp -u 0", "DisableForwarding yes"} <= inside
    assert all(line.startswith("    ") for line in lines[2:])


def test_home_is_mounted_with_the_ids_and_permissions_of_its_user() -> None:
    options = set(sshfs.mount_options(read_only=False, owner=(2001, 2001)).split(","))
    assert {"default_permissions", "idmap=user", "uid=2001", "gid=2001", "allow_other"} <= options
    shared = set(sshfs.mount_options(read_only=True).split(","))
    assert "ro" in shared and "default_permissions" not in shared
    for some in (options, shared):
        assert {"StrictHostKeyChecking=yes", "GlobalKnownHostsFile=/dev/null", "BatchMode=yes", "nosuid"} <= some


NFS, SSHFS, STAGE = (SharedDirectory(kind=kind) for kind in ("nfs", "sshfs", "stage"))
WHOLE = Facts(filesystems=("nfs4", "nfsd"), fuse=True)
FUSE = Facts(fuse=True)
POD = Facts()


@cases(
    "share, facts, expected",
    pytest.param(NFS, WHOLE, ShareAccess("nfs"), id="a whole host"),
    pytest.param(NFS, FUSE, ShareAccess("sshfs", "its kernel has no NFS"), id="no NFS"),
    pytest.param(NFS, POD, ShareAccess("stage", "its kernel has no NFS; it has no FUSE"), id="neither"),
    pytest.param(SSHFS, WHOLE, ShareAccess("sshfs"), id="SSH as asked"),
    pytest.param(SSHFS, POD, ShareAccess("stage", "it has no FUSE"), id="SSH and no FUSE"),
    pytest.param(STAGE, WHOLE, ShareAccess("stage"), id="a copy as asked"),
)
def test_host_uses_the_best_supported_access(share: SharedDirectory, facts: Facts, expected: ShareAccess) -> None:
    assert choose_access(share, "c1", "n1", facts) == expected
    assert choose_access(share, "c1", "c1", facts) == ShareAccess("local")


def test_server_of_a_share() -> None:
    assert NFS.server("desktop") == "desktop" and SharedDirectory(host="n1").server("desktop") == "n1"
    assert kernel_serves_nfs(WHOLE) and not kernel_serves_nfs(Facts(filesystems=("nfs4",)))
