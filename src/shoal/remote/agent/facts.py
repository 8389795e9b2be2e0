"""What the host is: system, CPUs, memory, GPUs, disks, network, packages, services."""

from __future__ import annotations

import os
import struct
import sys
import time

from shoal.remote.agent.context import ConvergeContext, Item, has_systemd
from shoal.remote.agent.fast_stdlib import loads
from shoal.remote.agent.file_io import existing_parent, read_bytes, read_text, sha256, write_problem
from shoal.remote.agent.network import addresses, firewall, neighbours
from shoal.remote.agent.packages import installed_facts, package_facts, package_manager
from shoal.remote.agent.running import disk_space, last_lines, run, which
from shoal.remote.agent.services import service_facts
from shoal.remote.agent.unix_accounts import accounts, group_of, remote_mounts, user_of


def gather_facts(ask: Item, context: ConvergeContext) -> Item:
    uname = os.uname()
    release = os_release()
    working_gpus = gpus()
    return {
        "hostname": uname.nodename,
        "os_id": release.get("ID", ""),
        "os_version": release.get("VERSION_ID", ""),
        "os_codename": release.get("VERSION_CODENAME", ""),
        "arch": uname.machine,
        "kernel": uname.release,
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "package_manager": package_manager(),
        "init": "systemd" if has_systemd() else "none",
        "cpu": cpu_topology(os.sched_getaffinity(0), "/sys/devices/system/cpu"),
        "memory_mb": memory_mb(),
        "gpus": working_gpus,
        "pci_gpus": [] if working_gpus else pci_gpus(),
        "disks": disks(),
        "spaces": spaces(ask.get("directories") or []),
        "tun": can_open_device("/dev/net/tun"),
        "fuse": may_mount() and can_open_device("/dev/fuse"),
        "filesystems": filesystems(ask.get("filesystems") or [], uname.release),
        "modules": [name for name in ask.get("modules") or [] if has_module(name, uname.release)],
        "cgroup": cgroup(),
        "boot_id": read_text("/proc/sys/kernel/random/boot_id").strip(),
        "addresses": addresses(),
        "neighbours": neighbours(),
        "firewall": firewall(),
        "users": {
            u.pw_name: {"id": u.pw_uid, "gid": u.pw_gid} for u in accounts(ask.get("users", ()), user_of, "passwd")
        },
        "groups": {g.gr_name: {"id": g.gr_gid} for g in accounts(ask.get("groups", ()), group_of, "group")},
        "files": {path: file_fact(path, how) for path, how in ask.get("files", {}).items()},
        "packages": {
            **installed_facts(ask.get("installed") or []),
            **package_facts(ask.get("packages", []), context),
        },
        "services": service_facts(ask.get("services", []), context),
        "tailscale": tailscale_status() if ask.get("tailscale") else {},
        "clock": time.time(),
    }


def os_release() -> dict[str, str]:
    pairs = (line.partition("=") for line in read_text("/etc/os-release").splitlines())
    return {name: value.strip("\"'") for name, _, value in pairs if name}


def cpu_topology(usable: set[int], folder: str) -> dict[str, int]:
    """Sockets, cores and threads of the usable CPUs. An irregular set counts as one socket of single-threaded cores."""
    cores: dict[tuple[int, int], int] = {}
    for cpu in usable:
        directory = f"{folder}/cpu{cpu}/topology/"
        try:
            place = int(read_text(directory + "physical_package_id")), int(read_text(directory + "core_id"))
        except ValueError:
            cores = {}
            break
        cores[place] = cores.get(place, 0) + 1
    packages = [package for package, _ in cores]
    per_socket = {packages.count(package) for package in packages}
    if len(per_socket) == 1 and len(set(cores.values())) == 1:
        sockets = len(set(packages))
        return {
            "cpus": len(usable),
            "sockets": sockets,
            "cores_per_socket": len(cores) // sockets,
            "threads_per_core": len(usable) // len(cores),
        }
    return {"cpus": len(usable), "sockets": 1, "cores_per_socket": len(usable), "threads_per_core": 1}


def memory_mb() -> int:
    """What may be used: the machine's memory, or the limit of a control group we are in, whichever is lower."""
    total = int(read_text("/proc/meminfo").split("MemTotal:")[1].split()[0]) * 1024
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            base, name = "/sys/fs/cgroup", "memory.max"
        else:
            continue
        while True:
            limit = read_text(base + path.rstrip("/") + "/" + name).strip()
            total = min(total, int(limit)) if limit.isdigit() and int(limit) > 0 else total
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return total >> 20


def gpus() -> list[Item]:
    program = which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    status, text = run(query, timeout=30.0)
    return parse_gpus(text, gpu_minors()) if status == 0 else []


def pci_gpus(base: str = "/sys/bus/pci/devices") -> list[str]:
    """NVIDIA's display devices on the bus, with or without a driver."""
    names = sorted(os.listdir(base)) if os.path.isdir(base) else []
    vendor_names = [name for name in names if read_text(f"{base}/{name}/vendor").strip() == "0x10de"]
    return [name for name in vendor_names if read_text(f"{base}/{name}/class").startswith("0x03")]


def parse_gpus(text: str, minors: dict[str, str]) -> list[Item]:
    gpus = []
    for line in text.splitlines():
        part = [field.strip() for field in line.split(",")]
        if len(part) == 5 and part[0].isdigit():
            index, uuid, name, memory, driver = part
            device = f"/dev/nvidia{minors.get(uuid, index)}"
            megabytes = int(memory) if memory.isdigit() else 0  # [N/A] for a GPU that shares the machine's memory
            gpu = {"index": int(index), "uuid": uuid, "name": name, "memory_mb": megabytes}
            gpus.append({**gpu, "device": device, "driver": driver})
    return gpus


def gpu_minors() -> dict[str, str]:
    """The device number of each GPU by UUID: nvidia-smi's index is in PCI order, the device file's may not be."""
    base = "/proc/driver/nvidia/gpus"
    minors = {}
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        pairs = (line.partition(":") for line in read_text(f"{base}/{name}/information").splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        if "GPU UUID" in fields and "Device Minor" in fields:
            minors[fields["GPU UUID"]] = fields["Device Minor"]
    return minors


def disks() -> list[Item]:
    disks_by_device: dict[int, Item] = {}
    foreign = remote_mounts()
    # Only their free space is read.
    for mount in ("/", "/var", "/home", "/tmp"):  # nosec B108
        # A share whose server is away would hold us up for as long as that lasts.
        if (mount == "/" or mount not in foreign) and os.path.isdir(mount):
            total, free = disk_space(mount)
            disks_by_device.setdefault(os.stat(mount).st_dev, {"mount": mount, "total_mb": total, "free_mb": free})
    return list(disks_by_device.values())


def spaces(paths: list[str]) -> dict[str, Item]:
    """The file systems that directories are on, also of directories to come. Those of other hosts may block."""
    foreign = tuple(mount.rstrip("/") + "/" for mount in remote_mounts())
    found = {}
    for path in paths:
        if not (path + "/").startswith(foreign):
            mount = existing_parent(path)
            while not os.path.ismount(mount):
                mount = os.path.dirname(mount)
            found[path] = {"mount": mount, "free_mb": disk_space(mount)[1], "problem": write_problem(path)}
    return found


MODULE_OF = {"nfs4": "nfsv4"}


def filesystems(names: list[str], release: str) -> list[str]:
    """Which of these the kernel knows, or can load a module for. A host that may mount nothing has none of them."""
    if not names or not may_mount():
        return []
    loaded = read_text("/proc/filesystems").split()
    return [name for name in names if name in loaded or has_module(MODULE_OF.get(name, name), release)]


def may_mount() -> bool:
    """Whether we have CAP_SYS_ADMIN: containers often do not."""
    status = read_text("/proc/self/status")
    return bool(int(status.split("CapEff:")[1].split()[0], 16) >> 21 & 1) if "CapEff:" in status else True


def has_module(name: str, release: str) -> bool:
    """Whether the kernel has a module, loaded, built in or on disk."""
    if os.path.isdir("/sys/module/" + name):
        return True
    folder = f"/lib/modules/{release}/"
    return any(f"/{name}.ko" in read_text(folder + table) for table in ("modules.builtin", "modules.dep"))


def can_open_device(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def file_fact(path: str, how: str) -> Item:
    if how == "there":
        return {"there": os.path.exists(path)}
    if how == "program":
        return {"there": os.path.isfile(path) and os.access(path, os.X_OK)}
    try:
        data = read_bytes(path)
    except OSError:
        return {}
    return {"sha256": sha256(data)} if how == "hash" else {"text": data.decode("utf-8", "replace")}


OF_HOST = ("Version", "TUN", "BackendState", "TailscaleIPs")
OF_NODE = (
    *("HostName", "TailscaleIPs", "CurAddr", "Relay", "PeerRelay"),
    *("Online", "Active", "Expired", "KeyExpiry", "Tags"),
)


def tailscale_status() -> Item:
    """Part of `tailscale status --json`. Empty on a host without Tailscale; a `problem` where it does not answer."""
    program = which("tailscale")
    if not program:
        return {}
    _, text = run([program, "status", "--json"], timeout=10.0)
    try:
        # The client may warn of something before.
        status = loads(text[text.index("{") :])
        return {
            **{name: status[name] for name in OF_HOST if name in status},
            "Self": _node(status.get("Self") or {}),
            "Peer": [_node(peer) for peer in (status.get("Peer") or {}).values()],
        }
    except (ValueError, AttributeError, TypeError):
        return {"problem": last_lines(text, 1) or "no output"}


def _node(node: Item) -> Item:
    return {name: node[name] for name in OF_NODE if name in node}


BASE = "/sys/fs/cgroup"
BPF_CALL = {"x86_64": 321, "aarch64": 280}
"""The number of the system call bpf(2)."""
PROG_LOAD, CGROUP_DEVICE = 5, 15
ALLOW_ALL = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)
"""The shortest program there is: return 1."""


def cgroup() -> Item:
    if os.path.exists(BASE + "/cgroup.controllers"):
        return {"version": 2, "writable": unified_controllers() if can_make_cgroup(BASE) else []}
    try:
        names = [name for name in sorted(os.listdir(BASE)) if os.path.exists(f"{BASE}/{name}/cgroup.procs")]
    except OSError:
        names = []
    controllers = [name for name in names if name not in ("systemd", "unified")]
    return {
        "version": 1 if controllers else 0,
        "writable": [name for name in controllers if can_make_cgroup(BASE + "/" + name)],
    }


def unified_controllers() -> list[str]:
    """The controllers, and `devices` where they are confined: there it is a program of the kernel's that does it."""
    devices = ["devices"] if may_load_device_programs() else []
    return [*read_text(BASE + "/cgroup.controllers").split(), *devices]


def can_make_cgroup(folder: str) -> bool:
    """Whether a control group can be made here."""
    probe = f"{folder}/shoal-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError:
        return False
    return True


def may_load_device_programs() -> bool:
    """Whether the kernel takes a program that decides over devices. It may refuse those of containers."""
    import ctypes  # slow to load, and only cgroup v2 takes it

    number = BPF_CALL.get(os.uname().machine)
    if number is None:
        return True  # not seen to be refused
    program, license = ctypes.create_string_buffer(ALLOW_ALL), ctypes.create_string_buffer(b"GPL")
    request = struct.pack(
        "=IIQQ", CGROUP_DEVICE, len(ALLOW_ALL) // 8, ctypes.addressof(program), ctypes.addressof(license)
    )
    attributes = ctypes.create_string_buffer(request, 128)
    handle = ctypes.CDLL(None).syscall(number, PROG_LOAD, attributes, ctypes.sizeof(attributes))
    if handle < 0:
        return False
    os.close(handle)
    return True
