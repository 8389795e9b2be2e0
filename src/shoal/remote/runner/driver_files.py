"""The files of the NVIDIA driver, for commands in an image: they fit this node's kernel module, so no image has them.

Which GPUs a command may open is decided by the job's cgroup; here are only libraries and `nvidia-smi`.
"""

from __future__ import annotations

import ctypes
import os
import re

DEVICE = "/dev/nvidiactl"
DIRECTORIES = (
    "/usr/lib/%s-linux-gnu" % os.uname().machine,
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)
LIBRARY = re.compile(
    r"lib(cuda|cudadebugger|nvcuvid|nvidia-(ml|cfg|encode|gpucomp|nvvm\d*|opencl|opticalflow|ptxjitcompiler))\.so\.[\d.]+"
)
PROGRAMS = ("/usr/local/nvidia/bin/nvidia-smi", "/usr/bin/nvidia-smi")
PLACE, PROGRAM_PLACE = "/run/nvidia/lib", "/run/nvidia/bin"
SWITCH = "NVIDIA_DISABLE_REQUIRE"
"""A variable of an image or a job: it runs whatever the driver is."""
CONDITION = re.compile(r"(cuda|driver)(>=|<=|!=|=|<|>)(\d+(?:\.\d+)*)")


def driver_mounts() -> list[tuple[str, str, bool]]:
    """Source, destination, whether it is read-only. None on a node without GPUs."""
    if not os.path.exists(DEVICE):
        return []
    for directory in DIRECTORIES:
        try:
            names = sorted(filter(LIBRARY.fullmatch, os.listdir(directory)))
        except OSError:
            continue
        if any(name.startswith("libcuda.so.") for name in names):
            files = [(os.path.join(directory, name), PLACE + "/" + name) for name in names]
            files += [(name, PROGRAM_PLACE + "/nvidia-smi") for name in filter(os.path.exists, PROGRAMS)][:1]
            return [(os.path.realpath(file), place, True) for file, place in files if os.path.isfile(file)]
    return []


def driver_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables with which programs find these files. Those of the image and the job come first."""
    places = {"LD_LIBRARY_PATH": PLACE, "PATH": PROGRAM_PLACE}
    return {name: ":".join(filter(None, (environment.get(name), place))) for name, place in places.items()}


def driver_problem(image: dict[str, str], mounts: list[tuple[str, str, bool]]) -> str:
    """Why the driver cannot run the image's CUDA, or nothing. Images of NVIDIA say what they need."""
    needed = required(image)
    libraries = [source for source, target, _ in mounts if target == PLACE + "/libcuda.so.1"]
    if not needed or not libraries or SWITCH in os.environ:
        return ""
    facts = {"driver": libraries[0].rpartition(".so.")[2], "cuda": driver_cuda(libraries[0])}
    if not facts["cuda"] or is_met(needed, facts):
        return ""
    return "needs CUDA %s, and driver %s has %s; take an image for CUDA %s or older, or install a newer driver" % (
        least_cuda(needed),
        facts["driver"],
        facts["cuda"],
        facts["cuda"],
    )


def required(image: dict[str, str]) -> str:
    """What these variables of an image demand of the driver, or nothing."""
    needed = image.get("NVIDIA_REQUIRE_CUDA", "")
    return needed if CONDITION.search(needed) and SWITCH not in image else ""


def least_cuda(needed: str) -> str:
    least = [found[2] for found in CONDITION.findall(needed) if found[0] == "cuda"]
    return least[0] if least else needed


def driver_cuda(library: str) -> str:
    """The newest CUDA that the driver knows: "12.8". Empty where it does not say."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return "%d.%d" % (version.value // 1000, version.value % 1000 // 10)


def is_met(needed: str, facts: dict[str, str]) -> bool:
    """Whether one of the alternatives holds. They stand between blanks, and the conditions of each between commas.

    What it says of brands and CPU types is taken as true: the range of drivers beside it decides.
    """
    return any(all(holds(condition, facts) for condition in group.split(",")) for group in needed.split())


def holds(condition: str, facts: dict[str, str]) -> bool:
    found = CONDITION.fullmatch(condition)
    if found is None:
        return True
    fact, wanted = numbers(facts[found[1]]), numbers(found[3])
    fact = fact[: len(wanted)]  # driver=535 is any driver of that branch
    results = {
        **{">=": fact >= wanted, "<=": fact <= wanted, "<": fact < wanted},
        **{">": fact > wanted, "=": fact == wanted, "!=": fact != wanted},
    }
    return results[found[2]]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
