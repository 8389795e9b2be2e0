"""NVIDIA devices without a driver, on a simulated bus: what is found, what to install, and the one reboot."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of

from shoal.agent.document import Command, Item, Packages
from shoal.agent.facts import Facts, Gpu
from shoal.plan.diff import driver_keys
from shoal.remote.agent.facts import pci_gpus
from shoal.remote.driver_sources import COMPONENTS, add_sources
from shoal.remote.node_health import gpu_checks, gpu_driver, main
from shoal.remote.node_health.gpu_driver import check_driver, check_reboot, driver_packages
from shoal.remote.node_health.node import Baseline, Node
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.documents import documents
from shoal.roles.registry import component_findings

DEBIAN = ["linux-headers-amd64", "nvidia-driver", "nvidia-smi", "libcuda1", "firmware-nvidia-gsp"]
UBUNTU = ["linux-headers-generic", "nvidia-headless-580-server", "nvidia-utils-580-server"]
REEF = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]DRIVER}
"""


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated PCI bus with a GPU and its sound device, on Debian 12, without a driver."""
    for name, vendor, kind in (("0000:41:00.0", "0x10de", "0x030200"), ("0000:41:00.1", "0x10de", "0x040300")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    (tmp_path / "status").write_text("")
    (tmp_path / "boot_id").write_text("first\n")
    monkeypatch.setattr(gpu_checks, "LIBRARY", "/nonexistent/libnvidia-ml.so.1")
    for name, path in (
        ("PCI_DEVICES", "pci"), ("OS_RELEASE", "os-release"), ("DPKG_STATUS", "status"), ("BOOT_ID", "boot_id")
    ):  # fmt: skip
        monkeypatch.setattr(gpu_driver, name, str(tmp_path / path))
    monkeypatch.setattr(gpu_driver, "ARCHITECTURES", {gpu_driver.os.uname().machine: "amd64"})
    return tmp_path


def look(check: Any, memory: dict[str, Any] | None = None, **config: str) -> tuple[list[str], list[str]]:
    node = Node(Baseline({}), {} if memory is None else memory, config, time.time())
    return list(check(node)), node.orders


def install(bus: Path) -> None:
    (bus / "status").write_text(
        "\n\n".join(f"Package: {name}\nStatus: install ok installed\nVersion: 1" for name in DEBIAN) + "\n"
    )


def test_device_on_the_bus_without_a_driver_is_found(bus: Path) -> None:
    [text] = look(check_driver)[0]
    assert text == f"0000:41:00.0: driver none; `driver: nvidia` in the file installs {' '.join(DEBIAN)}"
    assert len(text) < main.MAX_TEXT
    (bus / "os-release").write_text("ID=arch\n")
    assert look(check_driver)[0] == ["0000:41:00.0: driver none"]
    assert pci_gpus(str(bus / "pci")) == ["0000:41:00.0"]
    assert pci_gpus(str(bus / "none")) == []


def test_packages_by_distribution() -> None:
    assert driver_packages("debian", "13", "aarch64") == ["linux-headers-arm64", *DEBIAN[1:]]
    assert driver_packages("ubuntu", "24.04", "x86_64") == UBUNTU
    assert driver_packages("debian", "11", "x86_64") == driver_packages("rocky", "9", "x86_64") == []


def test_installed_driver_asks_for_one_reboot(bus: Path) -> None:
    memory: dict[str, Any] = {}
    assert look(check_reboot, memory, driver="nvidia") == ([], []), "it is not installed yet"
    install(bus)
    assert look(check_reboot, memory) == ([], []), "the file does not ask for it"
    texts, orders = look(check_reboot, memory, driver="nvidia")
    assert texts == ["the NVIDIA driver is installed; the host reboots when its jobs have ended"]
    assert orders == ["reboot first"] and look(check_reboot, memory, driver="nvidia")[1] == ["reboot first"]
    (bus / "boot_id").write_text("second\n")
    texts, orders = look(check_reboot, memory, driver="nvidia")
    assert texts == ["the NVIDIA driver does not work after the reboot: 0000:41:00.0: driver none"] and orders == []
    (bus / "pci/0000:41:00.0/class").write_text("0x040300\n")
    assert look(check_reboot, memory, driver="nvidia") == ([], []) and memory == {}


@cases("mode", "warn", "drain")
def test_reboot_drains_in_every_mode_and_on_the_first_day(
    bus: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(bus)
    monkeypatch.setattr(main, "CHECKS", {**gpu_driver.DRIVER_CHECKS, "gpu-lost": lambda node: iter(["GPU-1 is gone"])})
    (bus / "health.json").write_text(json.dumps({"mode": mode, "driver": "nvidia"}))
    main.main(str(bus / "health.json"), str(bus / "state"))
    reason = (bus / "state/drain").read_text()
    assert reason.startswith("shoal: health: driver-reboot: the NVIDIA driver is installed") and "gone" not in reason
    assert (bus / "state/orders").read_text() == "reboot first\n"


def cluster_of(text: str, **change: Any) -> Any:
    facts = {"c1": host_facts("c1", "10.0.0.1"), "n1": host_facts("n1", "10.0.0.11")}
    facts["n1"] = replace(facts["n1"], pci_gpus=("0000:41:00.0",), arch="x86_64", **change)
    return assemble(spec_of(text), facts, {})


def driver_items(text: str, **change: Any) -> list[Item]:
    cluster = cluster_of(text, **change)
    member = next(member for member in cluster.members if member.name == "n1")
    items = documents(cluster, member)[Stage.BASE]
    return [item for item in items if "NVIDIA" in item.key or "nvidia" in item.key]


def test_file_that_asks_for_it_installs_the_packages() -> None:
    sources, packages = driver_items(REEF.replace("DRIVER", ", driver: nvidia"))
    assert isinstance(sources, Command) and sources.unless[-len(DEBIAN) :] == (*DEBIAN,)
    assert isinstance(packages, Packages) and packages.names == (*DEBIAN,)
    assert driver_keys(cluster_of(REEF.replace("DRIVER", "")).facts["n1"]) == (packages.key,)
    assert driver_items(REEF.replace("DRIVER", "")) == []
    assert driver_items(REEF.replace("DRIVER", ", driver: nvidia"), os_id="arch") == []
    [only] = driver_items(REEF.replace("DRIVER", ", driver: nvidia"), os_id="ubuntu", os_version="24.04")
    assert isinstance(only, Packages) and only.names == (*UBUNTU,)


STANZAS = """\
# the mirror
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: http://mirror.example/other
Suites: stable
Components: main contrib non-free

Types: deb
Enabled: no
URIs: http://mirror.example/off
Suites: stable
Components: main
"""
LINES = """\
deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian bookworm main  # all of it
# deb http://mirror.example/debian trixie main
deb-src http://mirror.example/debian bookworm main
deb [trusted=yes] file:/srv/debs ./
deb http://mirror.example/debian bookworm-updates main non-free
"""


def test_components_are_added_with_the_options_of_each_source(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(LINES)
    (tmp_path / "sources.list.d/debian.sources").write_text(STANZAS)
    for _ in range(2):
        add_sources(str(tmp_path))
        lines = (tmp_path / "sources.list.d/shoal-nvidia.list").read_text()
        assert lines == f"deb [signed-by=/k.gpg arch=amd64] http://mirror.example/debian bookworm {COMPONENTS}\n"
        stanzas = (tmp_path / "sources.list.d/shoal-nvidia.sources").read_text()
        assert stanzas == STANZAS.partition("\n\n")[0].replace(": main", f": {COMPONENTS}") + "\n"


def test_working_driver_is_left_alone() -> None:
    gpu = Gpu(0, "GPU-1", "NVIDIA L4", 24000, "/dev/nvidia0")
    assert driver_items(REEF.replace("DRIVER", ", driver: nvidia"), gpus=(gpu,)) == []


@cases(
    "driver, change, level, words",
    ("", {}, "warning", f"write `driver: nvidia` in nodeset lab: `shoal up` then installs {' '.join(DEBIAN)}"),
    ("", {"os_id": "arch", "os_version": ""}, "warning", "install the driver by hand"),
    (", driver: nvidia", {}, "info", "the node is drained, and reboots when it is idle"),
)
def test_device_without_a_driver_is_told_before_up(driver: str, change: Any, level: str, words: str) -> None:
    findings = [entry for entry in component_findings(cluster_of(REEF.replace("DRIVER", driver), **change))
                if "NVIDIA" in entry.what]  # fmt: skip
    [finding] = findings
    assert (finding.level, finding.host, finding.found) == (level, "n1", "0000:41:00.0") and words in finding.fix


def test_finding_that_is_not_wanted_is_left_out() -> None:
    text = REEF.replace("DRIVER", "") + "health: {skip: [gpu-driver]}\n"
    assert not [entry for entry in component_findings(cluster_of(text)) if "NVIDIA" in entry.what]


@cases(
    "text, problem",
    (REEF.replace("DRIVER", ", driver: amd"), "unknown driver"),
    (REEF.replace("DRIVER", "").replace("controller: {", "controller: {driver: nvidia, "), "runs no jobs"),
)
def test_driver_in_a_wrong_place_is_refused(text: str, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        spec_of(text)


def test_facts_of_other_hosts_have_none() -> None:
    assert Facts().pci_gpus == ()
