"""Facts that are read from text: CPU topology, GPUs, packages."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases

from shoal.remote.agent import facts, mounts, network, packages


def sysfs(folder: Path, cpus: dict[int, tuple[int, int]]) -> str:
    for cpu, (package, core) in cpus.items():
        place = folder / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{package}\n")
        (place / "core_id").write_text(f"{core}\n")
    return str(folder)


TWO_SOCKETS = {cpu: (cpu // 2 % 2, cpu % 2 + 8 * (cpu // 2 % 2)) for cpu in range(8)}
"""Two sockets of two cores of two threads, numbered as Linux does it: the second threads come last."""


@cases(
    "cpus, usable, expected",
    pytest.param(TWO_SOCKETS, set(range(8)), (8, 2, 2, 2), id="whole machine"),
    pytest.param(TWO_SOCKETS, {0, 1, 4, 5}, (4, 1, 2, 2), id="one socket"),
    pytest.param(TWO_SOCKETS, {0, 1, 2, 3}, (4, 2, 2, 1), id="first thread of each core"),
    pytest.param(TWO_SOCKETS, {0, 1, 2}, (3, 1, 3, 1), id="sockets of unequal size"),
    pytest.param(TWO_SOCKETS, {0, 4, 1}, (3, 1, 3, 1), id="cores of unequal size"),
    pytest.param({0: (-1, 0), 1: (-1, 1)}, {0, 1}, (2, 1, 2, 1), id="a socket without a number"),
    pytest.param({}, {0, 1, 2}, (3, 1, 3, 1), id="no topology told"),
)
def test_cpus_are_counted_as_slurm_counts_them(
    tmp_path: Path, cpus: dict[int, tuple[int, int]], usable: set[int], expected: tuple[int, ...]
) -> None:
    assert tuple(facts.cpu_topology(usable, sysfs(tmp_path, cpus)).values()) == expected


@given(st.dictionaries(st.integers(0, 63), st.tuples(st.integers(0, 3), st.integers(0, 15)), min_size=1), st.data())
def test_sockets_cores_and_threads_always_multiply_to_the_cpus(
    tmp_path_factory: pytest.TempPathFactory, cpus: dict[int, tuple[int, int]], data: st.DataObject
) -> None:
    folder = sysfs(tmp_path_factory.mktemp("sys"), cpus)
    usable = data.draw(st.sets(st.sampled_from(sorted(cpus)), min_size=1))
    found = facts.cpu_topology(usable, folder)
    assert found["cpus"] == len(usable)
    assert found["sockets"] * found["cores_per_socket"] * found["threads_per_core"] == len(usable)


SMI = """\
0, GPU-aaaa, NVIDIA H100 PCIe, 81559, 580.95.05
1, GPU-bbbb, NVIDIA GB10, [N/A], 580.95.05
"""


def test_gpus_are_read_from_nvidia_smi() -> None:
    first, second = facts.parse_gpus(SMI, {})
    assert first == {
        "index": 0, "uuid": "GPU-aaaa", "name": "NVIDIA H100 PCIe", "memory_mb": 81559, "device": "/dev/nvidia0",
        "driver": "580.95.05",
    }  # fmt: skip
    assert (second["memory_mb"], second["device"]) == (0, "/dev/nvidia1")


def test_gpu_device_file_has_the_minor_number() -> None:
    devices = [gpu["device"] for gpu in facts.parse_gpus(SMI, {"GPU-aaaa": "1", "GPU-bbbb": "0"})]
    assert devices == ["/dev/nvidia1", "/dev/nvidia0"]


@cases("text", "", "No devices were found\n", "NVIDIA-SMI has failed because, it, could not, talk\n")
def test_nvidia_smi_output_without_gpus_gives_no_gpus(text: str) -> None:
    assert facts.parse_gpus(text, {}) == []


STATUS = b"""\
Package: munge
Status: install ok installed
Version: 0.5.15-2
Description: x
 Package: slurmd

Package: munge-doc
Status: deinstall ok config-files
Version: 0.5.15-2

Package: libc6
Status: install ok half-configured
Architecture: i386
Version: 2.36-1

Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9
"""


def test_installed_packages_are_read_from_dpkg_status() -> None:
    found = packages.parse_dpkg_status(STATUS, ["munge", "munge-doc", "libc6", "slurmd"])
    assert found == {"munge": "0.5.15-2", "libc6": "2.36-9"}


def test_candidates_are_read_from_apt_cache_policy() -> None:
    text = """\
slurmd:
  Installed: (none)
  Candidate: 22.05.8-4+deb12u3
  Version table:
     22.05.8-4+deb12u3 500
N: Unable to locate package nope
slurm-old:
  Installed: (none)
  Candidate: (none)
"""
    assert packages.parse_apt_policy(text) == {"slurmd": "22.05.8-4+deb12u3"}


@cases(
    "path, name",
    ("/srv/data", "srv-data"),
    ("/srv/my-data", "srv-my\\x2ddata"),
    ("/", "-"),
    ("/.hidden/x y", "\\x2ehidden-x\\x20y"),
    ("/dät", "d\\xc3\\xa4t"),
)
def test_mount_unit_has_the_name_systemd_expects(path: str, name: str) -> None:
    assert mounts.unit_name(path) == name


def attribute(kind: int, data: bytes) -> bytes:
    whole = struct.pack("=HH", 4 + len(data), kind) + data
    return whole + bytes(-len(whole) % 4)


def test_netlink_fields_are_parsed_with_padding_and_stop_at_a_broken_field() -> None:
    nested = 0x8000
    data = attribute(1, b"filter\0") + attribute(4 | nested, attribute(1, b"\0\0\0\1"))
    fields = network.netlink_fields(data)
    assert fields[1] == b"filter\0" and network.netlink_fields(fields[4]) == {1: b"\0\0\0\1"}
    assert network.netlink_fields(data + bytes(8)) == fields


RULESETS = [
    pytest.param("", "", id="none"),
    pytest.param("table inet filter { chain input { type filter hook input priority 0; policy drop; }; }",
                 "nft inet filter input", id="drops"),
    pytest.param("table ip6 f { chain six { type filter hook input priority 0; policy drop; }; };"
                 "table ip g { chain INPUT { type filter hook input priority 0; policy drop; }; }",
                 "nft ip g INPUT", id="both families"),
    pytest.param("table inet shoal { chain input { type filter hook input priority -5; policy accept; "
                 "tcp dport 6817 drop; }; }", "", id="ours"),
    pytest.param("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; "
                 "chain plain { drop; }; }", "", id="not what comes in"),
]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nft"), reason="needs root and nftables")
@cases("rules, expected", *RULESETS)
def test_chain_that_drops_input_is_detected_without_other_programs(rules: str, expected: str) -> None:
    ask = "from shoal.remote.agent.network import firewall; print(firewall())"
    script = f"nft '{rules}' && exec {sys.executable} -c \"$1\"" if rules else 'exec "$0" -c "$1"'
    line = ["unshare", "--net", "sh", "-c", script, sys.executable, ask]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == expected, done.stderr


def test_existence_of_a_file_is_checked_without_reading(tmp_path: Path) -> None:
    (tmp_path / "library").touch()
    assert facts.file_fact(str(tmp_path / "library"), "there") == {"there": True}
    assert facts.file_fact(str(tmp_path / "none"), "there") == {"there": False}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what root may do: run the tests as root")
def test_kernel_without_device_programs_is_detected() -> None:
    ask = "from shoal.remote.agent.facts import may_load_device_programs as may; print(may())"
    # Without capabilities, as in a container: whatever the kernel lets other processes do.
    bare = ["setpriv", "--inh-caps", "-all", "--bounding-set", "-all", "--no-new-privs"]
    source = os.fspath(Path(facts.__file__).parents[3])
    done = subprocess.run(
        [*bare, "/usr/bin/python3", "-c", ask],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout == "False\n", done.stderr


def test_neighbours_are_those_that_answered_and_no_routers(tmp_path: Path) -> None:
    (tmp_path / "route").write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    (tmp_path / "arp").write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.1         0x1         0x2         52:54:00:00:00:01     *        eth0\n"
        "10.0.0.7         0x1         0x2         52:54:00:00:00:07     *        eth0\n"
        "10.0.0.8         0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    assert network.neighbours(str(tmp_path)) == [{"interface": "eth0", "address": "10.0.0.7"}]
    assert network.neighbours(str(tmp_path / "missing")) == []
