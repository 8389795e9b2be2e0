"""What an image is for: the CPU type of its programs, and the CUDA that they need of the driver."""

from __future__ import annotations

import contextlib
import glob
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SHELLS = ("usr/bin/bash", "usr/bin/dash", "bin/bash", "bin/dash", "bin/busybox")
ELF_MACHINES = {62: "amd64", 183: "arm64"}
CPU_TYPE = re.compile(r"[a-z0-9_-]{1,20}\Z")
"""Slurm is asked for nodes of it, and terminals show it. In an image it may be anything."""
CUDA_PLACES = (
    "usr/local/cuda-[0-9]*/lib64",
    "usr/local/lib/python3*/*-packages/nvidia/cu*/lib",
    "usr/lib/python3*/*-packages/nvidia/cu*/lib",
)
CUDA_LIBRARY = re.compile(r"libcudart\.so\.(\d+)")


def config_facts(config: dict[str, Any]) -> dict[str, str]:
    """From the configuration of an image. Images of NVIDIA say what they need of the driver."""
    variables = dict(entry.partition("=")[::2] for entry in (config.get("config") or {}).get("Env") or ())
    cuda = "" if "NVIDIA_DISABLE_REQUIRE" in variables else variables.get("NVIDIA_REQUIRE_CUDA", "")
    architecture = CPU_TYPE.match(config.get("architecture", ""))
    return {"architecture": architecture[0] if architecture else "", "cuda": cuda}


def directory_facts(root: str) -> dict[str, str]:
    """From the files of a root file system."""
    return {"architecture": directory_architecture(root), "cuda": directory_cuda(root)}


def directory_architecture(root: str) -> str:
    """The CPU type of the programs in a root file system; empty where that is not plain."""
    for name in SHELLS:
        with contextlib.suppress(OSError), open(os.path.join(root, name), "rb") as file:
            head = file.read(20)
            if head[:4] == b"\x7fELF":
                return ELF_MACHINES.get(int.from_bytes(head[18:20], "little"), "")
    return ""


def directory_cuda(root: str) -> str:
    """The CUDA whose libraries are in the usual places of a root file system: a driver of its first release runs it."""
    places = [path for place in CUDA_PLACES for path in glob.glob(os.path.join(glob.escape(root), place))]
    names = [name for path in places if inside(path, root) for name in os.listdir(path)]
    releases = [int(found[1]) for found in map(CUDA_LIBRARY.match, names) if found]
    return "cuda>=%d.0" % min(releases) if releases else ""


def inside(path: str, root: str) -> bool:
    """Whether it is a directory of the image: a link in it may lead to one of the host."""
    real = os.path.realpath(root)
    return os.path.isdir(path) and os.path.realpath(path).startswith(real.rstrip("/") + "/")
