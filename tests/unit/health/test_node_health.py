"""The health program of a node: what it remembers, when it asks for a drain, and its checks of the host."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote import node_health
from shoal.remote.node_health import host_checks, main, node
from shoal.remote.node_health.main import drain_reason, run_checks
from shoal.remote.node_health.node import WARN_ONLY_S, Baseline, Node, Process
from shoal.roles.node_health import MODULES

DAY = 24 * 3600


class Place:
    """A node's files, below a directory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.state = folder / "health.json", folder / "state"
        self.checks: dict[str, list[str]] = {}
        names = dict.fromkeys(main.CHECKS)
        monkeypatch.setattr(main, "CHECKS", {name: self._check(name) for name in names})

    def _check(self, name: str) -> Any:
        return lambda _: iter(self.checks.get(name, ()))

    def run(self, mode: str = "drain", *, age_s: float = 2 * DAY, forget: bool = False) -> dict[str, Any]:
        """One run of a node whose first run was so long ago."""
        self.config.write_text(json.dumps({"mode": mode, "skip": ["gpu-clock"]}))
        self.state.mkdir(exist_ok=True)
        baseline = self.state / "baseline.json"
        values = json.loads(baseline.read_text())["values"] if baseline.exists() else {}
        baseline.write_text(json.dumps({"since": time.time() - age_s, "values": values}))
        main.main(str(self.config), str(self.state), forget=forget)
        result: dict[str, Any] = json.loads((self.state / "result.json").read_text())
        return result

    @property
    def drain(self) -> str:
        return (self.state / "drain").read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_serious_fault_asks_for_a_drain_until_it_is_gone(place: Place) -> None:
    place.checks["gpu-lost"] = ["GPU-1 is gone"]
    assert [finding["id"] for finding in place.run()["findings"]] == ["gpu-lost"]
    assert place.drain == "shoal: health: gpu-lost: GPU-1 is gone\n"
    place.checks.clear()
    assert place.run()["findings"] == [] and place.drain == ""


@cases("mode, age_s", ("warn", 2 * DAY), ("drain", WARN_ONLY_S - 60))
def test_node_is_not_drained_in_warn_mode_and_on_its_first_day(place: Place, mode: str, age_s: float) -> None:
    place.checks["gpu-lost"] = ["GPU-1 is gone"]
    assert len(place.run(mode, age_s=age_s)["findings"]) == 1
    assert place.drain == ""


def test_lesser_fault_never_drains_and_a_skipped_check_does_not_run(place: Place) -> None:
    place.checks.update({"link-slow": ["eth0: down"], "gpu-clock": ["GPU 0: too hot"]})
    assert [finding["id"] for finding in place.run()["findings"]] == ["link-slow"]
    assert place.drain == ""


def test_share_must_hang_in_two_runs(place: Place) -> None:
    place.checks["share-hangs"] = ["/data does not answer"]
    first = place.run()["findings"]
    assert place.drain == ""
    assert place.run()["findings"] == first, "it keeps when it was found first"
    assert place.drain.startswith("shoal: health: share-hangs: /data")


def test_reason_is_one_short_line_that_a_shell_reads_as_it_is() -> None:
    found = [{"id": "gpu-xid", "since": 0.0, "evidence": ["a 'b' \"c\" `d` $(e)\nf=g\\ " + "x" * 500]}]
    reason = drain_reason(found, 1.0)
    assert reason.startswith("shoal: health: gpu-xid: a b c d (e) f g x") and len(reason) < 150


def test_check_that_fails_hides_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Node) -> Any:
        raise RuntimeError("a driver of another kind")

    monkeypatch.setitem(main.CHECKS, "disk-full", fail)
    place.checks["gpu-lost"] = ["GPU-1 is gone"]
    result = place.run()
    assert [finding["id"] for finding in result["findings"]] == ["gpu-lost"]
    assert result["memory"]["failures"] == {"disk-full": "RuntimeError('a driver of another kind')"}


def test_baseline_keeps_the_best_and_is_learned_again_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1000, 100, 100, 100])

    def check(at: Node) -> Any:
        speed = next(speeds)
        best = at.baseline.best("link", speed)
        return iter([f"{speed}, before {best}"] if speed < best else [])

    monkeypatch.setitem(main.CHECKS, "link-slow", check)
    assert place.run()["findings"] == []
    assert place.run()["findings"][0]["evidence"] == ["100, before 1000.0"]
    assert place.run(forget=True)["findings"] == place.run()["findings"] == []


@cases("text", "", "no JSON", "[]", '{"findings": null}')
def test_files_that_cannot_be_read_are_written_anew(place: Place, text: str) -> None:
    place.run()
    (place.state / "result.json").write_text(text)
    assert place.run()["findings"] == []


def test_program_runs_alone_as_the_timer_runs_it(tmp_path: Path) -> None:
    """With its files beside each other and nothing else, without the site's packages."""
    folder = tmp_path / "node_health"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text((Path(node_health.__file__).parent / f"{name}.py").read_text())
    (tmp_path / "health.json").write_text('{"mode": "warn"}')
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from node_health.main import main; main(*sys.argv[1:])"
    line = [sys.executable, "-I", "-S", "-B", "-c", start, str(tmp_path / "health.json"), str(tmp_path / "state")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env={})
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "state/result.json").read_text())
    assert result["mode"] == "warn" and "failures" not in result["memory"] and result["cpu_s"] > 0


# ---- checks of the host


def looked(check: Any, memory: dict[str, Any] | None = None, baseline: Baseline | None = None) -> list[str]:
    return list(check(Node(baseline or Baseline({}), {} if memory is None else memory, {}, time.time())))


class Room:
    f_blocks, f_bavail, f_frsize, f_files, f_favail = 1000, 500, 1 << 20, 1000, 500


def test_full_disk_and_missing_inodes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    full, few = Room(), Room()
    full.f_bavail, few.f_favail = 19, 19
    rooms = {"/": Room(), "/tmp": full, "/var": few}
    monkeypatch.setattr(host_checks, "_file_systems", lambda: rooms)
    assert looked(host_checks.check_full_disks) == ["/tmp: 19 of 1000 MB free"]
    assert looked(host_checks.check_inodes) == ["/var: 19 of 1000 inodes free"]


def test_directory_that_takes_no_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_checks, "DIRECTORIES", ("/proc", str(tmp_path)))
    [text] = looked(host_checks.check_writes)
    assert text.startswith("/proc: ") and [*tmp_path.iterdir()] == []


def test_share_that_hangs_is_found_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "server:/data /data nfs4 rw 0 0\nhost:/home /home fuse.sshfs rw 0 0\n/dev/sda1 / ext4 rw 0 0\n"
    monkeypatch.setattr(
        host_checks, "read_text", lambda path: mounts if path == "/proc/self/mounts" else node.read_text(path)
    )
    monkeypatch.setattr(host_checks, "SHARE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(host_checks.os, "statvfs", lambda mount: time.sleep(60) if mount == "/data" else None)
    memory: dict[str, Any] = {}
    assert looked(host_checks.check_shares, memory) == ["/data (nfs4) does not answer within 0 s"]
    [pid, _] = memory["hanging_shares"]["/data"]
    os.waitpid(pid, 0)
    memory["hanging_shares"]["/data"] = [os.getpid(), Process.read(os.getpid()).start]  # type: ignore[union-attr]
    assert looked(host_checks.check_shares, memory) == ["/data (nfs4) does not answer"]


def test_share_that_answers_with_an_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "read_text", lambda path: "server:/data /nonexistent/data nfs4 rw 0 0\n")
    assert looked(host_checks.check_shares) == ["/nonexistent/data (nfs4): No such file or directory"]


def test_mount_of_a_user_is_no_share_of_the_node() -> None:
    """It may hang on purpose, where the host allows `allow_other`. That does not take the node out of service."""
    fuse = "host:/home {} fuse.sshfs rw,nosuid,nodev,relatime,user_id={},group_id=0{} 0 0\n"
    mounts = fuse.format("/data", 0, ",allow_other") + fuse.format("/home/ada/far", 2001, "")
    mounts += "server:/a\\040b /a\\040b nfs4 rw 0 0\n/dev/sda1 / ext4 rw 0 0\n"
    assert [*host_checks.shares(mounts)] == [("/data", "fuse.sshfs"), ("/a b", "nfs4")]


def test_process_that_waits_in_two_runs_is_found() -> None:
    memory: dict[str, Any] = {}
    for state, expected in (("D", []), ("D", ["train (pid 7, user ?)"]), ("R", []), ("D", [])):
        at = Node(Baseline({}), memory, {}, time.time())
        at._processes = {7: Process(7, "train", state, 1, "123", 0)}
        found = [text.partition(" in ")[0] for text in host_checks.check_stuck_processes(at)]
        assert [text.replace("user root", "user ?") for text in found] == expected


def test_errors_of_disks_in_the_kernel_log_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kmsg"
    monkeypatch.setattr(node, "KERNEL_LOG", str(log))
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    old = now - 2 * 3600 * 10**6
    log.write_text(
        f"6,1,{now},-;XFS (sda1): Mounting V5 Filesystem\n"
        f"3,2,{now},-;blk_update_request: I/O error, dev nvme0n1, sector 8\n SUBSYSTEM=block\n"
        f"3,3,{old},-;EXT4-fs error (device sda1)\n"
    )
    assert looked(host_checks.check_disk_errors) == ["blk_update_request: I/O error, dev nvme0n1, sector 8"]


def test_links_are_compared_with_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = tmp_path / "eth0"
    (net / "device").mkdir(parents=True)
    monkeypatch.setattr(host_checks.glob, "glob", lambda pattern: [str(net)] if "net" in pattern else [])
    baseline = Baseline({})
    for speed, expected in (
        (10000, []),
        (1000, ["eth0: 1000 Mbit/s, before 10000 Mbit/s"]),
        (-1, ["eth0: down, before 10000 Mbit/s"]),
    ):
        (net / "speed").write_text(f"{speed}\n")
        assert looked(host_checks.check_links, baseline=baseline) == expected


@cases(
    "check, path, first, then",
    (host_checks.check_clock_source, "current_clocksource", "tsc", "hpet"),
    (host_checks.check_governor, "scaling_governor", "performance", "powersave"),
)
def test_settings_are_compared_with_the_first(
    monkeypatch: pytest.MonkeyPatch, check: Any, path: str, first: str, then: str
) -> None:
    baseline = Baseline({})
    for value, expected in ((first, []), (then, [f"{then}, before {first}"]), ("", [])):
        monkeypatch.setattr(host_checks, "read_text", lambda name, value=value: value if name.endswith(path) else "")
        assert looked(check, baseline=baseline) == expected


def test_errors_of_memory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"mc0": (0, 9), "mc1": (0, 10), "mc2": (1, 0)}
    for name, (lost, corrected) in counts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "ue_count").write_text(str(lost))
        (tmp_path / name / "ce_count").write_text(str(corrected))
    monkeypatch.setattr(host_checks.glob, "glob", lambda _: [str(tmp_path / name) for name in counts])
    assert looked(host_checks.check_memory_errors) == [
        "mc1: 10 corrected errors",
        "mc2: 1 errors that could not be corrected",
    ]


def test_alarm_of_a_sensor_is_found_unless_it_always_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("name", "nct6775"), ("fan1_alarm", "0"), ("temp2_alarm", "1"), ("in0_alarm", "1")):
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(host_checks.glob, "glob", lambda _: [str(path) for path in tmp_path.glob("*_alarm")])
    baseline = Baseline({})
    assert looked(host_checks.check_sensors, baseline=baseline) == []
    (tmp_path / "fan1_alarm").write_text("1\n")
    assert looked(host_checks.check_sensors, baseline=baseline) == ["alarm: nct6775 fan1"]


def test_healthy_machine_passes_its_own_checks() -> None:
    """Twice, so that nothing is compared with a first run alone."""
    at = Node(Baseline({}), {}, {}, time.time())
    # What other tests and programs have here is no fault of the checks: full disks, processes with the number of a job.
    others = {"processes-stuck", "disk-errors", "disk-full", "step-left"}
    skip = {name for name in main.CHECKS if name.startswith("gpu-")} | others
    assert run_checks(at, skip, []) == run_checks(at, skip, []) == []
    assert "failures" not in at.memory
