#!/usr/bin/python3 -ISB
# Written by shoal; changes here are lost.
"""`docker` in jobs: rootless podman, with what podman itself does not know translated.

`docker compose` is a compose program that asks the job's own podman, and `--gpus` names the GPUs of the job.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

PLUGINS = ("~/.docker/cli-plugins", "/usr/local/lib/docker/cli-plugins", "/usr/libexec/docker/cli-plugins",
           "/usr/lib/docker/cli-plugins", "/usr/local/bin", "/usr/bin")  # fmt: skip
"""Where `docker-compose` may be: Docker's places of plugins, then those of programs."""
FLAGS = frozenset(
    (
        *("--detach", "--disable-content-trust", "--env-host", "--help", "--http-proxy", "--init", "--interactive"),
        *(
            "--no-healthcheck",
            "--no-hostname",
            "--no-hosts",
            "--oom-kill-disable",
            "--privileged",
            "--publish-all",
            "--quiet",
        ),
        *("--read-only", "--read-only-tmpfs", "--replace", "--rm", "--rmi", "--rootfs", "--sig-proxy"),
        *("--tls-verify", "--tty", "--passwd", "--unsetenv-all"),
    )
)
"""Options of `run` and `create` without a value."""
SHORT_FLAGS = "diPqt"
DRIVER = "/proc/driver/nvidia/gpus"


class UsageError(Exception):
    """What was asked, and what to do instead."""


def main(arguments: list[str]) -> None:
    try:
        line = command_line(arguments, os.environ)
    except UsageError as error:
        sys.exit(f"docker: {error}")
    os.execvp(line[0], line)


def command_line(arguments: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> list[str]:
    """The line of podman or of a compose program that does what a line of docker asks."""
    words = without_own_host(arguments, environment)
    if words[:1] == ["compose"]:
        return [compose_program(), *words[1:]]
    at = 1 if words[:1] == ["container"] else 0
    if words[at : at + 1] in (["run"], ["create"]):
        words[at + 1 :] = with_devices(words[at + 1 :], environment)
    elif words[at : at + 1] == ["rm"] and _is_forced(words[at + 1 :]):
        words.insert(at + 1, "--time=0")  # Docker kills what it removes; podman would ask it to stop
    return ["podman", *words]


def _is_forced(words: Sequence[str]) -> bool:
    return any(word in ("--force", "--force=true") or re.fullmatch("-[a-z]*f[a-z]*", word) for word in words)


def without_own_host(arguments: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> list[str]:
    """Without `-H`, by which compose programs name the job's own podman when they call docker."""
    words = list(arguments)
    while words and words[0].startswith(("-H", "--host")):
        option = words.pop(0)
        name, joined, host = option.partition("=") if option.startswith("--") else (option[:2], option[2:], option[2:])
        if name not in ("-H", "--host"):
            return [option, *words]
        host = host if joined else words.pop(0) if words else ""
        if host != environment.get("DOCKER_HOST"):
            raise UsageError(f"cannot reach {host}: in jobs it runs podman on this node; leave out {name}")
    return words


def compose_program() -> str:
    for place in PLUGINS:
        program = os.path.join(os.path.expanduser(place), "docker-compose")
        if os.access(program, os.X_OK):
            return program
    raise UsageError("no docker-compose on this node: put it into ~/.docker/cli-plugins, or ask for its package")


def with_devices(words: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> list[str]:
    """Options and command of a container, with `--device` in place of `--gpus`."""
    line: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        option = rest.pop(0)
        name, has_value, value = option.partition("=")
        takes_next = not has_value and rest and _takes_value(option)
        if name != "--gpus":
            line += [option, rest.pop(0)] if takes_next else [option]
            continue
        for gpu in requested_gpus(rest.pop(0) if takes_next else value, job_gpus(environment)):
            line += ["--device", f"nvidia.com/gpu={gpu}"]
    return line + rest


def _takes_value(option: str) -> bool:
    """Whether the next word belongs to an option: not for `-it`, nor for `-v/a:/b`, where the value is joined."""
    if option.startswith("--"):
        return option not in FLAGS
    letters = option[1:].lstrip(SHORT_FLAGS)
    return len(letters) == 1


def requested_gpus(request: str, gpus: Sequence[str]) -> list[str]:
    """Those of the job's GPUs that `--gpus` asks for: `all`, a number of them, or `device=0,1`, counted in the job."""
    if not gpus:
        raise UsageError("this job has no GPUs: ask Slurm for some (--gpus)")
    [fields] = csv.reader([request]) if request else [[]]
    count, named = "all", []
    for field in fields:
        name, _, value = field.partition("=")
        if name == "device":
            named = value.split(",")
        elif named and name.isdigit():  # without quotes: device=0,1
            named.append(name)
        elif re.fullmatch(r"(count=)?(all|-1|\d+)", field):
            count = value or name
        elif name not in ("driver", "capabilities", "options"):
            raise UsageError(f"--gpus {request}: write all, a number, or device=0,1")
    if named:
        missing = [name for name in named if not (name.isdigit() and int(name) < len(gpus))]
        if missing:
            raise UsageError(f"no GPU {missing[0]} in this job: its GPUs are 0 to {len(gpus) - 1}")
        return [gpus[int(name)] for name in named]
    if count in ("all", "-1"):
        return list(gpus)
    if int(count) > len(gpus):
        raise UsageError(f"--gpus {count}, and this job has {len(gpus)}: ask Slurm for more (--gpus)")
    return list(gpus[: int(count)])


def job_gpus(environment: os._Environ[str] | dict[str, str], driver: str = DRIVER) -> list[str]:
    """The job's GPUs as NVIDIA's tools number them. The job's cgroup decides which of them open."""
    ids = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""
    indexes = gpu_indexes(driver)
    return [indexes.get(minor, minor) for minor in ids.split(",") if minor]


def gpu_indexes(driver: str = DRIVER) -> dict[str, str]:
    """NVIDIA's numbers of GPUs, which are in the order of the bus, by the N of /dev/nvidiaN, which Slurm has."""
    indexes = {}
    for index, path in enumerate(sorted(glob.glob(f"{driver}/*/information"))):
        with open(path, encoding="ascii", errors="replace") as file:
            minor = re.search(r"^Device Minor:\s*(\d+)\s*$", file.read(), re.MULTILINE)
        if minor:
            indexes[minor[1]] = str(index)
    return indexes


if __name__ == "__main__":
    main(sys.argv[1:])
