"""Checks of NVIDIA GPUs: through the driver's library (NVML), the kernel's log, and the PCI bus."""

from __future__ import annotations

import ctypes
import glob
import re
from typing import Any, Callable, Iterator

from .node import Node

LIBRARY = "libnvidia-ml.so.1"
SUCCESS, LOST, MISMATCH = 0, 15, 18
"""What NVML's functions return: all is well, the GPU is lost, library and driver are of different releases."""
RECOVERY_FIELD = 230
ACTIONS = {
    1: "reset the GPU",
    2: "reboot the host",
    3: "drain peer-to-peer traffic",
    4: "end its jobs, then reset the GPU",
    5: "check IMEX",
    6: "reset its bus",
    7: "reboot the host",
}
"""What the driver asks for, by the number of its recovery action."""
XID_AGE_S = 2 * 3600
XIDS = {
    **dict.fromkeys((46, 62, 109, 110, 119, 120), "the GPU or its firmware has stopped: reset the GPU"),
    **dict.fromkeys((48, 95, 140), "memory error that was not contained: reset the GPU"),
    54: "a power cable is missing",
    64: "the GPU cannot replace bad memory: reset it, then have it serviced",
    **dict.fromkeys((74, 136, *range(144, 151), 155), "NVLink failed: reset the GPU"),
    79: "the GPU fell off the bus: reboot the host",
    **dict.fromkeys((143, 156, 158), "the GPU did not start or answer: reset it"),
}
"""Errors of the driver that need an action. The others are faults of programs, or are only counted."""
SLOWDOWNS = {
    0x8: "the hardware slows it down",
    0x20: "too hot",
    0x40: "much too hot",
    0x80: "the power supply brakes it",
}
MAX_LINKS = 18
LINK_COUNTERS = {0: "replays", 1: "recoveries", 2: "errors of flits", 3: "errors of data"}
"""What NVML counts for each NVLink."""
MAX_LINK_ERRORS = 100
"""So many more since the last run are too many."""
SWITCHES = "/proc/driver/nvidia-nvswitch/devices/*"


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("name", ctypes.c_char * 32),
    ]


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of version 3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The driver's library. What an older one does not have is None."""

    def __init__(self, path: str = "") -> None:
        self.library = ctypes.CDLL(path or LIBRARY)
        self.status: int = self.library.nvmlInit_v2()

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self.library, name, None)
        return 3 if function is None else int(function(*arguments))

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        return int(value.value) if self.call(name, *arguments, ctypes.byref(value)) == SUCCESS else None

    def gpus(self) -> Iterator[Gpu]:
        for index in range(self.number("nvmlDeviceGetCount_v2") or 0):
            handle = ctypes.c_void_p()
            status = self.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            yield Gpu(self, index, handle, status)


class Gpu:
    """One GPU, asked through NVML."""

    def __init__(self, nvml: Nvml, index: int, handle: ctypes.c_void_p, status: int) -> None:
        self.nvml, self.index, self.handle, self.status = nvml, index, handle, status
        text, info = ctypes.create_string_buffer(96), PciInfo()
        known = status == SUCCESS and nvml.call("nvmlDeviceGetUUID", handle, text, 96) == SUCCESS
        self.uuid = text.value.decode() if known else ""
        known = status == SUCCESS and nvml.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info)) == SUCCESS
        self.bus = f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}" if known else ""
        minor = self.number("nvmlDeviceGetMinorNumber")
        self.minor = index if minor is None else minor

    def __str__(self) -> str:
        return f"GPU {self.index}{f' ({self.bus})' if self.bus else ''}"

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        return self.nvml.number(name, self.handle, *arguments, kind=kind) if self.status == SUCCESS else None

    @property
    def recovery_action(self) -> int | None:
        value = FieldValue(field=RECOVERY_FIELD)
        status = self.nvml.call("nvmlDeviceGetFieldValues", self.handle, 1, ctypes.byref(value))
        return int(value.value & 0xFFFFFFFF) if status == value.status == SUCCESS else None

    @property
    def remapping(self) -> tuple[int, int] | None:
        """Whether a replacement of bad memory waits for a reset, and whether one has failed."""
        parts = [ctypes.c_uint() for _ in range(4)]
        status = self.nvml.call("nvmlDeviceGetRemappedRows", self.handle, *map(ctypes.byref, parts))
        return (parts[2].value, parts[3].value) if status == SUCCESS else None

    @property
    def links(self) -> int:
        """How many NVLinks are up."""
        return sum(self.number("nvmlDeviceGetNvLinkState", link) == 1 for link in range(MAX_LINKS))

    @property
    def watts(self) -> float | None:
        power = self.number("nvmlDeviceGetPowerUsage")
        return None if power is None else power / 1000

    @property
    def utilization(self) -> int | None:
        """In how many percent of the time a kernel was there, whether it computed or waited."""
        rates = Utilization()
        status = self.nvml.call("nvmlDeviceGetUtilizationRates", self.handle, ctypes.byref(rates))
        return int(rates.gpu) if status == SUCCESS else None

    @property
    def pids(self) -> list[int]:
        """The processes that compute on it."""
        size, processes = ctypes.c_uint(256), (ProcessInfo * 256)()
        status = self.nvml.call("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, ctypes.byref(size), processes)
        return [processes[number].pid for number in range(size.value)] if status == SUCCESS else []


def gpus(node: Node) -> list[Gpu]:
    """The GPUs, opened once a run; none without a driver."""
    if "gpus" not in node.cache:
        try:
            nvml = Nvml()
            node.cache["nvml_status"] = nvml.status
            node.cache["gpus"] = list(nvml.gpus()) if nvml.status == SUCCESS else []
        except OSError:
            node.cache["gpus"] = []
    return list(node.cache["gpus"])


def check_mismatch(node: Node) -> Iterator[str]:
    gpus(node)
    if node.cache.get("nvml_status") == MISMATCH:
        yield "Driver/library version mismatch"


def check_lost(node: Node) -> Iterator[str]:
    present = [gpu.uuid for gpu in gpus(node) if gpu.uuid]
    for uuid in node.baseline.all_of("GPUs", present):
        if uuid not in present:
            yield f"{uuid} is gone"
    for gpu in gpus(node):
        if gpu.status == LOST:
            yield f"{gpu} is lost"


def check_recovery(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        action = gpu.recovery_action
        if action:
            yield f"{gpu}: the driver asks to {ACTIONS.get(action, f'take action {action}')}"


def check_xids(node: Node) -> Iterator[str]:
    """Errors that need an action, unless the driver itself says that none is needed any more."""
    settled = {gpu.bus for gpu in gpus(node) if gpu.recovery_action == 0}
    for bus, number, text in _xids(node):
        if number in XIDS and bus not in settled:
            yield f"{bus}: XID {number}, {XIDS[number]} ({text})"


def check_past_xids(node: Node) -> Iterator[str]:
    settled = {gpu.bus for gpu in gpus(node) if gpu.recovery_action == 0}
    for bus, number, text in _xids(node):
        if number in XIDS and bus in settled:
            yield f"{bus}: XID {number} ({text})"


def _xids(node: Node) -> Iterator[tuple[str, int, str]]:
    for text in node.kernel_log(XID_AGE_S):
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)", text)
        if match:
            yield match[1].lower(), int(match[2]), text.partition("NVRM: ")[2]


def check_ecc(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        errors = gpu.number("nvmlDeviceGetTotalEccErrors", 1, 0, kind=ctypes.c_ulonglong)
        if errors:
            yield f"{gpu}: {errors} errors that could not be corrected"


def check_pending_remap(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        rows = gpu.remapping
        if rows is not None and rows[0]:
            yield f"{gpu}: bad memory is replaced at the next reset"
        if rows is None and gpu.number("nvmlDeviceGetRetiredPagesPendingStatus"):
            yield f"{gpu}: pages are retired at the next reset"


def check_failed_remap(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        rows = gpu.remapping
        if rows is not None and rows[1]:
            yield f"{gpu}: bad memory could not be replaced"


def check_nvlinks(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        links = gpu.links
        best = node.baseline.best(f"NVLinks {gpu.uuid}", links)
        if links < best:
            yield f"{gpu}: {links} NVLinks, before {best:.0f}"


def check_link_errors(node: Node) -> Iterator[str]:
    """NVLinks whose errors rise from run to run."""
    counts: dict[str, int] = {}
    for gpu in gpus(node):
        for link in range(MAX_LINKS):
            for counter, name in LINK_COUNTERS.items():
                value = gpu.number("nvmlDeviceGetNvLinkErrorCounter", link, counter, kind=ctypes.c_ulonglong)
                if value is not None:
                    counts[f"{gpu}: NVLink {link}: {name}"] = value
    last = node.remember("link_errors", counts) or {}
    for name, value in counts.items():
        rise = value - last.get(name, value)
        if rise > MAX_LINK_ERRORS:
            yield f"{name} rose by {rise} to {value}"


def check_persistence(node: Node) -> Iterator[str]:
    """GPUs whose persistence mode was on, and is off: each start of a program then loads the driver's state anew."""
    for gpu in gpus(node):
        mode = gpu.number("nvmlDeviceGetPersistenceMode")
        if mode is not None and mode < node.baseline.best(f"persistence {gpu.uuid}", mode):
            yield f"{gpu}: its persistence mode is off"


def check_fabric_manager(node: Node) -> Iterator[str]:
    """Machines with NVSwitches cannot start CUDA without this program."""
    switches = glob.glob(SWITCHES)
    if switches and not any(process.name.startswith("nv-fabricmanage") for process in node.processes.values()):
        yield f"{len(switches)} NVSwitches, and no nv-fabricmanager"


def check_clocks(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        bits = gpu.number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0
        for bit, text in SLOWDOWNS.items():
            if bits & bit:
                yield f"{gpu}: {text}"


def check_pcie(node: Node) -> Iterator[str]:
    for gpu in gpus(node):
        width = gpu.number("nvmlDeviceGetCurrPcieLinkWidth")
        if width:
            best = node.baseline.best(f"PCIe {gpu.uuid}", width)
            if width < best:
                yield f"{gpu}: {width} lanes, before {best:.0f}"


GPU_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {
    "gpu-driver-mismatch": check_mismatch,
    "gpu-lost": check_lost,
    "gpu-recovery": check_recovery,
    "gpu-xid": check_xids,
    "gpu-xid-past": check_past_xids,
    "gpu-ecc": check_ecc,
    "gpu-remap-pending": check_pending_remap,
    "gpu-remap-failed": check_failed_remap,
    "gpu-nvlink": check_nvlinks,
    "gpu-nvlink-errors": check_link_errors,
    "gpu-clock": check_clocks,
    "gpu-pcie": check_pcie,
    "gpu-persistence": check_persistence,
    "fabric-manager": check_fabric_manager,
}
