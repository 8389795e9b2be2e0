"""What a job may ask of Docker. Everything that is not named here is rejected, or left out. Pure, but for paths."""

from __future__ import annotations

import re

from .caller import Caller, Rejection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

OLDEST_API = 24
"""Docker's API before 1.24 takes the settings of a container when it starts, too."""
FIRST_USER_PORT = 1024

DEFAULT_NETWORKS = {"default", "bridge", "none"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_IMAGE = r"[A-Za-z0-9](?:[A-Za-z0-9_:@-]|[./](?![./]))*"
_ROUTES = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(GET|HEAD) /(_ping|version|info|events|system/df)", "plain"),
        (rf"GET /(containers|images|networks|volumes|exec/{_NAME})/json|GET /(networks|volumes)(/{_NAME})?", "plain"),
        (rf"GET /containers/{_NAME}/(json|logs|stats|top|changes|export)", "plain"),
        (rf"GET /images/(search|get|{_IMAGE}/(json|history|get))|GET /distribution/{_IMAGE}/json", "plain"),
        (rf"POST /containers/{_NAME}/(stop|kill|pause|wait|resize|rename)|POST /exec/{_NAME}/resize", "plain"),
        (rf"POST /images/{_IMAGE}/(tag|push)|POST /(containers|images|networks|volumes|build)/prune", "plain"),
        (rf"DELETE /(containers|networks|volumes)/{_NAME}|DELETE /images/{_IMAGE}", "plain"),
        (rf"POST /containers/{_NAME}/(start|restart|unpause)", "start"),
        (rf"POST /containers/{_NAME}/attach", "attach"),
        (rf"(GET|HEAD|PUT) /containers/{_NAME}/archive", "archive"),
        (rf"POST /containers/{_NAME}/exec", "exec"),
        (rf"POST /exec/{_NAME}/start", "exec-start"),
        (rf"POST /(auth|commit|networks/{_NAME}/(connect|disconnect))", "json"),
        (r"POST /containers/create", "create"),
        (r"POST /networks/create", "network"),
        (r"POST /volumes/create", "volume"),
        (r"POST /images/create", "pull"),
        (r"POST /images/load", "tar"),
        (r"POST /build", "build"),
    )
)
_CONFIG_KEYS = _words(
    "Hostname Domainname User AttachStdin AttachStdout AttachStderr ExposedPorts Tty OpenStdin StdinOnce Env Cmd "
    "Healthcheck ArgsEscaped Image Volumes WorkingDir Entrypoint NetworkDisabled OnBuild Labels StopSignal "
    "StopTimeout Shell HostConfig NetworkingConfig"
)
_HOST_KEYS = _words(
    "AutoRemove Memory MemorySwap MemoryReservation NanoCpus CpuShares CpuPeriod CpuQuota CpusetCpus PidsLimit "
    "ShmSize Tmpfs ReadonlyRootfs Init Dns DnsOptions DnsSearch ExtraHosts ConsoleSize CapDrop PublishAllPorts"
)
"""Settings that take rights away, or concern the container alone."""
_HARMLESS_VALUES = {
    "IpcMode": ("private", "shareable", "none"),
    "CgroupnsMode": ("private",),
    "Isolation": ("default",),
    "SecurityOpt": (["no-new-privileges"], ["no-new-privileges:true"]),
    "LogConfig": ({"Type": "", "Config": {}}, {"Type": "json-file", "Config": {}}, {"Type": "none", "Config": {}}),
    "Runtime": ("runc",),
    "VolumeDriver": ("local",),
    "MemorySwappiness": (-1,),
}
"""Values of further settings that a client may send; they are Docker's own defaults, or stricter."""
_OPTIONS = {
    "Privileged": "--privileged",
    "CapAdd": "--cap-add",
    "Devices": "--device",
    "PidMode": "--pid",
    "UsernsMode": "--userns",
    "UTSMode": "--uts",
    "IpcMode": "--ipc",
    "CgroupParent": "--cgroup-parent",
    "SecurityOpt": "--security-opt",
    "VolumesFrom": "--volumes-from",
    "GroupAdd": "--group-add",
}
_COMMAND_KEYS = _words("AttachStdin AttachStdout AttachStderr DetachKeys Tty Cmd Env User WorkingDir ConsoleSize")
_BUILD_KEYS = _words(
    "t dockerfile buildargs labels nocache pull rm forcerm q target shmsize cachefrom platform extrahosts memory "
    "memswap cpushares cpusetcpus cpuperiod cpuquota"
)
_BUILD_DEFAULTS = {"networkmode": ("", "default", "bridge"), "version": ("", "1"), "ulimits": ("null", "[]")}
_EMPTY = {"", "0", "null", "false"}


def route(method: str, path: str) -> str:
    """What kind of request it is. Anything that is not in the table is rejected."""
    version = re.match(r"/v1\.(\d{1,3})(?=/)", path)
    if version and int(version.group(1)) < OLDEST_API:
        raise Rejection(f"this version of Docker's API is too old: use 1.{OLDEST_API} or later")
    line = f"{method} {path[version.end() :] if version else path}"
    if line in ("POST /session", "POST /grpc"):
        raise Rejection("BuildKit is not available in jobs: set DOCKER_BUILDKIT=0")
    kind = next((kind for pattern, kind in _ROUTES if pattern.fullmatch(line)), None)
    if kind is None:
        raise Rejection(f"jobs may not ask Docker for {line}")
    return kind


def confine_container(body: Any, caller: Caller, cgroup: str, shares: Sequence[str], gpus: Sequence[str]) -> Any:
    """The container that a job gets. With files of the node in it, it runs as the user and without any privilege."""
    config = _only(body, _CONFIG_KEYS, {}, "container")
    host = dict(config.get("HostConfig") or {})
    mounts = [*_binds(host.pop("Binds", None)), *_mounts(host.pop("Mounts", None))]
    network, ports = host.pop("NetworkMode", ""), host.pop("PortBindings", None)
    requests = host.pop("DeviceRequests", None)
    limits = _limits(host.pop("Ulimits", None), caller)
    host.pop("RestartPolicy", None)  # a container ends with its job
    host = _only(host, _HOST_KEYS, _HARMLESS_VALUES, "container")
    _check_ports(ports or {})
    has_node_files = False
    for mount in mounts:
        if mount["Type"] == "bind":
            mount["Source"] = _own_path(mount["Source"], caller, shares)
            has_node_files = True
    host.update({"CgroupParent": cgroup, "Mounts": mounts, "NetworkMode": network or "default"})
    host.update({"PortBindings": ports or {}, "RestartPolicy": {"Name": "no"}, "Ulimits": limits})
    if requests:
        host["DeviceRequests"] = [_gpu_request(requests, gpus)]
    if has_node_files:
        config["User"] = _own_user(config.get("User") or "", caller)
        host.update({"UsernsMode": "host", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"]})
    config["HostConfig"] = host
    endpoints = (config.pop("NetworkingConfig", None) or {}).get("EndpointsConfig") or {}
    return {**config, "NetworkingConfig": {"EndpointsConfig": endpoints}}


def check_sources(container: Any, caller: Caller, shares: Sequence[str]) -> None:
    """Reject a container with a path that leads elsewhere since it was made, by a link that took its place.

    Docker uses the path once more, after this: a link that comes in between is followed.
    """
    for mount in container["HostConfig"].get("Mounts") or ():
        if mount["Type"] == "bind" and _own_path(mount["Source"], caller, shares) != mount["Source"]:
            raise Rejection(f"cannot mount {mount['Source']}: it has become a link. Make a new container")


def networks(config: Any) -> set[str]:
    """The networks of a container that are not Docker's own defaults."""
    return {config["HostConfig"]["NetworkMode"], *config["NetworkingConfig"]["EndpointsConfig"]} - DEFAULT_NETWORKS


def check_network(name: str, network: Any) -> None:
    if not isinstance(network, dict) or network.get("Driver") != "bridge":
        raise Rejection(f"--network={name} is not available in jobs: use a network of your own, bridge or none")


def confine_exec(body: Any, caller: Caller, container: Any) -> Any:
    """A command in a container: with the container's own rights."""
    command = _only(body, _COMMAND_KEYS, {}, "command")
    if runs_as_user(container):
        command["User"] = _own_user(command.get("User") or "", caller)
    return command


def runs_as_user(container: Any) -> bool:
    """Whether a container has files of the node."""
    return bool(container["HostConfig"].get("UsernsMode") == "host")


def confine_build(query: list[tuple[str, str]], cgroup: str) -> list[tuple[str, str]]:
    kept = []
    for key, value in query:
        if key in _BUILD_KEYS or (key, value) == ("networkmode", "none"):
            kept.append((key, value))
        elif key == "cgroupparent" or value in _EMPTY or value in _BUILD_DEFAULTS.get(key, ()):
            continue
        elif key == "remote":
            raise Rejection("jobs build from a directory of theirs, and not from an address")
        elif key == "version":
            raise Rejection("BuildKit is not available in jobs: set DOCKER_BUILDKIT=0")
        else:
            raise Rejection(f"jobs may not build with {key}={value}")
    return [*kept, ("cgroupparent", cgroup)]


def confine_pull(query: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if any(key == "fromSrc" and value != "-" for key, value in query):
        raise Rejection("jobs import images from their own files, and not from an address")
    return query


def confine_volume(body: Any) -> Any:
    return _only(body, frozenset({"Name", "Labels"}), {"Driver": ("local",)}, "volume")


def confine_network(body: Any) -> Any:
    harmless = {"Scope": ("local",), "IPAM": ({"Driver": "default", "Options": {}, "Config": []},)}
    network = _only(body, frozenset({"Name", "CheckDuplicate", "Internal", "Labels", "Driver"}), harmless, "network")
    if network.get("Driver", "bridge") not in ("", "bridge"):
        raise Rejection("jobs may make networks of the driver bridge only")
    return network


def _only(body: Any, keys: frozenset[str], harmless: Any, what: str) -> dict[str, Any]:
    """What is named, and nothing else: Docker reads keys in any case, and new releases have new ones."""
    if not isinstance(body, dict):
        raise Rejection(f"not a {what}")
    kept = {}
    for key, value in body.items():
        if key in keys:
            kept[key] = value
        elif value and value not in harmless.get(key, ()) and not _is_empty(value):
            raise Rejection(f"{_OPTIONS.get(key, key)} is not available in jobs")
    return kept


def _is_empty(value: Any) -> bool:
    """`{"Driver": "", "Config": {}}` says nothing, either."""
    return isinstance(value, dict) and all(not entry or _is_empty(entry) for entry in value.values())


def _binds(binds: Any) -> list[dict[str, Any]]:
    mounts = []
    for bind in binds or ():
        source, _, rest = str(bind).partition(":")
        target, _, mode = rest.partition(":")
        words = set(mode.split(",")) - {"", "rw", "z", "Z"}
        if not source or not target or words - {"ro"}:
            raise Rejection(f"-v {bind}: write SOURCE:TARGET or SOURCE:TARGET:ro")
        kind = "bind" if source.startswith("/") else "volume"
        mounts.append({"Type": kind, "Source": source, "Target": target, "ReadOnly": "ro" in words})
    return mounts


def _mounts(mounts: Any) -> list[dict[str, Any]]:
    plain = []
    for mount in mounts or ():
        keys = frozenset({"Type", "Source", "Target", "ReadOnly"})
        mount = _only(mount, keys, {"Consistency": ("default",)}, "mount")
        if mount.get("Type") not in ("bind", "volume", "tmpfs"):
            raise Rejection(f"mounts of type {mount.get('Type')} are not available in jobs")
        plain.append(mount)
    return plain


def _own_path(source: Any, caller: Caller, shares: Sequence[str]) -> str:
    """A directory or file of the caller's, or on a share. The container has the caller's rights there, no others.

    The caller must reach it: a mount goes past the directories above it, and those may be closed to the caller.
    """
    found = caller.resolve(str(source))
    if found is None:
        raise Rejection(f"cannot mount {source}: this node has no such file, or you may not reach it")
    path, owner = found
    is_shared = any(path == share or path.startswith(f"{share}/") for share in shares)
    if owner != caller.uid and not is_shared:
        raise Rejection(f"cannot mount {source}: it is not yours")
    return path


def _own_user(user: str, caller: Caller) -> str:
    if user not in ("", str(caller.uid), f"{caller.uid}:{caller.gid}", caller.user):
        raise Rejection(f"--user {user}: a container with files of the node runs as you, {caller.user}")
    return f"{caller.uid}:{caller.gid}"


def _check_ports(ports: Any) -> None:
    for bindings in ports.values():
        for binding in bindings or ():
            number = str(binding.get("HostPort") or FIRST_USER_PORT).partition("-")[0]
            if set(binding) - {"HostIp", "HostPort"} or not number.isdigit() or int(number) < FIRST_USER_PORT:
                raise Rejection(f"ports below {FIRST_USER_PORT} are root's")


def _limits(asked: Any, caller: Caller) -> list[dict[str, Any]]:
    """What the job could set itself: Docker's daemon is root, and would raise any limit."""
    limits = []
    for limit in asked or ():
        limit = _only(limit, frozenset({"Name", "Soft", "Hard"}), {}, "limit")
        name = str(limit.get("Name"))
        values: list[Any] = [limit.get("Soft"), limit.get("Hard")]
        if name not in caller.limits:
            raise Rejection(f"--ulimit {name} is not available in jobs")
        if any(type(value) is not int or value < -1 for value in values):
            raise Rejection(f"--ulimit {name}: not a number")
        if any((value if value >= 0 else float("inf")) > caller.limits[name] for value in values):
            raise Rejection(f"--ulimit {name}: your job may have {caller.limits[name]} at most")
        limits.append(limit)
    return limits


def _gpu_request(requests: Any, gpus: Sequence[str]) -> dict[str, Any]:
    """The job's own GPUs, whichever were asked for."""
    for request in requests:
        if request.get("Capabilities") != [["gpu"]] or request.get("Driver") not in ("", "nvidia", None):
            raise Rejection("jobs may ask for GPUs only (--gpus)")
    if not gpus:
        raise Rejection("this job has no GPUs: ask Slurm for some (--gpus)")
    return {"Driver": "", "Count": 0, "DeviceIDs": list(gpus), "Capabilities": [["gpu"]]}
