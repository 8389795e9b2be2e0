"""The text of NFS: exports, the kernel server's and nfs-ganesha's settings, mount options. From pure functions.

A share is exported to each member's address alone, and root on a member is nobody on it. Whoever asks for more, as the
usual `10.0.0.0/8(no_root_squash)` does, makes root on any one machine root over everybody's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PORT = "2049"
EXPORTS = "/etc/exports.d/shoal.exports"
NFS_CONF = "/etc/nfs.conf.d/shoal.conf"
GANESHA_CONF = "/etc/shoal/ganesha.conf"
GANESHA_UNIT = "/etc/systemd/system/shoal-nfs.service"
GANESHA_SERVICE = "shoal-nfs"
SERVER_DROP_IN = "/etc/systemd/system/nfs-server.service.d/shoal.conf"
NOT_NEEDED = ("rpcbind.socket", "rpcbind.service", "rpc-statd.service")
"""What the package's own unit starts beside the kernel's server, and only versions before 4 have a use for."""

_HEADER = "# Written by shoal; changes here are lost.\n"


@dataclass(frozen=True)
class Export:
    """A directory and who may mount it."""

    path: str
    clients: tuple[str, ...]
    """The addresses of the members."""
    read_only: bool = False


def exports(some: Iterable[Export]) -> str:
    """A file of /etc/exports.d for the kernel's server."""
    lines = []
    for export in some:
        options = f"{'ro' if export.read_only else 'rw'},sync,no_subtree_check,root_squash,sec=sys"
        clients = " ".join(f"{address}({options})" for address in sorted(export.clients, key=_order))
        if clients:
            lines.append(f"{export.path} {clients}\n")
    return _HEADER + "".join(lines)


def nfs_conf(address: str) -> str:
    """A file of /etc/nfs.conf.d: version 4.2 alone, on the network's address alone."""
    return (
        f"{_HEADER}[nfsd]\nhost={address}\nvers2=n\nvers3=n\nvers4=y\nvers4.0=n\nvers4.1=n\nvers4.2=y\n"
        "udp=n\ntcp=y\nrdma=n\n"
    )


def server_drop_in() -> str:
    """The kernel's server is started again until the host has its address: a VPN may take longer than the boot."""
    return f"{_HEADER}[Unit]\nStartLimitIntervalSec=0\n\n[Service]\nRestart=on-failure\nRestartSec=3\n"


def not_needed_drop_in(unit: str) -> tuple[str, str]:
    """Where it is said of a unit that it stays off while NFS is version 4 alone, and how: whoever wants it started."""
    return f"/etc/systemd/system/{unit}.d/shoal.conf", f"{_HEADER}[Unit]\nConditionPathExists=!{NFS_CONF}\n"


def ganesha_conf(address: str, some: Sequence[Export], *, io_flusher: bool = False) -> str:
    """The same for nfs-ganesha. Clients without a kernel's NFS (libnfs) speak 4.0, so that is served here too.

    `io_flusher`: a release that does not start where it may not become one, as in a container, unless it is told to.
    """
    flusher = "    Allow_Set_Io_Flusher_Fail = true;\n" if io_flusher else ""
    blocks = [
        f"{_HEADER}NFS_CORE_PARAM {{\n"
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
        # As the kernel's server has them; a client that was away for longer asks for its locks again.
        "    Lease_Lifetime = 60;\n"
        "    Grace_Period = 60;\n"
        "}\n"
        # Without an Access_Type here: it would hold for the way to the exports too. An export lets in its clients only.
        "EXPORT_DEFAULTS {\n"
        "    Squash = Root_Squash;\n"
        "    Anonymous_Uid = 65534;\n"
        "    Anonymous_Gid = 65534;\n"
        "    SecType = sys;\n"
        "    Protocols = 4;\n"
        "    Transports = TCP;\n"
        "}\n"
    ]
    for number, export in enumerate(some, start=1):
        clients = ", ".join(sorted(export.clients, key=_order))
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
            "    }\n"
            "}\n"
        )
    return "".join(blocks)


def knows_io_flusher(os_id: str, os_version: str) -> bool:
    """Whether the host's ganesha is of release 5 or later. An older one refuses a setting that it does not know."""
    first = {"debian": 13.0, "ubuntu": 25.0}.get(os_id, 0.0)
    try:
        return float(os_version) >= first
    except ValueError:
        return True  # a release that has no number yet


def ganesha_unit() -> str:
    """A unit of our own: the package's wants rpcbind and rpc.statd, which version 4 has no use for."""
    return (
        f"{_HEADER}[Unit]\n"
        "Description=NFS server of the cluster's shares (nfs-ganesha)\n"
        "Wants=network-online.target\n"
        "After=network-online.target dbus.service\n"
        "Conflicts=nfs-ganesha.service nfs-server.service\n"
        # Until the host has its address, for as long as that takes.
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        "RuntimeDirectory=ganesha\n"
        f"ExecStart=/usr/bin/ganesha.nfsd -F -L STDERR -N NIV_WARN -p /run/ganesha/shoal.pid -f {GANESHA_CONF}\n"
        "Restart=always\n"
        "RestartSec=2\n"
        "LimitNOFILE=1048576\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def mount_options(connections: int, *, read_only: bool) -> str:
    """`hard`: a job waits for a server that is away, and goes on when it returns."""
    mode = "ro" if read_only else "rw"
    return (
        f"{mode},vers=4.2,proto=tcp,hard,noatime,nosuid,nodev,nconnect={connections},rsize=1048576,wsize=1048576,"
        "retry=10000,_netdev,nofail"
    )


def _order(address: str) -> tuple[int, list[int] | list[str]]:
    return (1, [address]) if ":" in address else (0, [int(part) for part in address.split(".")])
