"""Runs a command in the job's image: $SHOAL_IMAGE says which, as JSON that `shoal.containers.images` writes.

It makes a user and a mount namespace and becomes the command: there is no process between, so signals, the exit status,
the cgroup and the process ids are those of any job. Inside, the user has the same id and nothing else is mapped: files
with the setuid bit, or of root, give no rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pwd
import stat
import sys
import warnings  # noqa: F401 - os.execvpe imports it, and inside there is no Python of the node

from .driver_files import driver_mounts, driver_problem, driver_variables
from .unpacked_image import Problem, find_container, own_store, require_cpu_type, unpacked
from .variables import CONTAINER, DEFAULT_PATH, IMAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

EXIT_WITH_CAUSE = 125
OF_THE_IMAGE = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that lead to files of the host. Inside, they are the image's, unless the job sets them."""
HOST_DIRECTORIES = ("/proc", "/sys", "/dev", "/tmp")  # nosec B108
HOST_FILES = ("/etc/hosts", "/etc/resolv.conf")
PMIX_DIRECTORY = "/var/spool/slurmd"

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
MNT_DETACH, PR_SET_NO_NEW_PRIVS, RESOLVE_IN_ROOT, OPENAT2 = 2, 38, 0x10, 437
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
OPEN_PATH = os.O_PATH | os.O_CLOEXEC
KEPT_FLAGS = {1: 0, 2: 2, 4: 4, 8: 8, 1024: 1 << 10, 2048: 1 << 11, 4096: 1 << 21}
"""Of a mount: what statvfs says, and what mount takes. In a user namespace they cannot be taken away."""

libc = ctypes.CDLL(None, use_errno=True)


def run_in_image(command: list[str]) -> int:
    """Become the command; the status where that is not possible."""
    settings = json.loads(os.environ.pop(IMAGE))
    try:
        root, writable = find_root(settings)
        # Beside a directory of somebody's there may be a file of somebody else's.
        config = {} if settings["directory"] else image_config(root)
        driver = driver_mounts()
        environment = variables(settings, config, driver)
        arguments, directory = place_command(settings, command)
        enter(root, [*driver, *mounts(settings)], writable)
        for place in (config.get("WorkingDir"), directory):
            with contextlib.suppress(OSError):
                os.chdir(place or "/")
        if settings["workdir"] and not os.path.isdir(settings["workdir"]):
            raise Problem("--workdir: image %s has no directory %s" % (settings["name"], settings["workdir"]))
        try:
            os.execvpe(arguments[0], arguments, environment)  # nosec B606
        except OSError as error:
            raise Problem(start_problem(settings["name"], arguments[0], error)) from None
    except Problem as error:
        return fail(str(error))
    except OSError as error:
        return fail("cannot run in image %s: %s: %s" % (settings["name"], error.filename or "?", error.strerror))


def start_problem(image: str, program: str, error: OSError) -> str:
    """Why the image does not start a program, and what helps."""
    if error.errno == errno.ENOENT and os.path.exists(program):
        with open(program, "rb") as file:
            line = file.readline(100).decode(errors="replace").strip()
        needed = line[2:].strip() if line.startswith("#!") else "the loader or the libraries"
        return "image %s lacks what %s starts with: %s" % (image, program, needed)
    if error.errno == errno.ENOENT:
        is_python = os.path.basename(program).startswith("python")
        fix = "; name its own with --python, or add one with `shoal image build`" if is_python else ""
        return "image %s has no %s%s" % (image, program, fix)
    fixes = {errno.EACCES: "chmod +x %s" % program, errno.ENOEXEC: "begin a script with a line such as #!/bin/sh"}
    fix = "; " + fixes[error.errno] if error.errno in fixes else ""
    return "image %s cannot start %s: %s%s" % (image, program, error.strerror, fix)


def fail(text: str) -> int:
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    sys.stderr.write("shoal: error: %s: %s\n" % (node, text))
    return EXIT_WITH_CAUSE


def find_root(settings: dict[str, Any]) -> tuple[str, bool]:
    """The root file system and whether jobs may change it. Unpacks the image where this node does not have it."""
    require_cpu_type(settings)
    if settings["directory"]:
        if not os.path.isdir(settings["directory"]):
            raise Problem("there is no directory %s; name one on a share" % settings["directory"])
        return settings["directory"], False
    store = own_store()
    if settings["container"]:
        return find_container(store, settings), True
    return unpacked(store, settings), False


def image_config(root: str) -> dict[str, Any]:
    """What the image says of its variables and working directory."""
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open(os.path.join(os.path.dirname(root), "image.json")) as file:
        config = json.load(file)
    return config


def variables(settings: dict[str, Any], config: dict[str, Any], driver: list[tuple[str, str, bool]]) -> dict[str, str]:
    """The job's variables over the image's, but those that lead to files of the host."""
    image = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    problem = driver_problem(image, driver)
    if problem:
        raise Problem("image %s %s" % (settings["name"], problem))
    job = {name: value for name, value in os.environ.items() if name not in OF_THE_IMAGE or name in settings["keep"]}
    joined = {"PATH": DEFAULT_PATH, **image, **job}
    if image.get("PYTHONPATH") and job.get("PYTHONPATH"):
        joined["PYTHONPATH"] = job["PYTHONPATH"] + ":" + image["PYTHONPATH"]
    if driver:
        joined.update(driver_variables(joined))
    # PMIx of another version than the host's meets it with these.
    pmix = {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native"}
    return {**pmix, **joined, CONTAINER: settings["container"] or settings["name"]}


def place_command(settings: dict[str, Any], command: list[str]) -> tuple[list[str], str]:
    """The command and the directory that it starts in. The script is in the job's tree, wherever that is."""
    here = os.getcwd()
    if not settings["workdir"]:
        return command, here
    names = (settings["script"], "./" + settings["script"])
    return [os.path.join(here, word) if word in names else word for word in command], settings["workdir"]


def mounts(settings: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Source, destination, whether it is read-only. Later ones lie over earlier ones."""
    home = os.environ.get("HOME", "")
    places = [(path, path, False) for path in HOST_DIRECTORIES]
    places += [(os.path.realpath(path), path, True) for path in HOST_FILES if os.path.exists(path)]
    if settings["home"] and not os.path.isdir(home):
        raise Problem("--home on: there is no %s" % (home or "home"))
    if home not in ("", "/"):
        places.append((home if settings["home"] else "", home, False))
    if "PMIX_NAMESPACE" in os.environ and os.path.isdir(PMIX_DIRECTORY):
        places.append((PMIX_DIRECTORY, PMIX_DIRECTORY, False))
    for path in filter(os.path.isdir, settings["binds"]):
        real = os.path.realpath(path)
        places += [(real, place, False) for place in dict.fromkeys((real, path))]
    for source, target, read_only in settings["mounts"]:
        try:
            os.stat(source)
        except OSError as error:
            cause = "there is no %s" % source if error.errno == errno.ENOENT else "%s: %s" % (source, error.strerror)
            raise Problem("--mount: %s" % cause) from None
        places.append((source, target, read_only))
    return places


def enter(root: str, places: list[tuple[str, str, bool]], writable: bool) -> None:
    """Make `root` the root of a mount namespace of our own, with these places in it."""
    user, group, accounts = os.getuid(), os.getgid(), read_accounts(root)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        text = "user namespaces do not work here (%s); use `-C images`, or see `shoal check`"
        raise Problem(text % os.strerror(ctypes.get_errno()))
    maps = {"setgroups": "deny", "uid_map": "%d %d 1" % (user, user), "gid_map": "%d %d 1" % (group, group)}
    for name, text in maps.items():
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
    mount("", "/", MS_REC | MS_SLAVE)
    if writable or os.access(root, os.W_OK):
        mount(root, root, MS_BIND | MS_REC)
    else:
        cover(root, ["/etc/passwd", *(target for _, target, _ in places)])
    inside = os.open(root, OPEN_PATH | os.O_DIRECTORY)
    run_place = open_inside(inside, "/run", directory=True)
    mount("tmpfs", run_place, MS_NOSUID | MS_NODEV, "tmpfs", "mode=0755")
    for name, content in accounts.items():
        with open(os.path.join(root, "run", "." + name), "wb") as file:
            file.write(content)
        places = [(os.path.join(root, "run", "." + name), "/etc/" + name, True), *places]
    for source, target, read_only in places:
        place = open_inside(inside, target, directory=not source or os.path.isdir(source))
        if not source:
            mount("tmpfs", place, MS_NOSUID | MS_NODEV, "tmpfs", "mode=0700")
            continue
        mount(source, place, MS_BIND | MS_REC)
        if read_only:
            make_read_only(open_inside(inside, target, directory=os.path.isdir(source)))
    if not writable:
        make_read_only(os.open(root, OPEN_PATH | os.O_DIRECTORY))
    os.chdir(root)
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise Problem("this CPU type is not known: %s" % os.uname().machine)
    check(libc.syscall(number, b".", b"."), root)
    check(libc.umount2(b".", MNT_DETACH), "/")
    os.chdir("/")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def cover(root: str, targets: list[str]) -> None:
    """Lay directories of our own over those of another user, so that places for mounts can be made in them."""
    lower = os.open(root, OPEN_PATH | os.O_DIRECTORY)
    own = {path for target in targets for path in directories_above(root, target)}
    mount("tmpfs", root, MS_NOSUID | MS_NODEV, "tmpfs", "mode=0755")
    names = {"upperdir": "upper", "workdir": "work"}
    for name in names.values():
        os.mkdir(os.path.join(root, name), 0o755)
    for path in sorted(own):
        os.mkdir(os.path.join(root, "upper", path), 0o755)
    above = {key: os.open(os.path.join(root, name), OPEN_PATH | os.O_DIRECTORY) for key, name in names.items()}
    words = ["%s=/proc/self/fd/%d" % pair for pair in {"lowerdir": lower, **above}.items()]
    try:
        mount("overlay", root, MS_NOSUID | MS_NODEV, "overlay", ",".join(words))
    except OSError as error:
        text = "%s belongs to another user, and overlays do not work here (%s); `shoal image build NAME %s` copies it"
        raise Problem(text % (root, error.strerror, root)) from None


def directories_above(root: str, target: str) -> Iterator[str]:
    """The directories that a place is in, from the top, up to the first that is a link in the image."""
    path = ""
    for name in os.path.normpath("/" + target).strip("/").split("/")[:-1]:
        path = os.path.join(path, name)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(os.path.join(root, path)).st_mode):
                return
        yield path


def read_accounts(root: str) -> dict[str, bytes]:
    """The image's users and groups, with the job's among them."""
    me = pwd.getpwuid(os.getuid())
    lines = {
        "passwd": "%s:x:%d:%d::%s:/bin/sh\n" % (me.pw_name, me.pw_uid, os.getgid(), me.pw_dir),
        "group": "%s:x:%d:\n" % (me.pw_name, os.getgid()),
    }
    accounts = {}
    for name, line in lines.items():
        content = b""
        with contextlib.suppress(OSError):
            etc = os.open(os.path.join(root, "etc"), OPEN_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=etc)
            if stat.S_ISREG(os.fstat(file).st_mode):
                content = os.read(file, 1 << 20)
        own = line.split(":")[2].encode()
        kept = [entry for entry in content.splitlines(True) if entry.split(b":")[2:3] != [own]]
        # sshd gives a terminal to this group where there is one, and no id but the user's can own anything.
        kept = [entry for entry in kept if not entry.startswith(b"tty:")]
        accounts[name] = line.encode() + b"".join(kept)
    return accounts


class OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def open_inside(root: int, path: str, *, directory: bool) -> int:
    """Open a place in the image as the image sees it: no link in it leads outside. What is missing is made."""
    for attempt in range(2):
        how = OpenHow(OPEN_PATH, 0, RESOLVE_IN_ROOT)
        number = libc.syscall(OPENAT2, root, path.encode(), ctypes.byref(how), ctypes.sizeof(how))
        if number >= 0:
            if stat.S_ISDIR(os.fstat(number).st_mode) != directory:
                raise Problem("%s is %s in the image" % (path, "a file" if directory else "a directory"))
            return int(number)
        code = ctypes.get_errno()
        if code != errno.ENOENT or attempt:
            break
        parent, _, name = path.rstrip("/").rpartition("/")
        above = open_inside(root, parent or "/", directory=True)
        try:
            if directory:
                os.mkdir(name, 0o755, dir_fd=above)
            else:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=above))
        except FileExistsError:
            continue  # another rank was faster, or a link that leads nowhere
        except OSError as error:
            raise Problem("the image has no %s, and it cannot be made there: %s" % (path, error.strerror)) from None
    raise Problem("cannot use %s in the image: %s" % (path, os.strerror(code)))


def mount(source: str, target: str | int, flags: int, kind: str = "", data: str = "") -> None:
    place = "/proc/self/fd/%d" % target if isinstance(target, int) else target
    words = [word.encode() or None for word in (source, place, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), source)


def make_read_only(place: int) -> None:
    path = "/proc/self/fd/%d" % place
    flags = os.statvfs(path).f_flag
    kept = sum(value for flag, value in KEPT_FLAGS.items() if flags & flag)
    mount("", place, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def check(result: int, name: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
