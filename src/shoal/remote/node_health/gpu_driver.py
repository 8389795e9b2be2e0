"""NVIDIA's driver: devices without one, its packages, and the reboot after `up` has installed them.

The reboot is asked of the hook, which drains the node first and reboots it when Slurm says that no job is there. When
the driver works the check passes, and the hook resumes the node.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Callable, Iterator

from .gpu_checks import MISMATCH, gpus
from .node import Node, read_text

PCI_DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"
OS_RELEASE = "/etc/os-release"
DPKG_STATUS = "/var/lib/dpkg/status"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
DEBIAN_PACKAGES = ("nvidia-driver", "nvidia-smi", "libcuda1", "firmware-nvidia-gsp")
"""Of Debian 12 and 13, in `contrib`, `non-free` and `non-free-firmware`; with the headers, which the module needs."""
UBUNTU_PACKAGES = ("linux-headers-generic", "nvidia-headless-580-server", "nvidia-utils-580-server")
"""Of Ubuntu 22.04, 24.04 and 26.04, in `restricted`."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def driver_packages(os_id: str, version: str, machine: str) -> list[str]:
    """The packages of the driver; none where the distribution has none that are known."""
    if machine not in ARCHITECTURES:
        return []
    if os_id == "debian" and version in ("12", "13"):
        return [f"linux-headers-{ARCHITECTURES[machine]}", *DEBIAN_PACKAGES]
    return [*UBUNTU_PACKAGES] if os_id == "ubuntu" and version in ("22.04", "24.04", "26.04") else []


def own_packages() -> list[str]:
    """The packages for this node."""
    fields = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)', read_text(OS_RELEASE), re.MULTILINE))
    return driver_packages(fields.get("ID", ""), fields.get("VERSION_ID", ""), os.uname().machine)


def devices_without_driver(node: Node) -> list[str]:
    """NVIDIA devices on the bus, each with its driver, where the driver's library opens none."""
    if gpus(node) or node.cache.get("nvml_status") == MISMATCH:
        return []
    devices = []
    for folder in sorted(glob.glob(f"{PCI_DEVICES}/*")):
        if read_text(f"{folder}/vendor").strip() == NVIDIA and read_text(f"{folder}/class").startswith(DISPLAY_CLASS):
            driver = f"{folder}/driver"
            name = os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else "none"
            devices.append(f"{os.path.basename(folder)}: driver {name}")
    return devices


def check_driver(node: Node) -> Iterator[str]:
    """NVIDIA devices without a driver that works: Slurm counts them as no GPU."""
    devices = devices_without_driver(node)
    packages = own_packages()
    if devices and packages and not installed(packages):
        yield f"{devices[0]}; `driver: nvidia` in the file installs {' '.join(packages)}"
        devices = devices[1:]
    yield from devices


def check_reboot(node: Node) -> Iterator[str]:
    """A driver that the file asks for, which is installed and not loaded: the host reboots once when it is idle."""
    devices = devices_without_driver(node) if node.config.get("driver") == "nvidia" else []
    packages = own_packages()
    if not devices or not packages or not installed(packages):
        node.memory.pop("driver_boot", None)
        return
    boot = read_text(BOOT_ID).strip()
    if node.memory.setdefault("driver_boot", boot) == boot:
        node.orders.append(f"reboot {boot}")
        yield "the NVIDIA driver is installed; the host reboots when its jobs have ended"
    else:
        yield f"the NVIDIA driver does not work after the reboot: {devices[0]}"


def installed(packages: list[str]) -> bool:
    text = "\n" + read_text(DPKG_STATUS)
    return all(
        re.search(rf"\nPackage: {re.escape(name)}\nStatus: (?:install|hold) ok installed\n", text) for name in packages
    )


DRIVER_CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {
    "gpu-driver": check_driver,
    "driver-reboot": check_reboot,
}
