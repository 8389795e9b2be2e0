"""What the host is: system, CPUs, memory, GPUs, disks, network, packages, services."""

from __future__ import annotations

import os
import sys
import time

from shoal.agent.program.accounts import accounts, group_of, remote_mounts, user_of
from shoal.agent.program.cgroups import cgroup
from shoal.agent.program.disk import read_bytes, read_text, sha256
from shoal.agent.program.failure import disk_space
from shoal.agent.program.netlink import addresses, firewall
from shoal.agent.program.packages import package_facts, package_manager
from shoal.agent.program.running import run, which
from shoal.agent.program.services import service_facts
from shoal.agent.program.systemd import has_systemd
from shoal.agent.program.tailscale import tailscale_status
from shoal.agent.program.wire import Item
from shoal.agent.program.world import World


def gather_facts(ask: Item, world: World) -> Item:
    uname = os.uname()
    release = os_release()
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
        "gpus": gpus(),
        "disks": disks(),
        "tun": opens("/dev/net/tun"),
        "fuse": may_mount() and opens("/dev/fuse"),
        "filesystems": filesystems(ask.get("filesystems") or [], uname.release),
        "modules": [name for name in ask.get("modules") or [] if has_module(name, uname.release)],
        "cgroup": cgroup(),
        "boot_id": read_text("/proc/sys/kernel/random/boot_id").strip(),
        "addresses": addresses(),
        "firewall": firewall(),
        "users": {
            a.pw_name: {"id": a.pw_uid, "gid": a.pw_gid} for a in accounts(ask.get("users", ()), user_of, "passwd")
        },
        "groups": {g.gr_name: {"id": g.gr_gid} for g in accounts(ask.get("groups", ()), group_of, "group")},
        "files": {path: file_fact(path, how) for path, how in ask.get("files", {}).items()},
        "packages": package_facts(ask.get("packages", []), world),
        "services": service_facts(ask.get("services", []), world),
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
        where = f"{folder}/cpu{cpu}/topology/"
        try:
            place = int(read_text(where + "physical_package_id")), int(read_text(where + "core_id"))
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
    query = [program, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    status, text = run(query, timeout=30.0)
    return parse_gpus(text, gpu_minors()) if status == 0 else []


def parse_gpus(text: str, minors: dict[str, str]) -> list[Item]:
    found = []
    for line in text.splitlines():
        part = [field.strip() for field in line.split(",")]
        if len(part) == 4 and part[0].isdigit():
            index, uuid, name, memory = part
            device = f"/dev/nvidia{minors.get(uuid, index)}"
            megabytes = int(memory) if memory.isdigit() else 0  # a GPU that shares the machine's memory says [N/A]
            found.append({"index": int(index), "uuid": uuid, "name": name, "memory_mb": megabytes, "device": device})
    return found


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
    seen: dict[int, Item] = {}
    foreign = remote_mounts()
    for mount in ("/", "/var", "/home", "/tmp"):
        # A share whose server is gone would hold us up for as long as that lasts.
        if (mount == "/" or mount not in foreign) and os.path.isdir(mount):
            total, free = disk_space(mount)
            seen.setdefault(os.stat(mount).st_dev, {"mount": mount, "total_mb": total, "free_mb": free})
    return list(seen.values())


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


def opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def file_fact(path: str, how: str) -> Item:
    if how == "there":
        return {"there": os.path.exists(path)}
    try:
        data = read_bytes(path)
    except OSError:
        return {}
    return {"sha256": sha256(data)} if how == "hash" else {"text": data.decode("utf-8", "replace")}
