"""Short programs for a host, each started by its name: `python_command("probes", "gpus", "2")`."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import pwd
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Callable

MLFLOW_SERVICE = "shoal-mlflow"
MLFLOW_ADMIN, MLFLOW_JOBS = "admin", "jobs"
"""People log in as the first; jobs report as the second, which may not change accounts."""
MLFLOW_ACCOUNTS = "mlflow-accounts"
"""The probe that makes the accounts of jobs and users."""
MLFLOW_START_TIMEOUT_S = 240
LISTENING = "0A"
"""The state in /proc/net/tcp."""
IPV4_IN_IPV6 = "0" * 16 + "FFFF0000"
MAX_ERROR_BYTES = 100_000
MAX_ANSWER_BYTES = 1_000_000


def check_gpus(promised: str) -> None:
    """Exit with one line about the problem unless so many GPUs work."""
    if promised == "0":
        return
    try:
        cards, error_text = query_gpus("index", "name", "memory.total")
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit("nvidia-smi does not run: %s" % error)
    if error_text:
        sys.exit("nvidia-smi: " + error_text.replace("\n", " "))
    if len(cards) < int(promised):
        sys.exit("%s GPUs were promised, and there are %d" % (promised, len(cards)))
    for card in cards:
        if not card[2].isdigit() or int(card[2]) <= 0:
            sys.exit("GPU %s (%s) tells no memory: %s" % tuple(card))
    errors, _ = query_gpus("index", "ecc.errors.uncorrected.volatile.total")  # not every card counts them
    for card in errors:
        if len(card) > 1 and card[1].isdigit() and int(card[1]) > 0:
            sys.exit("GPU %s has %s uncorrected memory errors" % tuple(card[:2]))
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if all(card[1] == "Simulated GPU" for card in cards):
            return  # as sandbox hosts have them
        sys.exit("nvidia-smi answers, and CUDA's driver cannot be loaded: %s" % error)
    check_cuda(cuda, int(promised))


def query_gpus(*fields: str) -> tuple[list[list[str]], str]:
    """These fields of every GPU; or none, and the error."""
    query = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    result = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
    if result.returncode:
        return [], (result.stderr or result.stdout).strip() or "status %d" % result.returncode
    return [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.strip()], ""


def check_cuda(cuda: ctypes.CDLL, promised: int) -> None:
    """Make a CUDA context on every GPU: a card that nvidia-smi lists may still not compute."""

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(text))
            sys.exit("%s: CUDA error %d, %s" % (name, code, (text.value or b"unknown").decode()))

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    if count.value < promised:
        sys.exit("%d GPUs were promised, and CUDA sees %d" % (promised, count.value))
    for number in range(count.value):
        device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if free.value * 10 < total.value * 9:
            sys.exit("GPU %d has only %d of %d MiB free" % (number, free.value >> 20, total.value >> 20))
        call("cuCtxDestroy_v2", context)


def check_tracking(uri: str, proxies: str) -> None:
    """Print 200 for a healthy MLflow server, or the error. With "no-proxies", not through a proxy."""
    handlers = [urllib.request.ProxyHandler({})] if proxies == "no-proxies" else []
    try:
        with urllib.request.build_opener(*handlers).open(uri + "/health", timeout=5) as answer:
            print(answer.status)
    except Exception as error:
        reason = getattr(error, "reason", error)
        print(getattr(reason, "strerror", None) or reason)


def require_listener(uri: str, user: str) -> None:
    """Exit where another user's program has the address: it must not get a password."""
    place = urllib.parse.urlsplit(uri)
    found = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)[0]
    others = listeners(place.port or 80, kernel_address(found[0], str(found[4][0]))) - {pwd.getpwnam(user).pw_uid}
    for id in others:
        name = next((entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == id), str(id))
        text = "a program of %s has port %s already; stop it (`ss -ltnp`), or set `port` of the server in the file"
        sys.exit(text % (name, place.port))


def kernel_address(family: int, address: str) -> str:
    """An address as /proc/net/tcp has it: in words of 32 bits, the lowest byte of each first."""
    data = socket.inet_pton(family, address)
    return b"".join(data[start : start + 4][::-1] for start in range(0, len(data), 4)).hex().upper()


def listeners(port: int, address: str) -> set[int]:
    """The users whose programs take connections at this address of the host."""
    users = set()
    places = (address, IPV4_IN_IPV6 + address, "0" * len(address), "0" * 32)
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open("/proc/net/" + name) as file:
            for fields in [line.split() for line in file][1:]:
                place, _, number = fields[1].partition(":")
                if fields[3] == LISTENING and int(number, 16) == port and place in places:
                    users.add(int(fields[7]))
    return users


def create_accounts(uri: str, admin_file: str, mark_file: str, *accounts: str) -> None:
    """Wait for the MLflow server, and create the accounts, `NAME:FILE` each, or set their passwords.

    The passwords are in files that only root can read. Their digest and the names are left in `mark_file`; an account
    that was there and is no longer named gets a password that nobody knows.
    """
    files = dict(account.split(":", 1) for account in accounts)
    with open(admin_file) as file:
        admin_password = file.read().strip()
    passwords, digest = {}, hashlib.sha256()
    for name, path in files.items():
        with open(path, "rb") as content:
            data = content.read()
        digest.update(data)
        passwords[name] = data.decode().strip()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(method: str, path: str, body: object = None, user: str = MLFLOW_ADMIN) -> bytes:
        login = user + ":" + (admin_password if user == MLFLOW_ADMIN else passwords[user])
        authorization = "Basic " + base64.b64encode(login.encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": authorization}
        data = None if body is None else json.dumps(body).encode()
        with opener.open(urllib.request.Request(uri + path, data, headers, method=method), timeout=30) as answer:
            return bytes(answer.read(MAX_ANSWER_BYTES))

    deadline = time.monotonic() + MLFLOW_START_TIMEOUT_S
    while True:
        try:
            require_listener(uri, MLFLOW_SERVICE)
            call("GET", "/health")
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit("the server does not answer: %s; see journalctl -u %s" % (error, MLFLOW_SERVICE))
            time.sleep(1)
    for name, password in passwords.items():
        account = {"username": name, "password": password}
        try:
            call("POST", "/api/2.0/mlflow/users/create", account)
        except urllib.error.HTTPError as error:
            if error.code == 401:
                text = "the server does not take the password in %s: its accounts are those of another one"
                sys.exit(text % admin_file)
            try:
                call("PATCH", "/api/2.0/mlflow/users/update-password", account)  # it was there already
            except urllib.error.HTTPError as error:
                sys.exit("the account %s cannot be made: %s" % (name, error))
        if name != MLFLOW_JOBS:  # else another user could take the name of the experiment first
            create_experiment(call, name)
    try:
        with open(mark_file) as mark:
            former = mark.read().split()[2:]
    except OSError:
        former = []
    for name in former:
        if name not in files:
            account = {"username": name, "password": os.urandom(24).hex()}
            with contextlib.suppress(urllib.error.HTTPError):  # deleted by hand
                call("PATCH", "/api/2.0/mlflow/users/update-password", account)
    # The operator's jobs may write to all experiments, as before users had accounts.
    grant = {"username": MLFLOW_JOBS, "resource_type": "experiment", "resource_id": "*", "permission": "EDIT"}
    try:
        call("POST", "/api/3.0/mlflow/users/permissions/grant", grant)
    except urllib.error.HTTPError as error:
        if b"RESOURCE_ALREADY_EXISTS" not in error.read(MAX_ERROR_BYTES):
            sys.exit("the account %s cannot write to experiments: %s" % (MLFLOW_JOBS, error))
    with open(mark_file, "w") as mark:
        mark.write(digest.hexdigest() + "  -\n" + " ".join(files) + "\n")


def create_experiment(call: Callable[..., bytes], name: str) -> None:
    """Create the experiment of a user with the user's account. One of others with its name is renamed."""
    path = "/api/2.0/mlflow/experiments/"
    try:
        call("POST", path + "create", {"name": name}, user=name)
        return
    except urllib.error.HTTPError as error:
        if b"RESOURCE_ALREADY_EXISTS" not in error.read(MAX_ERROR_BYTES):
            sys.exit("the experiment of %s cannot be made: %s" % (name, error))
    found = call("GET", path + "get-by-name?experiment_name=" + urllib.parse.quote(name))
    experiment = json.loads(found)["experiment"]
    number = {"experiment_id": experiment["experiment_id"]}
    query = {"username": name, "resource_type": "experiment", "resource_id": number["experiment_id"]}
    granted = call("GET", "/api/3.0/mlflow/users/permissions/get?" + urllib.parse.urlencode(query))
    if json.loads(granted)["permission"] == "MANAGE":
        return
    deleted = experiment["lifecycle_stage"] == "deleted"
    if deleted:  # else it cannot be renamed
        call("POST", path + "restore", number)
    # A name that somebody can predict could be taken as well.
    call("POST", path + "update", dict(number, new_name="%s, before the user (%s)" % (name, os.urandom(4).hex())))
    if deleted:
        call("POST", path + "delete", number)
    call("POST", path + "create", {"name": name}, user=name)


class FileHandle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("type", ctypes.c_int), ("bytes", ctypes.c_char * 128)]


def find_paths_without_handles(*paths: str) -> None:
    """Print the directories whose file system has no file handles, with its type."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in paths:
        handle, mount = FileHandle(128), ctypes.c_int()
        failed = libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0)
        if failed and ctypes.get_errno() == errno.EOPNOTSUPP:
            kind = subprocess.run(["stat", "-f", "-c", "%T", path], stdout=subprocess.PIPE).stdout.decode()
            print(path, kind.strip())


PROBES: dict[str, Callable[..., None]] = {
    "gpus": check_gpus,
    "handles": find_paths_without_handles,
    "tracking": check_tracking,
    MLFLOW_ACCOUNTS: create_accounts,
}

if __name__ == "__main__":
    PROBES[sys.argv[1]](*sys.argv[2:])
