"""The pure parts of a sandbox host: its arguments, and how its cgroups are found."""

from pathlib import Path

from tests.goldens import assert_golden

from shoal.sandbox.cgroups import FOR_SLURM, HostCgroups, groups_named, hierarchies, is_v2_only
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import cpus_of
from shoal.sandbox.seed import render_gpus, render_meminfo
from shoal.spec.member import Shape

LAYOUT = Layout(Path("/var/cache/shoal"), "reef")
V1 = """\
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,name=systemd 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"


def host(name: str = "n1", index: int = 0, **shape: int) -> HostRecord:
    return HostRecord(name, index, "10.70.1.2", "/image", "", Shape(**shape))  # type: ignore[arg-type]


def test_meminfo_matches_its_golden() -> None:
    assert_golden("sandbox/meminfo", render_meminfo(1000))


def test_gpu_uuids_are_unique_and_stable() -> None:
    texts = [render_gpus(LAYOUT, host(name, gpus=2)) for name in ("n1", "n2")]
    uuids = {line.split(", ")[1] for text in texts for line in text.splitlines()}
    assert len(uuids) == 4 and all(uuid.startswith("GPU-") and len(uuid) == 40 for uuid in uuids)
    assert texts[0] == render_gpus(LAYOUT, host("n1", gpus=2))
    assert_golden("sandbox/gpus", texts[0])


def test_host_gets_its_requested_cpus() -> None:
    assert len(cpus_of(host(cpus=1))) == 1 and cpus_of(host()) == cpus_of(host(cpus=100_000))


def test_hierarchies_of_both_cgroup_versions_are_detected() -> None:
    found = hierarchies(V1)
    assert set(found) == {"cpuacct", "freezer", "systemd", "unified"}
    assert found["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct") and not is_v2_only(found)
    assert is_v2_only(hierarchies(V2))


def test_limits_are_written_to_the_groups(tmp_path: Path) -> None:
    roots = {name: tmp_path / name for name in ("cpuset", "memory", "freezer")}
    for root in roots.values():
        root.mkdir()
    (roots["cpuset"] / "cpuset.mems").write_text("0\n")
    group = HostCgroups("shoal-x-n1", roots)
    group.make([0, 1], 512)
    assert (roots["cpuset"] / "shoal-x-n1/cpuset.cpus").read_text() == "0,1"
    assert (roots["cpuset"] / "shoal-x-n1/cpuset.mems").read_text() == "0\n"
    assert (roots["memory"] / "shoal-x-n1/memory.limit_in_bytes").read_text() == "536870912"
    group.make([0], None)
    assert (roots["memory"] / "shoal-x-n1/memory.limit_in_bytes").read_text() == "-1"
    assert groups_named("shoal-x-", roots) == [group] and groups_named("shoal-y-", roots) == []


def test_cgroup_v2_controllers_are_delegated_only_on_request(tmp_path: Path) -> None:
    group, passed_on = HostCgroups("g", {"unified": tmp_path}), tmp_path / "cgroup.subtree_control"
    group.make([0], None)
    assert not passed_on.exists()
    group.make([0], 512)
    assert passed_on.read_text() == "+memory" and (tmp_path / "g/memory.max").read_text() == "536870912"
    group.make([0], None, controllers=True)
    assert passed_on.read_text() == f"+{FOR_SLURM[-1]}"  # one write for each: one that is not there spoils no other
    assert (tmp_path / "g/memory.max").read_text() == "max"


def test_pids_include_subgroups_without_other_namespaces(tmp_path: Path) -> None:
    group = HostCgroups("g", {"freezer": tmp_path})
    (tmp_path / "g/below").mkdir(parents=True)
    (tmp_path / "g/cgroup.procs").write_text("0\n12\n")
    (tmp_path / "g/below/cgroup.procs").write_text("7\n12\n")
    assert group.pids() == [7, 12] and group.alive and not HostCgroups("h", {"freezer": tmp_path}).alive


def test_group_is_frozen_according_to_its_state(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    state, group = tmp_path / "g/freezer.state", HostCgroups("g", {"freezer": tmp_path})
    assert not group.frozen
    state.write_text("FROZEN\n")
    assert group.frozen
    group.thaw()
    assert state.read_text() == "THAWED"
