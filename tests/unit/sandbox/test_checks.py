"""The findings about a machine that cannot run sandbox hosts."""

from dataclasses import replace
from pathlib import Path

from tests.support.cases import cases

from shoal.hosts.provider import Request
from shoal.sandbox.checks import PROGRAMS, MachineFacts, find_problems
from shoal.spec.member import Shape

CACHE = Path("/var/cache/shoal")
GOOD = MachineFacts(
    root=True,
    programs=frozenset({*PROGRAMS, "mmdebstrap"}),
    cpus=2,
    memory_mb=24000,
    available_mb=20000,
    disk_free_mb=50000,
    overlay=True,
    loop=True,
    cgroups=True,
    cgroup_v2=False,
    images=frozenset({"debian12"}),
)


def texts(machine: MachineFacts = GOOD, *shapes: Shape, cache: Path = CACHE, name: str = "n") -> list[str]:
    requests = [Request(f"{name}{index}", shape) for index, shape in enumerate(shapes)]
    return [f"{finding.level} {finding}" for finding in find_problems(cache, requests, machine)]


def test_suitable_machine_has_no_findings() -> None:
    shape = Shape(cpus=2, memory_mb=2000, disk_mb=500, gpus=4, cgroups=True, site="b")
    assert texts(GOOD, shape, Shape(image="sid")) == []


def test_bare_machine_gets_all_errors_at_once() -> None:
    bare = replace(GOOD, root=False, programs=frozenset(), overlay=False, cgroups=False)
    assert texts(bare) == [
        "error the sandbox needs root, run the command with sudo, or install podman",
        "error the sandbox needs these programs: systemd-nspawn, ip, nft, unshare, setsid, taskset, setpriv, "
        "mkfs.ext4, mmdebstrap, "
        "run `apt-get install systemd-container iproute2 nftables util-linux e2fsprogs mmdebstrap`",
        "error the sandbox needs overlayfs, and this kernel has none, run `modprobe overlay`",
        "error the sandbox needs cgroups, and no cgroup file system is mounted, mount cgroup2 on /sys/fs/cgroup",
    ]


def test_debootstrap_replaces_mmdebstrap() -> None:
    assert texts(replace(GOOD, programs=frozenset({*PROGRAMS, "debootstrap"}))) == []


@cases(
    "shape, expected",
    (Shape(cpus=3), "n0: `cpus` out of range, found 3, ask for 1 to 2: this machine has 2"),
    (Shape(cpus=0), "n0: `cpus` out of range, found 0, ask for 1 to 2: this machine has 2"),
    (Shape(memory_mb=24001), "n0: `memory` out of range, found 24001M, ask for 60M to 24000M"),
    (Shape(disk_mb=1), "n0: `disk` too small for a host, found 1M, ask for at least 16M"),
    (Shape(gpus=65), "n0: `gpus` out of range, found 65, ask for 0 to 64"),
    (Shape(image="arch"), "n0: unknown image, found 'arch', use one of: debian11, debian12, debian13, sid"),
    (Shape(site="B c"), "n0: not a site name, found 'B c', use lower-case letters"),
    (
        Shape(image="debian13", cgroups=True),
        "n0: `cgroups` on a machine with cgroup v1, found image debian13, use `image: debian12`",
    ),
)
def test_shape_too_large_for_this_machine_is_an_error(shape: Shape, expected: str) -> None:
    found = texts(replace(GOOD, images=frozenset({"debian12", "debian13"})), shape)
    assert len(found) == 1 and found[0].startswith(f"error {expected}")


def test_cgroups_work_for_every_image_with_cgroup_v2() -> None:
    assert texts(replace(GOOD, cgroup_v2=True), Shape(image="debian13", cgroups=True)) == []


def test_disk_needs_loop_devices() -> None:
    [found] = texts(replace(GOOD, loop=False), Shape(disk_mb=100))
    assert found == (
        "error n0: `disk` needs loop devices, found no /dev/loop-control, run `modprobe loop`, or leave `disk` out"
    )


def test_invalid_host_name_is_an_error() -> None:
    [found] = texts(GOOD, Shape(), name="Bad_")
    assert "not a host name, found 'Bad_0', use lower-case letters, digits and hyphens" in found


def test_too_little_memory_is_an_error() -> None:
    [found] = texts(replace(GOOD, available_mb=100), Shape(), Shape())
    assert found == "error 2 hosts need 120 MB of memory, found 100 MB free, ask for fewer hosts, or free memory"


def test_overcommitted_memory_is_a_warning() -> None:
    [found] = texts(GOOD, Shape(memory_mb=20000), Shape(memory_mb=20000))
    assert found.startswith("warning `memory` of all hosts is 40000 MB, found 24000 MB here")


def test_disk_check_includes_unbuilt_images() -> None:
    assert texts(replace(GOOD, disk_free_mb=200), Shape()) == []
    [found] = texts(replace(GOOD, disk_free_mb=200), Shape(image="sid"))
    assert found.startswith("error the cache needs 1650 MB of disk, found 200 MB free, free some, or set SHOAL_CACHE")


def test_cache_path_unsupported_by_overlayfs_is_an_error() -> None:
    [found] = texts(GOOD, cache=Path("/home/a:b"))
    assert found.startswith("error overlayfs cannot take this cache directory, found /home/a:b, set SHOAL_CACHE")


def test_this_machine_can_be_observed(tmp_path: Path) -> None:
    seen = MachineFacts.observe(tmp_path / "not" / "made" / "yet")
    assert seen.cpus >= 1 and seen.memory_mb > 0 and seen.disk_free_mb > 0 and seen.images == frozenset()
