"""The agent: one program that runs on a host, tells its facts, and brings it to what a document of items says.

It is sent over one connection and fed to the host's `python3` (3.8 or newer, standard library only). It reads one JSON
request a line and answers in JSON lines until `exit` or the end of its input. From top to bottom: talking to the
operator, running programs, facts, writing files, one section for each kind of item (`check_*` only reads, `make_*` only
changes), what is due, and the loop.

It may be killed at any point: a file is written beside its place and renamed; a restart that a change makes due is
noted in `pending-restarts` before the change, and struck out after the restart.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Item = dict[str, Any]

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
    **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
}
SUPERVISED = "/run/shoal/supervise"
SERVICE_LOGS = "/var/log/shoal"
DIFF_LINES = 10000
GONE = "the operator has gone"


class Failure(Exception):
    """An item cannot be brought about. The text says what was found and what to do."""


class Change:
    """What has to be done about an item."""

    def __init__(self, action: str, diff: str = "") -> None:
        self.action = action
        self.diff = diff


# ---------------------------------------------------------------- talking to the operator


class Wire:
    """The connection to the operator: requests in, events out, and whether anybody is still there."""

    def __init__(self) -> None:
        self.buffer = b""
        self.gone = False

    def request(self) -> Item | None:
        """The next request; None when the operator has gone."""
        while b"\n" not in self.buffer:
            if self.gone or not self._read():
                return None
        line, self.buffer = self.buffer.split(b"\n", 1)
        found: Item = json.loads(line)
        return found

    def send(self, event: Item) -> None:
        data = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        while data and not self.gone:
            try:
                data = data[os.write(1, data) :]
            except OSError:
                self.gone = True

    def still_there(self) -> bool:
        """Looks, without waiting, whether the operator has hung up."""
        if not self.gone and select.select([0], [], [], 0)[0]:
            self._read()
        return not self.gone

    def hang_up(self, *_: object) -> None:
        self.gone = True

    def _read(self) -> bool:
        try:
            data = os.read(0, 1 << 20)
        except OSError:
            data = b""
        self.buffer += data
        self.gone = self.gone or not data
        return bool(data)


class World:
    """What one check or apply knows: its items, whether it is a dry run, what is due, and who listens."""

    def __init__(
        self, wire: Wire, state: str, items: list[Item], dry: bool, source: Callable[[], bytes] = bytes
    ) -> None:
        self.wire = wire
        self.state = state
        self.items = items
        self.dry = dry
        self.source = source
        self.key = ""
        self.due = read_due(state)
        self.noted: set[str] = set()  # what this very run made due
        self.replaced: list[tuple[Item, bytes | None, os.stat_result | None]] = []  # what files were before this run
        self.defer = False
        self.reload_units = False
        self._units: dict[str, dict[str, str]] | None = None

    def tell(self, text: str) -> None:
        self.wire.send({"event": "progress", "key": self.key, "text": text})

    def unit(self, name: str) -> dict[str, str]:
        """systemd's view of a service; one call answers for every service of the document."""
        if self._units is None:
            names = [item["name"] for item in self.items if item["kind"] == "service"]
            self._units = show_units(names + [key[8:] for key in self.due if key.startswith("service ")])
        if name not in self._units:
            self._units.update(show_units([name]))
        return self._units[name]

    def forget_units(self) -> None:
        self._units = None


# ---------------------------------------------------------------- running programs


def run(
    argv: list[str], stdin: bytes = b"", timeout: float = 60.0, watch: Callable[[str], None] | None = None
) -> tuple[int, str]:
    """Run a program to its end: its status and what it said. 127: not there; 124: took longer than `timeout`.

    Output goes to memory files, not to pipes: if the agent is killed, a half-done `dpkg` goes on undisturbed. `watch`
    is called with each line the program writes to descriptor 3.
    """
    said, told, given = memory_file(), memory_file(), memory_file()
    try:
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        actions = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, to in ((given, 0), (said, 1), (said, 2), (told, 3))]
        try:
            pid = os.posix_spawnp(
                argv[0], argv, ENVIRONMENT, file_actions=actions, setsid=True, setsigdef=[signal.SIGPIPE]
            )
        except OSError as error:
            return 127, f"{argv[0]}: {error.strerror}"
        return _await(pid, timeout, told, watch), text_of(said)
    finally:
        for fd in (said, told, given):
            os.close(fd)


def _await(pid: int, timeout: float, told: int, watch: Callable[[str], None] | None) -> int:
    deadline, pause, seen = time.monotonic() + timeout, 0.0005, 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if watch:
            data = os.pread(told, 1 << 20, seen)
            whole = data[: data.rfind(b"\n") + 1]
            seen += len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                watch(line)
        if ended:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def memory_file() -> int:
    if hasattr(os, "memfd_create"):
        # High enough to stay clear of the descriptors 0 to 3 that are handed to the child.
        return _raised(os.memfd_create("shoal"))
    import tempfile

    with tempfile.TemporaryFile() as file:
        return _raised(os.dup(file.fileno()))


def _raised(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return high


def text_of(fd: int) -> str:
    size = os.fstat(fd).st_size
    start = max(0, size - (1 << 20))
    return os.pread(fd, size - start, start).decode("utf-8", "replace")


def must(argv: list[str], what: str, timeout: float = 120.0) -> str:
    """Run a program that has to succeed."""
    status, text = run(argv, timeout=timeout)
    if status:
        raise Failure(f"{what}: `{' '.join(argv)}` ended with status {status}\n{last_lines(text)}")
    return text


def last_lines(text: str, count: int = 20) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def which(name: str) -> str | None:
    for folder in (ENVIRONMENT["PATH"] + ":/usr/lib/wsl/lib").split(":"):
        path = folder + "/" + name
        if os.access(path, os.X_OK):
            return path
    return None


# ---------------------------------------------------------------- facts


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
        "fuse": opens("/dev/fuse"),
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
        "services": service_facts(ask.get("services", [])),
        "clock": time.time(),
    }


def os_release() -> dict[str, str]:
    pairs = (line.partition("=") for line in read_text("/etc/os-release").splitlines())
    return {name: value.strip("\"'") for name, _, value in pairs if name}


def package_manager() -> str:
    for name, program in (("apt", "apt-get"), ("dnf", "dnf"), ("yum", "yum"), ("zypper", "zypper"), ("apk", "apk")):
        if which(program):
            return name
    return "pacman" if which("pacman") else "none"


def has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")


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
    for mount in ("/", "/var", "/home", "/tmp"):
        if os.path.isdir(mount):
            total, free = disk_space(mount)
            seen.setdefault(os.stat(mount).st_dev, {"mount": mount, "total_mb": total, "free_mb": free})
    return list(seen.values())


def disk_space(path: str) -> tuple[int, int]:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize >> 20, found.f_bavail * found.f_frsize >> 20


def opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def cgroup() -> Item:
    base = "/sys/fs/cgroup"
    if os.path.exists(base + "/cgroup.controllers"):
        return {"version": 2, "writable": read_text(base + "/cgroup.controllers").split() if can_group(base) else []}
    try:
        names = [name for name in sorted(os.listdir(base)) if os.path.exists(f"{base}/{name}/cgroup.procs")]
    except OSError:
        names = []
    controllers = [name for name in names if name not in ("systemd", "unified")]
    return {
        "version": 1 if controllers else 0,
        "writable": [name for name in controllers if can_group(base + "/" + name)],
    }


def can_group(folder: str) -> bool:
    """Whether a control group can be made here; nothing but trying tells."""
    probe = f"{folder}/shoal-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError:
        return False
    return True


def addresses() -> list[Item]:
    """The addresses of the interfaces, asked of the kernel by netlink: no `ip` program is needed."""
    import socket

    found: list[Item] = []
    for message in netlink_dump(0, 22, bytes(8)):  # RTM_GETADDR
        family, prefix, _, scope, index = struct.unpack_from("=BBBBI", message)
        parts = netlink_fields(message[8:])
        raw = parts.get(2, parts.get(1))  # the local end where there is one, else the address
        if raw and scope not in (253, 254) and family in (socket.AF_INET, socket.AF_INET6):  # not link, not host
            text = socket.inet_ntop(family, raw)
            found.append({"interface": socket.if_indextoname(index), "address": text, "prefix": prefix})
    return found


def firewall() -> str:
    """Who else decides what comes in, and keeps out what nobody let in: `ufw`, or an nftables chain by its name.

    A chain is told by its policy: `nft inet filter input`. Ours, which drops nothing but Slurm's ports, is not among
    them. firewalld keeps its refusal in a rule; it is told by its service.
    """
    if "\nENABLED=yes" in "\n" + read_text("/etc/ufw/ufw.conf"):
        return "ufw"
    dropping = []
    families = {1: "inet", 2: "ip", 10: "ip6"}
    for message in netlink_dump(12, 0xA04, bytes(4)):  # nftables' GETCHAIN
        parts = netlink_fields(message[4:])
        hook = netlink_fields(parts.get(4, b"")).get(1)
        if hook == b"\0\0\0\1" and parts.get(5) == bytes(4) and message[0] in families:  # input, and drop
            names = [parts.get(number, b"").rstrip(b"\0").decode("utf-8", "replace") for number in (1, 3)]
            dropping.append(" ".join(["nft", families[message[0]], *names]))
    return min(dropping, key=lambda name: name.startswith("nft ip6"), default="")


def netlink_dump(protocol: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Every message by which the kernel answers a question; none where it does not answer."""
    import socket

    try:
        link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    except OSError:
        return
    try:
        link.settimeout(5.0)
        link.sendto(struct.pack("=IHHII", 16 + len(body), kind, 0x301, 1, 0) + body, (0, 0))  # request and dump
        while True:
            data = link.recv(1 << 17)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3):  # an error, or the end
                    return
                yield data[16:size]
                data = data[(size + 3) & ~3 :]
    except OSError:
        return
    finally:
        link.close()


def netlink_fields(data: bytes) -> dict[int, bytes]:
    fields = {}
    while len(data) >= 4:
        length, name = struct.unpack_from("=HH", data)
        if length < 4:
            break
        fields[name & 0x3FFF], data = data[4:length], data[(length + 3) & ~3 :]
    return fields


def accounts(names: list[str], find: Callable[[str], Any], table: str) -> list[Any]:
    """The accounts of these names that there are; `*` asks for all that are local to the host."""
    if "*" in names:
        names = [line.partition(":")[0] for line in read_text("/etc/" + table).splitlines() if line[:1] not in "#+-"]
    return [found for found in map(find, names) if found]


def user_of(name: str) -> Any:
    import pwd

    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def group_of(name: str) -> Any:
    import grp

    try:
        return grp.getgrnam(name)
    except KeyError:
        return None


def file_fact(path: str, how: str) -> Item:
    if how == "there":
        return {"there": os.path.exists(path)}
    try:
        data = read_bytes(path)
    except OSError:
        return {}
    return {"sha256": sha256(data)} if how == "hash" else {"text": data.decode("utf-8", "replace")}


def sha256(data: bytes) -> str:
    # `hashlib` loads all of OpenSSL; the small module is in every CPython, under a name that changed with 3.12.
    try:
        from _sha2 import sha256 as digest  # type: ignore[import-not-found]
    except ImportError:
        try:
            from _sha256 import sha256 as digest  # type: ignore[import-not-found]
        except ImportError:
            from hashlib import sha256 as digest
    found: str = digest(data).hexdigest()
    return found


def package_facts(names: list[str], world: World) -> Item:
    if not names or package_manager() != "apt":
        return {}
    installed = installed_packages(names)
    absent = [name for name in names if name not in installed]
    if absent and not have_package_lists():
        world.tell("apt: fetching package lists")
        try:
            update_lists([], world)
        except Failure as failure:
            world.tell(str(failure))
    candidates = package_candidates(absent) if absent else {}
    return {name: {"installed": installed.get(name), "candidate": candidates.get(name)} for name in names}


def installed_packages(names: list[str]) -> dict[str, str]:
    """The versions of those of `names` that are fully installed, read from dpkg's own file: no process is started."""
    try:
        return parse_dpkg_status(read_bytes("/var/lib/dpkg/status"), names)
    except OSError:
        return {}


def parse_dpkg_status(data: bytes, names: list[str]) -> dict[str, str]:
    data = b"\n" + data
    found = {}
    for name in names:
        head = b"\nPackage: " + name.encode() + b"\n"
        start = data.find(head)
        while start >= 0:  # more than once where there is more than one architecture
            stanza = data[start : data.find(b"\n\n", start)]
            if b"\nStatus: install ok installed\n" in stanza or b"\nStatus: hold ok installed\n" in stanza:
                found[name] = stanza.split(b"\nVersion: ")[1].split(b"\n")[0].decode()
                break
            start = data.find(head, start + 1)
    return found


def package_candidates(names: list[str]) -> dict[str, str]:
    return parse_apt_policy(run(["apt-cache", "policy", *names], timeout=120.0)[1])


def parse_apt_policy(text: str) -> dict[str, str]:
    found, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            found[name] = line.split()[1]
    return found


def have_package_lists() -> bool:
    try:
        return any("_Packages" in name for name in os.listdir("/var/lib/apt/lists"))
    except OSError:
        return False


def service_facts(names: list[str]) -> dict[str, str]:
    if not has_systemd():
        return {name: "active" if supervised(name) else "missing" for name in names}
    units = show_units(names)
    return {
        name: "missing" if unit.get("LoadState") == "not-found" else unit.get("ActiveState", "missing")
        for name, unit in units.items()
    }


def show_units(names: list[str]) -> dict[str, dict[str, str]]:
    if not names or not has_systemd():
        return {name: {} for name in names}
    wanted = "Id,Type,LoadState,ActiveState,UnitFileState,NeedDaemonReload,ConditionResult,Result"
    _, text = run(["systemctl", "show", "-p", wanted, "--", *names], timeout=30.0)
    # In the order asked: an alias answers with another Id.
    answers = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {name: answers[i] if i < len(answers) else {} for i, name in enumerate(names)}


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read_text(path: str) -> str:
    """A small file's text; "" when it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- writing files


def write_atomic(path: str, data: bytes, mode: int, uid: int, gid: int) -> None:
    """Put a whole file in place: a reader sees the old one or the new one. A link there is replaced, not followed."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, 0o755)
    temporary = temporary_name(path)
    remove(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(fd, data)
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        remove(temporary)
        if error.errno != errno.EBUSY:
            raise
        write_in_place(path, data)


def write_in_place(path: str, data: bytes) -> None:
    """For a file that is itself a mount point, as /etc/hosts is in many containers: it cannot be renamed over."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        write_all(fd, data)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def temporary_name(path: str) -> str:
    return f"{os.path.dirname(path)}/.{os.path.basename(path)}.shoal-tmp"


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def file_status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def difference(path: str, before: bytes, after: bytes, world: World) -> str:
    """A unified diff, in a dry run: nobody reads it when the change is made, and it can take long."""
    if not world.dry:
        return ""
    import difflib

    try:
        old, new = before.decode().splitlines(True), after.decode().splitlines(True)
    except UnicodeDecodeError:
        return "(binary)"
    if len(old) + len(new) > DIFF_LINES:
        return f"({len(old)} lines become {len(new)})"
    lines = difflib.unified_diff(old, new, path, path + " (new)")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def owner_ids(item: Item, world: World) -> tuple[int, int] | None:
    """The ids of an item's owner and group. None in a dry run when they are still to come."""
    user, group = user_of(item["owner"]), group_of(item["group"])
    if user and group:
        return user.pw_uid, group.gr_gid
    if world.dry:
        return None
    missing = "user " + item["owner"] if not user else "group " + item["group"]
    raise Failure(f"there is no {missing} on this host to own {item['path']}; name it earlier in the document")


def attribute_change(item: Item, found: os.stat_result, world: World) -> str:
    """What has to change about owner, group and mode; "" when nothing has to."""
    ids = owner_ids(item, world)
    if ids is None:
        return f"owner {item['owner']}:{item['group']}"
    notes = []
    if (found.st_uid, found.st_gid) != ids:
        notes.append(f"owner {item['owner']}:{item['group']}")
    if stat.S_IMODE(found.st_mode) != item["mode"]:
        notes.append(f"mode {item['mode']:04o}")
    return ", ".join(notes)


# ---------------------------------------------------------------- files, directories, blocks

OURS = b"Written by shoal"


def check_file(item: Item, world: World) -> Change | None:
    path, found = item["path"], file_status(item["path"])
    if not world.dry and os.path.isdir(os.path.dirname(path)):
        remove(temporary_name(path))  # what a killed run left
    if found and stat.S_ISDIR(found.st_mode):
        raise Failure(f"{path} is a directory, and a file is wanted there; move it away: mv {path} {path}.old")
    if not item.get("secret") and item["content"] is None:
        return Change(f"remove {path}") if found else None
    if found is None:
        refuse_unaccepted(item)
        return Change(f"create {path}", _file_diff(item, b"", found, world))
    if not stat.S_ISREG(found.st_mode):
        refuse_unaccepted(item)
        return Change(f"replace {path}, which is not a regular file", _file_diff(item, b"", found, world))
    before = read_bytes(path)
    if not _same_content(item, before):
        refuse_unaccepted(item)
        return Change(f"update {path}", _file_diff(item, before, found, world))
    notes = attribute_change(item, found, world)
    return Change(f"set {notes} on {path}") if notes else None


def refuse_unaccepted(item: Item) -> None:
    """Stop before content is put in place that the program which is to read it would refuse."""
    if not item.get("accepted_by"):
        return
    status, text = run(item["accepted_by"], stdin=_content(item) or b"", timeout=30.0)
    if status not in (0, 127):  # 127: it is not installed yet, and nobody reads the file
        what = telling_line(text, [item]) or f"`{' '.join(item['accepted_by'])}` ended with status {status}"
        raise Failure(f"{what}{advice([item], text)}\n{item['path']} was not changed")


def telling_line(text: str, items: list[Item]) -> str:
    """The line of a log that says best what is wrong: one that names a word we know, else the first fatal one."""
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    words = [word for item in items for word, _ in item.get("advice", ())]
    for signs in (words, ["fatal"], [""]):
        for line in lines:
            if any(sign.lower() in line.lower() for sign in signs):
                return line
    return ""


def advice(items: list[Item], text: str) -> str:
    """What to do, by the words that a complaint names; "" where it names none of ours."""
    line = telling_line(text, items).lower()
    known = [todo for item in items for word, todo in item.get("advice", ()) if word.lower() in line]
    return f"; {known[0]}" if known else ""


def make_file(item: Item, world: World) -> str:
    path = item["path"]
    remember(item, world)
    note_unit_change(path, world)
    note = keep_foreign(path) if item.get("keep") else ""
    if not item.get("secret") and item["content"] is None:
        remove(path)
        return note
    ids = owner_ids(item, world)
    assert ids
    data = _content(item)
    if data is None and not (os.path.isfile(path) and _same_content(item, read_bytes(path))):
        raise Failure(f"the value of the secret for {path} was not given")
    write_atomic(path, read_bytes(path) if data is None else data, item["mode"], *ids)
    return note


def remember(item: Item, world: World) -> None:
    """Keep what a file was, for the case that the services which read it do not start with the new one."""
    if item["restarts"] and not item.get("secret"):
        found = file_status(item["path"])
        regular = bool(found and stat.S_ISREG(found.st_mode))
        world.replaced.append((item, read_bytes(item["path"]) if regular else None, found if regular else None))


def put_back(path: str, data: bytes | None, found: os.stat_result | None, world: World) -> None:
    note_unit_change(path, world)
    if data is None or found is None:
        remove(path)
    else:
        write_atomic(path, data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def note_unit_change(path: str, world: World) -> None:
    if path.startswith(("/etc/systemd/system/", "/usr/lib/systemd/system/", "/lib/systemd/system/")):
        world.reload_units = True


def keep_foreign(path: str) -> str:
    """Put a file that somebody else wrote aside before ours takes its place; the first one put aside stays."""
    aside, found = path + ".before-shoal", file_status(path)
    if not found or not stat.S_ISREG(found.st_mode) or os.path.exists(aside):
        return ""
    data = read_bytes(path)
    if OURS in data[:200]:
        return ""
    write_atomic(aside, data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
    return f"what was there is kept as {aside}"


def _content(item: Item) -> bytes | None:
    """The bytes wanted. None for a secret whose value did not travel."""
    if not item.get("secret"):
        text: str = item["content"]
        return text.encode()
    if "content_b64" not in item:
        return None
    from binascii import a2b_base64

    return a2b_base64(item["content_b64"])


def _same_content(item: Item, before: bytes) -> bool:
    data = _content(item)
    if data is not None:
        return data == before
    return not item.get("sha256") or item["sha256"] == sha256(before)


def _file_diff(item: Item, before: bytes, found: os.stat_result | None, world: World) -> str:
    if item.get("secret"):
        return "(secret)"
    if found and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o004:
        return "(not shown: the file is not world-readable)"
    return difference(item["path"], before, item["content"].encode(), world)


def check_link(item: Item, world: World) -> Change | None:
    path, found = item["path"], file_status(item["path"])
    if found is None:
        return Change(f"link {path} to {item['target']}")
    if not stat.S_ISLNK(found.st_mode):
        return None  # the thing itself is there
    return Change(f"link {path} to {item['target']}") if not os.path.exists(path) else None


def make_link(item: Item, world: World) -> str:
    path = item["path"]
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    remove(temporary_name(path))
    os.symlink(item["target"], temporary_name(path))
    os.rename(temporary_name(path), path)
    return "" if os.path.exists(path) else f"there is no {item['target']} yet"


def check_directory(item: Item, world: World) -> Change | None:
    path = item["path"]
    try:
        found = os.stat(path)  # a link to a directory will do: disks are often joined in that way
    except (FileNotFoundError, NotADirectoryError):
        return Change(f"create directory {path}")
    if not stat.S_ISDIR(found.st_mode):
        raise Failure(f"{path} is not a directory, and one is wanted there; move it away: mv {path} {path}.old")
    notes = attribute_change(item, found, world)
    return Change(f"set {notes} on {path}") if notes else None


def make_directory(item: Item, world: World) -> str:
    ids = owner_ids(item, world)
    assert ids
    os.makedirs(item["path"], 0o755, exist_ok=True)
    os.chown(item["path"], *ids)
    os.chmod(item["path"], item["mode"])
    return ""


def check_block(item: Item, world: World) -> Change | None:
    path = os.path.realpath(item["path"])
    before = read_bytes(path) if os.path.exists(path) else b""
    after = with_block(before, item["name"], item["content"], path)
    return (
        Change(f"update block {item['name']} in {path}", difference(path, before, after, world))
        if (before != after)
        else None
    )


def make_block(item: Item, world: World) -> str:
    path = os.path.realpath(item["path"])
    found = file_status(path)
    before = read_bytes(path) if found else b""
    mode, uid, gid = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) if found else (0o644, 0, 0)
    write_atomic(path, with_block(before, item["name"], item["content"], path), mode, uid, gid)
    return ""


def with_block(before: bytes, name: str, content: str, path: str) -> bytes:
    """The file with our block in it, or without when `content` is empty. Every other byte stays."""
    begin, end = f"# BEGIN shoal {name}\n".encode(), f"# END shoal {name}\n".encode()
    text = content if not content or content.endswith("\n") else content + "\n"
    block = begin + text.encode() + end if text else b""
    start = 0 if before.startswith(begin) else before.find(b"\n" + begin) + 1
    if not before.startswith(begin) and start == 0:
        gap = b"\n" if block and before and not before.endswith(b"\n") else b""
        return before + gap + block
    stop = (before + b"\n").find(b"\n" + end, start)
    if stop < 0:
        raise Failure(
            f"{path} has a line `{begin.decode().strip()}` without its `{end.decode().strip()}`; "
            "remove that line and what belongs to it, and run again"
        )
    return before[:start] + block + before[stop + 1 + len(end) :]


# ---------------------------------------------------------------- packages

APT = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Status-Fd=3"]
KEEP_FILES = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
APT_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")
APT_TRIES = 3
APT_PAUSES = (2.0, 8.0)
APT_LOCK_WAIT = 900.0
POLICY = "/usr/sbin/policy-rc.d"
POLICY_TEXT = (
    b"#!/bin/sh\n# Made by shoal: daemons start after they are configured, not while packages install.\nexit 101\n"
)
FETCH_TROUBLE = ("Failed to fetch", "Unable to fetch", "Temporary failure", "Could not connect", "Hash Sum mismatch")
NOT_FOUND = ("Unable to locate package", "has no installation candidate")
EXPIRED = ("Release file", "is expired", "is not valid yet")


def check_packages(item: Item, world: World) -> Change | None:
    manager = package_manager()
    if manager != "apt":
        raise Failure(
            f"this host's package manager is {manager}; Shoal installs packages with apt only (Debian, Ubuntu). "
            f"Install {' '.join(item['names'])} by hand, or use a host that has apt"
        )
    missing = missing_packages(item)
    return Change(f"install {' '.join(missing)}") if missing else None


def make_packages(item: Item, world: World) -> str:
    ours = hold_daemons()
    try:
        install(missing_packages(item), world)
    finally:
        if ours:
            remove(POLICY)
    world.forget_units()
    return ""


def missing_packages(item: Item) -> list[str]:
    installed = installed_packages(item["names"])
    return [name for name in item["names"] if name not in installed]


def install(names: list[str], world: World) -> None:
    """apt-get install, patiently: waits for a lock, mends an interrupted dpkg, tries a failing download again."""
    extra: list[str] = []
    if not have_package_lists():
        update_lists(extra, world)
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(world)
        mend_dpkg(world)
        status, text = apt([*extra, *KEEP_FILES, "--no-install-recommends", "install", *names], world)
        if status == 0:
            return
        raise_if_full(text)
        if attempt == APT_TRIES:
            break
        if any(sign in text for sign in NOT_FOUND):
            if attempt > 1:
                break
            world.tell(f"apt: {first_error(text)}; fetching package lists")
        elif any(sign in text for sign in FETCH_TROUBLE):
            retry_later(text, attempt, world)
        elif "fix-broken" in text or "needs to be reinstalled" in text:
            world.tell("apt: mending broken packages")
            apt([*extra, *KEEP_FILES, "--fix-broken", "install"], world)
            continue
        elif "Could not get lock" not in text and "dpkg was interrupted" not in text:
            break
        update_lists(extra, world)
    raise Failure(f"apt-get install {' '.join(names)} failed\n{last_lines(text)}")


def update_lists(extra: list[str], world: World) -> None:
    """apt-get update. Lists past their date are accepted, on another try, only when that is what stood in the way."""
    for attempt in range(1, APT_TRIES + 1):
        wait_for_apt(world)
        _, text = apt([*extra, "update"], world)
        raise_if_full(text)
        if EXPIRED[0] in text and any(sign in text for sign in EXPIRED[1:]) and not extra:
            world.tell("apt: the package lists are past their date; accepting them")
            extra += ["-o", "Acquire::Check-Valid-Until=false", "-o", "Acquire::Check-Date=false"]
        elif any(sign in text for sign in FETCH_TROUBLE) and attempt < APT_TRIES:
            retry_later(text, attempt, world)
        else:
            break
    if not have_package_lists():
        raise Failure(
            f"apt-get update failed: {first_error(text)}\n"
            "There are no package lists on this host; look at its network and at /etc/apt/sources.list*"
        )


def retry_later(text: str, attempt: int, world: World) -> None:
    pause = APT_PAUSES[attempt - 1]
    world.tell(f"apt: {first_error(text)}; trying again in {pause:.0f} s ({attempt + 1} of {APT_TRIES})")
    time.sleep(pause)


def apt(arguments: list[str], world: World) -> tuple[int, str]:
    """One apt-get, its status lines condensed to `download 40%` and `install 75% (slurmd)`."""
    last = [""]

    def watch(line: str) -> None:
        part = line.split(":", 3)
        if len(part) < 4 or part[0] not in ("dlstatus", "pmstatus"):
            return
        percent = int(float(part[2])) // 5 * 5
        text = f"download {percent}%" if part[0] == "dlstatus" else f"install {percent}%"
        if text != last[0]:
            last[0] = text
            world.tell(text if part[0] == "dlstatus" else f"{text} ({part[1].split(':')[0]})")

    return run([*APT, *arguments], timeout=3600.0, watch=watch)


def wait_for_apt(world: World) -> None:
    """Wait until nobody holds apt's locks, saying who does."""
    start, told = time.monotonic(), ""
    while True:
        holders = [holder for holder in map(lock_holder, APT_LOCKS) if holder]
        if not holders:
            return
        if time.monotonic() - start > APT_LOCK_WAIT:
            raise Failure(f"apt has been locked by {holders[0]} for {APT_LOCK_WAIT:.0f} s; end it and run again")
        if not world.wire.still_there():
            raise Failure(GONE)
        if holders[0] != told:
            told = holders[0]
            world.tell(f"apt: waiting for {told} to release the lock")
        time.sleep(0.5)


def lock_holder(path: str) -> str:
    """Who holds a POSIX lock on the file; "" when nobody does."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return ""
    return f"{read_text(f'/proc/{pid}/comm').strip() or 'another process'} (pid {pid})"


def mend_dpkg(world: World) -> None:
    status = read_text("/var/lib/dpkg/status")
    half = (" half-installed\n", " unpacked\n", " half-configured\n", " triggers-pending\n")
    journal = os.path.isdir("/var/lib/dpkg/updates") and os.listdir("/var/lib/dpkg/updates")
    if journal or any("\nStatus: install ok" + sign in status for sign in half):
        world.tell("dpkg: finishing an interrupted installation")
        code, text = run(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"], timeout=1800.0)
        if code:
            raise_if_full(text)
            world.tell(f"dpkg: {first_error(text)}")


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    errors = [line[3:] for line in lines if line.startswith("E: ") or line.startswith("W: Failed to fetch")]
    return errors[0] if errors else lines[-1] if lines else "no output"


def raise_if_full(text: str) -> None:
    if "No space left on device" in text or "You don't have enough free space" in text:
        raise Failure("No space left on device while installing packages: " + space_left("/var/cache/apt/archives"))


def space_left(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    total, free = disk_space(path)
    return f"{path} has {free} MB free of {total} MB; free some space (apt-get clean, old logs) and run again"


def hold_daemons() -> bool:
    """Keep packages from starting their daemons half-configured. False when somebody else's policy is in place."""
    if os.path.exists(POLICY) and read_bytes(POLICY) != POLICY_TEXT:
        return False
    write_atomic(POLICY, POLICY_TEXT, 0o755, 0, 0)
    return True


def release_daemons() -> None:
    """Remove a policy of ours that a killed run left behind, unless its dpkg is still at work."""
    if read_text(POLICY).encode() == POLICY_TEXT and not lock_holder(APT_LOCKS[0]):
        remove(POLICY)


# ---------------------------------------------------------------- groups and users

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "beegfs", "glusterfs")
VOLATILE = ("/proc", "/sys", "/dev", "/run")
SEARCH_SECONDS = 120.0


def check_group(item: Item, world: World) -> Change | None:
    import grp

    name, gid, found = item["name"], item["gid"], group_of(item["name"])
    if found and found.gr_gid == gid:
        return None
    try:
        raise Failure(taken("group", name, gid, grp.getgrgid(gid).gr_name))
    except KeyError:
        pass
    if not found:
        return Change(f"create group {name} with id {gid}")
    refuse_dependants(name, "group", found.gr_gid, gid, *_hand_over(item, world))
    return Change(f"change the id of group {name} from {found.gr_gid} to {gid}")


def make_group(item: Item, world: World) -> str:
    name, gid, found = item["name"], item["gid"], group_of(item["name"])
    if not found:
        must(["groupadd", "--gid", str(gid), "--", name], "could not make group " + name)
        return ""
    owns, services = _hand_over(item, world)
    change = ["groupmod", "--gid", str(gid), "--", name]
    return renumber(world, change, "group", found.gr_gid, gid, owns, services)


def _hand_over(item: Item, world: World) -> tuple[list[str], list[str]]:
    """What may be handed over with a group: what its users' items say."""
    users = [user for user in world.items if user["kind"] == "user" and user["group"] == item["name"]]
    return [path for user in users for path in user["owns"]], [name for user in users for name in user["services"]]


def check_user(item: Item, world: World) -> Change | None:
    import grp
    import pwd

    name, uid, found, group = item["name"], item["uid"], user_of(item["name"]), group_of(item["group"])
    if not found or found.pw_uid != uid:
        try:
            raise Failure(taken("user", name, uid, pwd.getpwuid(uid).pw_name))
        except KeyError:
            pass
    if not group and not world.dry:
        raise Failure(f"user {name} is to have the group {item['group']}, which this host does not have")
    if not found:
        return Change(f"create user {name} with id {uid}")
    if found.pw_uid != uid:
        refuse_dependants(name, "user", found.pw_uid, uid, item["owns"], item["services"])
        return Change(f"change the id of user {name} from {found.pw_uid} to {uid}")
    notes = [
        note
        for note, differs in (
            ("group " + item["group"], not group or found.pw_gid != group.gr_gid),
            ("home " + item["home"], found.pw_dir != item["home"]),
            ("shell " + item["shell"], found.pw_shell != item["shell"]),
        )
        if differs
    ]
    member_of = {entry.gr_name for entry in grp.getgrall() if name in entry.gr_mem} if item["groups"] else set()
    notes += ["member of " + wanted for wanted in item["groups"] if wanted not in member_of]
    return Change(f"set {', '.join(notes)} of user {name}") if notes else None


def make_user(item: Item, world: World) -> str:
    name, found = item["name"], user_of(item["name"])
    settings = ["--gid", item["group"], "--home-dir" if not found else "--home", item["home"], "--shell", item["shell"]]
    if item["groups"]:
        settings += ["--groups", ",".join(item["groups"])]
    if not found:
        argv = ["useradd", "--system", "--no-create-home", "--uid", str(item["uid"]), *settings, "--", name]
        must(argv, "could not make user " + name)
        return ""
    if item["groups"]:
        settings.append("--append")
    if (found.pw_uid, found.pw_dir) == (item["uid"], item["home"]):
        must(["usermod", *settings, "--", name], "could not change user " + name)
        return ""
    argv = ["usermod", "--uid", str(item["uid"]), *settings, "--", name]
    return renumber(world, argv, "user", found.pw_uid, item["uid"], item["owns"], item["services"])


def taken(kind: str, name: str, number: int, other: str) -> str:
    return (
        f"the id {number} wanted for {kind} {name} belongs to {kind} {other} on this host; give {other} another id "
        f"({kind}mod, then chown its files), or choose another id for {name}"
    )


def renumber(world: World, argv: list[str], kind: str, old: int, new: int, owns: list[str], services: list[str]) -> str:
    """Change an id, or a home, for which nothing may run as the user.

    Files go over first: killed in between, the next run finds the old id and does it all again.
    """
    stopped = [
        name for name in services if world.unit(name).get("ActiveState") in ("active", "activating", "reloading")
    ]
    note_due(world, {"start " + name: "its ids changed" for name in stopped})
    for name in stopped:
        must(["systemctl", "stop", "--", name], "could not stop " + name)
    for path in files_of(kind, old, [path for path in owns if os.path.isdir(path)], limit=0):
        os.chown(path, new if kind == "user" else -1, new if kind == "group" else -1, follow_symlinks=False)
    must(argv, "could not change the id", timeout=600.0)
    for name in stopped:
        must(["systemctl", "start", "--", name], f"could not start {name} again")
        settle(world, "start " + name)
    world.forget_units()
    return f"id {old} became {new}" if old != new else ""


def refuse_dependants(name: str, kind: str, old: int, new: int, owns: list[str], services: list[str]) -> None:
    """Stop when a process or a file elsewhere depends on the old id."""
    processes = processes_of(kind, old, services)
    if processes:
        raise Failure(
            f"{kind} {name} has id {old} here and needs {new}, but these run with it: {', '.join(processes[:5])}. "
            "Stop them and run again"
        )
    files = list(files_of(kind, old, ["/"], limit=5, outside=owns))
    if files:
        flag, program = ("-uid", "chown") if kind == "user" else ("-gid", "chgrp")
        raise Failure(
            f"{kind} {name} has id {old} here and needs {new}, but files outside its own directories belong to {old}: "
            f"{', '.join(files)}. Hand them over (find / -xdev {flag} {old} -exec {program} -h {new} {{}} +), or "
            "remove them, and run again"
        )


def processes_of(kind: str, number: int, services: list[str]) -> list[str]:
    label = "Uid:" if kind == "user" else "Gid:"
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        status = read_text(f"/proc/{pid}/status")
        ids = status.split(label, 1)[1].split("\n")[0].split() if label in status else []
        if str(number) in ids:
            group = read_text(f"/proc/{pid}/cgroup")
            if not any(f"/{service}.service" in group for service in services):
                found.append(f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})")
    return found


def files_of(kind: str, number: int, roots: list[str], limit: int, outside: list[str] | None = None) -> Iterator[str]:
    """Paths below `roots` on local disks that belong to an id, except below `outside`; at most `limit` (0: all)."""
    mounts = (line.split(" - ", 1) for line in read_text("/proc/self/mountinfo").splitlines())
    foreign = {left.split()[4] for left, right in mounts if right.split()[0] in REMOTE or right.startswith("fuse.")}
    skipped = foreign.union(VOLATILE, outside or ())
    deadline, count = time.monotonic() + SEARCH_SECONDS, 0
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in skipped:
            continue
        if time.monotonic() > deadline:
            raise Failure(f"could not search all files for the old id {number} within {SEARCH_SECONDS:.0f} s")
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                waiting += [entry.path for entry in os.scandir(path)]
        except OSError:
            continue
        if number == (found.st_uid if kind == "user" else found.st_gid):
            yield path
            count += 1
            if count == limit:
                return


# ---------------------------------------------------------------- services


def check_service(item: Item, world: World) -> Change | None:
    if not has_systemd():
        return check_supervised(item, world)
    name, unit = item["name"], world.unit(item["name"])
    if unit.get("LoadState") == "not-found":
        if not item["running"] and not item["enabled"]:
            return None
        if not world.dry and not world.reload_units:
            raise Failure(f"there is no service {name} on this host; install the package that brings it")
        return Change(f"enable and start {name}")
    if unit.get("UnitFileState") == "masked" and (item["enabled"] or item["running"]):
        raise Failure(f"{name} is masked on this host; run `systemctl unmask {name}` and try again")
    steps = service_steps(item, world)
    reason = f" ({due_reason(name, world)})" if "restart" in steps else ""
    return Change(f"{' and '.join(steps)} {name}{reason}") if steps else None


def service_steps(item: Item, world: World) -> list[str]:
    """The systemctl verbs that bring the service to what the item says."""
    unit = world.unit(item["name"])
    state, active = unit.get("UnitFileState", ""), unit.get("ActiveState", "")
    steps = []
    if item["enabled"] and state in ("disabled", "linked", ""):
        steps.append("enable")
    elif not item["enabled"] and state.startswith("enabled"):
        steps.append("disable")
    if item["running"] and active not in ("active", "reloading"):
        steps.append("start")
    elif not item["running"] and active in ("active", "reloading", "activating"):
        steps.append("stop")
    elif item["running"] and due_reason(item["name"], world) and not world.defer:
        steps.append("restart")
    return steps


def due_reason(name: str, world: World) -> str:
    return world.due.get("service " + name) or world.due.get("start " + name) or ""


def make_service(item: Item, world: World) -> str:
    return or_old_files(bring_up, item, world)


def or_old_files(step: Callable[[Item, World], str], item: Item, world: World) -> str:
    """A step that starts a service. One that ran, and does not with the files of this run, gets its old ones back."""
    name = item["name"]
    ran, logged = is_up(name, world), log_size(service_log(name))
    try:
        return step(item, world)
    except Failure as failure:
        new = [entry for entry in world.replaced if name in entry[0]["restarts"]]
        items = [entry[0] for entry in new]
        text = f"{failure}\n{text_from(service_log(name), logged)}"
        todo, told = advice(items, text), telling_line(text, items)
        if not ran or not new:
            raise Failure(f"{failure}{todo and chr(10) + told + todo}") from None
        paths = ", ".join(one["path"] for one in items)
        world.tell(f"{name} does not start with the new {paths}; putting the old back")
        for one, data, found in reversed(new):
            put_back(one["path"], data, found, world)
        world.replaced = [entry for entry in world.replaced if entry not in new]
        try:
            start_again(item, world)
        except Failure as again:
            raise Failure(f"{failure}\nNor does it start with the old {paths}: {again}") from None
        for key in {key for one in items for key in one["reloads"]}:
            settle(world, key)
        raise Failure(
            f"{name} did not start with the new {paths}: {told or failure}{todo}\n"
            f"The old {'file is' if len(new) == 1 else 'files are'} back in force, and {name} runs"
        ) from None


def is_up(name: str, world: World) -> bool:
    return world.unit(name).get("ActiveState") == "active" if has_systemd() else bool(supervised(name))


def service_log(name: str) -> str:
    """Where Slurm's daemons write what they have to say; others say it to systemd or to our supervisor."""
    return f"/var/log/slurm/{name}.log" if has_systemd() else f"{SERVICE_LOGS}/{name}.log"


def log_size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def text_from(path: str, start: int) -> str:
    """What was added to a log since it had this size."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(1 << 20).decode("utf-8", "replace")


def start_again(item: Item, world: World) -> str:
    """Start or restart a service, whatever else the document says about it."""
    name = item["name"]
    if not has_systemd():
        return make_supervised({"running": True, "enabled": False, "command": [], **item}, world)
    world.forget_units()
    reload_units(world, name)
    start_unit(name, world)
    settle_service(name, world)
    return ""


def bring_up(item: Item, world: World) -> str:
    if not has_systemd():
        return make_supervised(item, world)
    name = item["name"]
    reload_units(world, name)
    steps = service_steps(item, world)
    for step in steps:
        if step in ("start", "restart"):
            start_unit(name, world)
        else:
            must(["systemctl", step, "--", name], f"could not {step} {name}")
    world.forget_units()
    if not world.defer or "start" in steps or "stop" in steps:
        settle_service(name, world)
    return ""


def reload_units(world: World, name: str) -> None:
    """Have systemd read its units again, where one has changed."""
    if world.reload_units or world.unit(name).get("NeedDaemonReload") == "yes":
        must(["systemctl", "daemon-reload"], "could not reload systemd's units")
        world.reload_units = False
        world.forget_units()


def settle_service(name: str, world: World) -> None:
    world.forget_units()
    settle(world, "service " + name)
    settle(world, "start " + name)


def start_unit(name: str, world: World) -> None:
    """Start or restart, then look for a moment whether it stays up."""
    before = world.unit(name).get("ActiveState")
    if before == "failed":
        run(["systemctl", "reset-failed", "--", name])
    world.tell(f"{'restarting' if before == 'active' else 'starting'} {name}")
    status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status and show_units([name])[name].get("Result") == "start-limit-hit":
        # Our own restarts, one after another, are not the crash loop that systemd's limit is meant for.
        run(["systemctl", "reset-failed", "--", name])
        status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status:
        raise Failure(f"{name} did not start\n{unit_log(name, text)}")
    for _ in range(3):
        time.sleep(0.1)
        unit = show_units([name])[name]
        finished = unit.get("Type") == "oneshot" and unit.get("Result") == "success"
        if unit.get("ConditionResult") == "no":
            raise Failure(f"{name} was not started: a condition in its unit is not met\n{unit_log(name)}")
        if unit.get("ActiveState") not in ("active", "reloading") and not finished:
            raise Failure(f"{name} started and did not stay up\n{unit_log(name)}")


def unit_log(name: str, said: str = "") -> str:
    status, text = run(["journalctl", "--no-pager", "-q", "-o", "short-iso", "-n", "20", "-u", name], timeout=20.0)
    if status or not text.strip():
        _, text = run(["systemctl", "status", "--no-pager", "-l", "-n", "20", "--", name], timeout=20.0)
    return (last_lines(text) or last_lines(said)) + taken_port(name)


def taken_port(name: str) -> str:
    """Who sits on the port that a daemon could not have; "" when that is not what its log complains of."""
    import re

    log = read_text(f"/var/log/slurm/{name}.log")[-4096:] + run(["journalctl", "-q", "-n", "20", "-u", name])[1]
    for port in re.findall(r"port \((\d+)\): Address already in use", log)[-1:]:
        holder = port_holder(int(port))
        return f"\nport {port} is taken by {holder}; stop it and run again" if holder else ""
    return ""


def port_holder(port: int) -> str:
    """The process that listens on a TCP port; "" when there is none, or none that we can see."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in read_text("/proc/net/" + table).splitlines()[1:]:
            field = line.split()
            if field[3] == "0A" and int(field[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{field[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")) if sockets else ():
        try:
            if any(os.readlink(entry.path) in sockets for entry in os.scandir(f"/proc/{pid}/fd")):
                return f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})"
        except OSError:
            continue
    return ""


# Without systemd: a plain supervisor, this very file run as `agent.py supervise NAME COMMAND...`, keeps the daemon up.


def supervised(name: str) -> Item | None:
    """The running supervisor of a service; None when there is none."""
    try:
        found: Item = json.loads(read_text(f"{SUPERVISED}/{name}.json") or "{}")
    except ValueError:
        return None
    return found if found and process_start(found["pid"]) == found["start"] else None


def process_start(pid: int) -> str:
    """When a process started, which tells it from a later one with the same number; "" when there is none."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] != "Z" else ""


def check_supervised(item: Item, world: World) -> Change | None:
    name, found = item["name"], supervised(item["name"])
    if item["running"] and not item["command"] and not found:
        raise Failure(f"this host has no systemd, and no command is known for {name}; use a host with systemd")
    if not item["running"]:
        return Change(f"stop {name}") if found else None
    if not found:
        return Change(f"start {name} under a supervisor")
    due = "service " + name in world.due and not world.defer
    return Change(f"restart {name}") if due or (item["command"] and found["command"] != item["command"]) else None


def make_supervised(item: Item, world: World) -> str:
    name, found = item["name"], supervised(item["name"])
    command = item["command"] or (found or {}).get("command", [])
    if found:
        stop_supervisor(found)
    cron = "/etc/cron.d/shoal-" + "".join(c if c.isalnum() else "-" for c in name)
    if not item["running"]:
        remove(cron)
        settle(world, "service " + name)
        return ""
    program = world.state + "/agent.py"
    write_atomic(program, world.source(), 0o700, os.geteuid(), os.getegid())
    argv = [sys.executable or "python3", "-I", "-B", program, "supervise", name, *command]
    status, text = run(argv, timeout=30.0)
    time.sleep(0.3)
    found = supervised(name)
    if status or not found or not found.get("child") or not process_start(found["child"]):
        log = last_lines(read_text(f"{SERVICE_LOGS}/{name}.log") or text)
        raise Failure(f"{name} started under the supervisor and did not stay up\n{log}")
    settle(world, "service " + name)
    if not item["enabled"] or not os.path.isdir("/etc/cron.d"):
        return "this host has no cron: after a reboot it starts with the next `shoal up`" if item["enabled"] else ""
    import shlex

    line = "@reboot root {}\n".format(" ".join(shlex.quote(part) for part in argv).replace("%", "\\%"))
    write_atomic(cron, line.encode(), 0o644, os.geteuid(), os.getegid())
    return ""


def stop_supervisor(found: Item) -> None:
    os.kill(found["pid"], signal.SIGTERM)
    for _ in range(150):
        if process_start(found["pid"]) != found["start"]:
            return
        time.sleep(0.1)
    raise Failure(f"the supervisor (pid {found['pid']}) does not end; kill it and run again")


def supervise(name: str, command: list[str]) -> None:
    """Keep a command running, in the background: started again when it ends, with growing pauses."""
    if os.fork():
        return
    os.setsid()
    os.makedirs(SUPERVISED, 0o755, exist_ok=True)
    os.makedirs(SERVICE_LOGS, 0o755, exist_ok=True)
    log = os.open(f"{SERVICE_LOGS}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    null = os.open("/dev/null", os.O_RDONLY)
    for fd, to in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, to)
    record = f"{SUPERVISED}/{name}.json"
    child = [0]

    def end(*_: object) -> None:
        if child[0]:
            os.kill(child[0], signal.SIGTERM)
            for _tick in range(100):
                if not process_start(child[0]):
                    break
                time.sleep(0.1)
            else:
                os.kill(child[0], signal.SIGKILL)
        remove(record)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    pause = 1.0
    while True:
        began = time.monotonic()
        child[0] = os.posix_spawnp(command[0], command, ENVIRONMENT, setsid=True, setsigdef=[signal.SIGPIPE])
        note = {"pid": os.getpid(), "start": process_start(os.getpid()), "child": child[0], "command": command}
        write_atomic(record, json.dumps(note).encode(), 0o644, os.geteuid(), os.getegid())
        os.waitpid(child[0], 0)
        child[0] = 0
        pause = 1.0 if time.monotonic() - began > 60 else min(pause * 2, 30.0)
        time.sleep(pause)


# ---------------------------------------------------------------- mounts


def check_mount(item: Item, world: World) -> Change | None:
    where, mounted = item["where"], is_mounted(item["where"])
    path, text = mount_record(item)
    if not item["mounted"]:
        return Change(f"unmount {where}") if mounted or recorded(item, path) else None
    if recorded(item, path) != text:
        return Change(f"mount {item['what']} on {where}")
    return None if mounted else Change(f"mount {item['what']} on {where}")


def make_mount(item: Item, world: World) -> str:
    where, (path, text) = item["where"], mount_record(item)
    unit = os.path.basename(path)
    same = recorded(item, path) == text
    if not item["mounted"] or not same:
        if is_mounted(where):
            must(["umount", "--", where], f"could not unmount {where}; end what uses it (fuser -vm {where})")
        if has_systemd() and os.path.exists(path):
            run(["systemctl", "disable", "--", unit])
    if not has_systemd():
        _, uid, gid = 0, os.geteuid(), os.getegid()
        before = read_bytes(path) if os.path.exists(path) else b""
        write_atomic(path, with_block(before, "mount " + where, text if item["mounted"] else "", path), 0o644, uid, gid)
        if item["mounted"] and not is_mounted(where):
            os.makedirs(where, 0o755, exist_ok=True)
            must(
                ["mount", "-t", item["fstype"], "-o", item["options"], "--", item["what"], where],
                "could not mount " + where,
            )
        return ""
    if not item["mounted"]:
        remove(path)
    elif not same:
        write_atomic(path, text.encode(), 0o644, 0, 0)
    must(["systemctl", "daemon-reload"], "could not reload systemd's units")
    if item["mounted"]:
        os.makedirs(where, 0o755, exist_ok=True)
        must(["systemctl", "enable", "--", unit], "could not enable " + unit)
        status, text = run(["systemctl", "start", "--", unit], timeout=120.0)
        if status:
            raise Failure(f"could not mount {item['what']} on {where}\n{unit_log(unit, text)}")
    return ""


def mount_record(item: Item) -> tuple[str, str]:
    """Where a mount is written down for the next boot, and how: a systemd unit, or a block in fstab."""
    if not has_systemd():
        return "/etc/fstab", "{what} {where} {fstype} {options} 0 0\n".format(**item)
    fields = {name: item[name].replace("%", "%%") for name in ("what", "where", "fstype", "options")}
    text = "# Made by shoal\n[Mount]\nWhat={what}\nWhere={where}\nType={fstype}\nOptions={options}\n".format(**fields)
    return f"/etc/systemd/system/{unit_name(item['where'])}.mount", text + "\n[Install]\nWantedBy=multi-user.target\n"


def recorded(item: Item, path: str) -> str:
    if has_systemd():
        return read_text(path)
    _, begin, rest = read_text(path).partition(f"# BEGIN shoal mount {item['where']}\n")
    return rest.partition("# END shoal mount")[0] if begin else ""


def unit_name(path: str) -> str:
    """A path as systemd names its units: `/srv/my-data` is `srv-my\\x2ddata`."""
    plain = path.strip("/")
    named = "".join(
        "-" if c == "/" else c if c.isascii() and (c.isalnum() or c in ":_.") and not (c == "." and i == 0)
        else "".join(f"\\x{byte:02x}" for byte in c.encode())
        for i, c in enumerate(plain)
    )  # fmt: skip
    return named or "-"


def is_mounted(where: str) -> bool:
    escaped = where.rstrip("/").replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    return any(line.split()[4] == (escaped or "/") for line in read_text("/proc/self/mountinfo").splitlines())


# ---------------------------------------------------------------- kernel settings, device rules, commands


def check_sysctl(item: Item, world: World) -> Change | None:
    path, text = sysctl_record(item)
    now = read_text(sysctl_file(item)).split()
    if now == item["value"].split() and read_text(path) == text:
        return None
    return Change(f"set {item['name']} to {item['value']} (was {' '.join(now) or 'not there'})")


def make_sysctl(item: Item, world: World) -> str:
    path, text = sysctl_record(item)
    try:
        if read_text(sysctl_file(item)).split() != item["value"].split():
            with open(sysctl_file(item), "w") as file:
                file.write(item["value"] + "\n")
    except OSError as error:
        raise Failure(f"the kernel does not take {item['name']} = {item['value']}: {error.strerror}") from None
    write_atomic(path, text.encode(), 0o644, 0, 0)
    return ""


def sysctl_record(item: Item) -> tuple[str, str]:
    name = item["name"].replace("/", ".")
    return f"/etc/sysctl.d/90-shoal-{name}.conf", f"{item['name']} = {item['value']}\n"


def sysctl_file(item: Item) -> str:
    name: str = item["name"]
    return "/proc/sys/" + (name if "/" in name else name.replace(".", "/"))


def check_device_rule(item: Item, world: World) -> Change | None:
    path = rule_file(item)
    before = read_text(path)
    if before == item["content"] and "udev" not in world.due:
        return None
    action = ("update" if item["content"] else "remove") if before else "create"
    return Change(f"{action} {path}", difference(path, before.encode(), item["content"].encode(), world))


def make_device_rule(item: Item, world: World) -> str:
    note_due(world, {"udev": item["key"]})
    if item["content"]:
        write_atomic(rule_file(item), item["content"].encode(), 0o644, 0, 0)
    else:
        remove(rule_file(item))
    running = which("udevadm") and os.path.exists("/run/udev/control")
    if running:
        must(["udevadm", "control", "--reload"], "could not reload the device rules")
        must(["udevadm", "trigger"], "could not apply the device rules")
    settle(world, "udev")
    return "" if running else "udev does not run here; the rule waits for a boot that has it"


def rule_file(item: Item) -> str:
    return f"/etc/udev/rules.d/{item['name']}.rules"


def check_command(item: Item, world: World) -> Change | None:
    if item["on_change"] and item["key"] not in world.due:
        return None
    if item["unless"] and run(item["unless"], timeout=30.0)[0] == 0:
        return None
    reason = f" ({world.due[item['key']]})" if item["on_change"] else ""
    return Change(f"run {item['name']}{reason}")


def make_command(item: Item, world: World) -> str:
    for attempt in range(item["retries"] + 1):
        if attempt:
            world.tell(f"{item['name']} failed; trying again ({attempt} of {item['retries']})")
            time.sleep(2.0)
        status, text = run(item["argv"], stdin=item["stdin"].encode(), timeout=item["timeout"])
        if status == 0:
            settle(world, item["key"])
            return ""
    why = f"took longer than {item['timeout']:g} s" if status == 124 else f"ended with status {status}"
    raise Failure(f"{item['name']} {why}\n{last_lines(text)}".strip())


# ---------------------------------------------------------------- what is due


def read_due(state: str) -> dict[str, str]:
    """Restarts and commands that a killed run left undone: `service NAME` or `command NAME`, with the reason."""
    try:
        found: dict[str, str] = json.loads(read_text(state + "/pending-restarts") or "{}")
    except ValueError:
        return {}
    return found


def note_due(world: World, due: dict[str, str]) -> None:
    world.noted.update(due)
    new = {key: reason for key, reason in due.items() if key not in world.due}
    if new:
        world.due.update(new)
        _write_due(world)


def settle(world: World, key: str) -> None:
    if world.due.pop(key, None) is not None:
        _write_due(world)


def _write_due(world: World) -> None:
    if not world.dry:
        data = json.dumps(world.due).encode()
        write_atomic(world.state + "/pending-restarts", data, 0o600, os.geteuid(), os.getegid())


def leftovers(world: World) -> Iterator[tuple[Item, Callable[[Item, World], Item]]]:
    """What is due and was not reached in the document's order: an item to report, and the step that does it.

    What an earlier run left due and this document does not name stays due: it belongs to another document.
    """
    named = {item["key"]: item for item in world.items}
    for key in list(world.due):
        kind, _, name = key.partition(" ")
        if kind == "command" and key in named:
            yield named[key], one_item
        elif kind == "start" or (kind == "service" and not world.defer and (key in named or key in world.noted)):
            if is_up(name, world) or kind == "start":
                yield named.get("service " + name) or {"key": "service " + name, "name": name}, restart
            else:
                settle(world, key)


def restart(item: Item, world: World) -> Item:
    """Restart a service, whatever the document says about it otherwise."""
    world.key, name = item["key"], item["name"]
    done = {"action": f"restart {name} ({due_reason(name, world)})"}
    if world.dry:
        return {"status": "change", **done}

    def step() -> Item:
        return {"status": "changed", "detail": or_old_files(start_again, item, world), **done}

    return guarded(step, item)


# ---------------------------------------------------------------- the loop

KINDS = {
    "packages": (check_packages, make_packages),
    "file": (check_file, make_file),
    "link": (check_link, make_link),
    "directory": (check_directory, make_directory),
    "group": (check_group, make_group),
    "user": (check_user, make_user),
    "service": (check_service, make_service),
    "block": (check_block, make_block),
    "mount": (check_mount, make_mount),
    "sysctl": (check_sysctl, make_sysctl),
    "device_rule": (check_device_rule, make_device_rule),
    "command": (check_command, make_command),
}


def converge(world: World) -> None:
    """Go through the items in order, then through what is still due. After a failed item the rest is skipped."""
    counts = {"change": 0, "changed": 0, "failed": 0}
    stop = ""

    def report(index: int, item: Item, result: Item) -> None:
        status = result["status"]
        if status in counts:
            counts[status] += 1
        world.wire.send({"event": "item", "index": index, "key": item["key"], "action": "", "diff": "", **result})

    for index, item in enumerate(world.items):
        if not stop and not world.dry and not world.wire.still_there():
            stop = GONE
        if stop:
            report(index, item, {"status": "skipped", "detail": stop})
            continue
        result = one_item(item, world)
        report(index, item, result)
        if result["status"] == "failed" and not world.dry:
            stop = f"after the failure of {item['key']}"
    if not stop:
        for item, step in leftovers(world):
            report(-1, item, step(item, world))
        if world.reload_units and has_systemd():
            run(["systemctl", "daemon-reload"])
    changed = counts["change"] + counts["changed"]
    world.wire.send({"event": "done", "changed": changed, "failed": counts["failed"]})


def one_item(item: Item, world: World) -> Item:
    world.key = item["key"]
    return guarded(lambda: _one_item(item, world), item)


def _one_item(item: Item, world: World) -> Item:
    if item["kind"] not in KINDS:
        raise Failure(f"this agent knows no items of kind {item['kind']}")
    check, make = KINDS[item["kind"]]
    change = check(item, world)
    if change is None:
        if item["kind"] == "command":
            settle(world, item["key"])
        return {"status": "ok"}
    reason = f"{item['key']} changes"
    keys = ["service " + name for name in item.get("restarts", ())] + list(item.get("reloads", ()))
    note_due(world, {key: reason for key in keys})
    done = {"action": change.action, "diff": change.diff}
    if not world.dry:
        return {"status": "changed", "detail": make(item, world), **done}
    if item["kind"] in ("service", "command"):
        settle(world, item["key"])
    return {"status": "change", **done}


def guarded(step: Callable[[], Item], item: Item) -> Item:
    """A step's result; whatever goes wrong in it becomes a failed item that says what was found."""
    try:
        return step()
    except Failure as failure:
        return {"status": "failed", "detail": str(failure)}
    except OSError as error:
        return {"status": "failed", "detail": explain(error, item.get("path", "/"), item["key"])}
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        where = trace.tb_lineno if trace else 0
        # The message is left out: it could quote a secret.
        return {"status": "failed", "detail": f"the agent met {type(error).__name__} at its line {where}"}


def explain(error: OSError, path: str, what: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "No space left on device: " + space_left(path)
    return f"{error.filename or what}: {error.strerror}"


def lock(world: World) -> int:
    """One operator at a time: waits for another one's work to end, and says whose it is."""
    os.makedirs(world.state, 0o700, exist_ok=True)
    fd = os.open(world.state + "/lock", os.O_RDWR | os.O_CREAT, 0o600)
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if not told:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace") or "another run"
                world.tell(f"waiting for {holder} to finish on this host")
                told = True
            if not world.wire.still_there():
                raise SystemExit(0) from None
            time.sleep(0.1)
    address = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    who = os.environ.get("SUDO_USER") or os.environ.get("USER") or "root"
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{who}{' from ' + address if address else ''} (pid {os.getpid()})".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same
    return fd


def secret(request: Item) -> Item:
    """A secret file's content, made from random bytes first where it is absent and `make` says how many."""
    path = request["path"]
    if request.get("make") and not (os.path.exists(path) and os.path.getsize(path)):
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o700)
        write_atomic(path, os.urandom(request["make"]), 0o400, os.geteuid(), os.getegid())
    from binascii import b2a_base64

    return {"event": "secret", "content_b64": b2a_base64(read_bytes(path), newline=False).decode()}


def answer(request: Item, wire: Wire, state: str, source: Callable[[], bytes]) -> None:
    operation = request["op"]
    world = World(wire, state, request.get("items", []), operation == "check", source)
    if operation == "facts":
        begin = time.monotonic()
        facts = gather_facts(request, world)
        wire.send({"event": "facts", "facts": facts, "took": time.monotonic() - begin})
        return
    if operation == "check":
        converge(world)
        return
    held = lock(world)
    try:
        world.due = read_due(state)
        world.defer = bool(request.get("defer_restarts"))
        if operation == "apply":
            release_daemons()
            converge(world)
        elif operation == "secret":
            wire.send(secret(request))
    finally:
        os.close(held)


def main(state: str, source: Callable[[], bytes]) -> None:
    os.chdir("/")
    os.umask(0o022)
    wire = Wire()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, wire.hang_up)
    while True:
        request = wire.request()
        if request is None or request["op"] == "exit":
            return
        try:
            answer(request, wire, state, source)
        except OSError as error:
            text = explain(error, request.get("path", state), request["op"])
            wire.send({"event": "error", "text": text})


if __name__ == "__main__" and sys.argv[1:2] == ["supervise"]:
    supervise(sys.argv[2], sys.argv[3:])
