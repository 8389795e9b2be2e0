"""Which hosts can use NFS, and its text: exports, settings of both servers, mount options. Pure functions.

A share is exported to each member's address only, with root_squash. The usual `10.0.0.0/8(no_root_squash)` would make
root on any one machine root over all users' files. Calls must come from a port below 1024, which only root of a member
can use: with another port, any program of a user could name any other user as the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.agent.document import HEADER, render_unit, restart_drop_in
from shoal.agent.facts import Facts
from shoal.spec.storage import SharedDirectory

PORT = "2049"
EXPORTS = "/etc/exports.d/shoal.exports"
NFS_CONF = "/etc/nfs.conf.d/shoal.conf"
GANESHA_CONF = "/etc/shoal/ganesha.conf"
GANESHA_UNIT = "/etc/systemd/system/shoal-nfs.service"
GANESHA_SERVICE = "shoal-nfs"
SERVER_DROP_IN = "/etc/systemd/system/nfs-server.service.d/shoal.conf"
UNNEEDED_UNITS = ("rpcbind.socket", "rpcbind.service", "rpc-statd.service")
"""Units that the package starts with the kernel's server; only versions before 4 need them."""
AccessKind = Literal["local", "nfs", "sshfs", "stage"]
FILESYSTEMS = ("nfs4", "nfsd")
"""What the facts report of the hosts' kernels."""
DESCRIPTIONS = {
    "local": "its own directory",
    "nfs": "mounted by NFS",
    "sshfs": "mounted over SSH (sshfs)",
    "stage": "copied before a job and back after it (rsync)",
}


@dataclass(frozen=True)
class ShareAccess:
    """How a host accesses a share, and why not in a better way."""

    kind: AccessKind
    why: str = ""


def choose_access(share: SharedDirectory, server: str, host: str, facts: Facts) -> ShareAccess:
    """The best access that the spec allows and the host supports."""
    if host == server:
        return ShareAccess("local")
    reasons: list[str] = []
    if share.kind == "nfs":
        if "nfs4" in facts.filesystems:
            return ShareAccess("nfs")
        reasons.append("its kernel has no NFS")
    if share.kind in ("nfs", "sshfs"):
        if facts.fuse:
            return ShareAccess("sshfs", "; ".join(reasons))
        reasons.append("it has no FUSE")
    return ShareAccess("stage", "; ".join(reasons))


def kernel_serves_nfs(facts: Facts) -> bool:
    """Whether the host's kernel can serve NFS; otherwise nfs-ganesha does."""
    return "nfsd" in facts.filesystems


@dataclass(frozen=True)
class Export:
    """A directory and the members that may mount it."""

    path: str
    clients: tuple[str, ...]
    """The addresses of the members."""
    read_only: bool = False


def render_exports(exports: Iterable[Export]) -> str:
    """A file of /etc/exports.d for the kernel's server."""
    lines = []
    for export in exports:
        options = f"{'ro' if export.read_only else 'rw'},sync,secure,no_subtree_check,root_squash,sec=sys"
        clients = " ".join(f"{address}({options})" for address in sorted(export.clients, key=_address_key))
        if clients:
            lines.append(f"{export.path} {clients}\n")
    return HEADER + "".join(lines)


def nfs_conf(address: str) -> str:
    """A file of /etc/nfs.conf.d: only version 4.2, only on the cluster network's address."""
    return (
        f"{HEADER}[nfsd]\nhost={address}\nvers2=n\nvers3=n\nvers4=y\nvers4.0=n\nvers4.1=n\nvers4.2=y\n"
        "udp=n\ntcp=y\nrdma=n\n"
    )


def server_drop_in() -> str:
    """Restart the kernel's server until the host has its address: a VPN may take longer than the boot."""
    return restart_drop_in()


def unneeded_unit_drop_in(unit: str) -> tuple[str, str]:
    """A drop-in, as path and text, that keeps a unit off while only NFS 4 is served, whatever starts it."""
    return f"/etc/systemd/system/{unit}.d/shoal.conf", render_unit(Unit={"ConditionPathExists": f"!{NFS_CONF}"})


def ganesha_conf(address: str, exports: Sequence[Export], *, io_flusher: bool = False) -> str:
    """Settings of nfs-ganesha. Clients without the kernel's NFS (libnfs) speak 4.0, so that is served here too.

    `io_flusher`: set what newer releases need to start in a container, where they cannot become an I/O flusher.
    """
    flusher = "    Allow_Set_Io_Flusher_Fail = true;\n" if io_flusher else ""
    blocks = [
        f"{HEADER}NFS_CORE_PARAM {{\n"
        f"    Bind_addr = {address};\n"
        f"    NFS_Port = {PORT};\n"
        "    Protocols = 4;\n"
        "    Enable_NLM = false;\n"
        "    Enable_RQUOTA = false;\n"
        "    Enable_UDP = false;\n"
        f"{flusher}"
        "}\n"
        "NFSv4 {\n"
        "    Minor_Versions = 0, 1, 2;\n"
        "    Only_Numeric_Owners = true;\n"
        # As with the kernel's server; a client away for longer requests its locks again.
        "    Lease_Lifetime = 60;\n"
        "    Grace_Period = 60;\n"
        "}\n"
        # No Access_Type here: it would apply to the path to the exports too. An export admits only its clients.
        "EXPORT_DEFAULTS {\n"
        "    Squash = Root_Squash;\n"
        "    Anonymous_Uid = 65534;\n"
        "    Anonymous_Gid = 65534;\n"
        "    SecType = sys;\n"
        "    Protocols = 4;\n"
        "    Transports = TCP;\n"
        "    PrivilegedPort = true;\n"
        "}\n"
    ]
    for number, export in enumerate(exports, start=1):
        clients = ", ".join(sorted(export.clients, key=_address_key))
        blocks.append(
            "EXPORT {\n"
            f"    Export_Id = {number};\n"
            f"    Path = {export.path};\n"
            f"    Pseudo = {export.path};\n"
            "    FSAL { Name = VFS; }\n"
            "    CLIENT {\n"
            f"        Clients = {clients or '127.0.0.1'};\n"
            f"        Access_Type = {'RO' if export.read_only else 'RW'};\n"
            "        Squash = Root_Squash;\n"
            "        Protocols = 4;\n"
            "        PrivilegedPort = true;\n"
            "    }\n"
            "}\n"
        )
    return "".join(blocks)


def supports_io_flusher(os_id: str, os_version: str) -> bool:
    """Whether the host's ganesha is release 5 or later. An older one rejects the setting."""
    first = {"debian": 13.0, "ubuntu": 25.0}.get(os_id, 0.0)
    try:
        return float(os_version) >= first
    except ValueError:
        return True  # a release without a number yet


def ganesha_unit() -> str:
    """Our own unit: the package's starts rpcbind and rpc.statd, which version 4 does not need."""
    return render_unit(
        Unit={
            "Description": "NFS server of the cluster's shares (nfs-ganesha)",
            "Wants": "network-online.target",
            "After": "network-online.target dbus.service",
            "Conflicts": "nfs-ganesha.service nfs-server.service",
            # Retry until the host has its address.
            "StartLimitIntervalSec": 0,
        },
        Service={
            "RuntimeDirectory": "ganesha",
            "ExecStart": f"/usr/bin/ganesha.nfsd -F -L STDERR -N NIV_WARN -p /run/ganesha/shoal.pid -f {GANESHA_CONF}",
            "Restart": "always",
            "RestartSec": 2,
            "LimitNOFILE": 1048576,
        },
        Install={"WantedBy": "multi-user.target"},
    )


def mount_options(connections: int, *, read_only: bool) -> str:
    """`hard`: a job waits for a server that is down, and continues when it is back."""
    mode = "ro" if read_only else "rw"
    return (
        f"{mode},vers=4.2,proto=tcp,hard,noatime,nosuid,nodev,nconnect={connections},rsize=1048576,wsize=1048576,"
        "retry=10000,_netdev,nofail"
    )


def _address_key(address: str) -> tuple[int, list[int] | list[str]]:
    return (1, [address]) if ":" in address else (0, [int(part) for part in address.split(".")])
