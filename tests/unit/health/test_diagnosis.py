"""From the reports of Slurm and hosts to findings: places, evidence, order, and what Shoal may do."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.health.diagnosis import ClusterView, Diagnosis, concerning_jobs, diagnose, hint, job_hint
from shoal.health.reliability import EndedJobs
from shoal.health.report import HealthReport, HostReport, LogEntry, NodeFinding, Space
from shoal.slurm.state import JobState, NodeState

WELL = HostReport(services={"munge": "active", "slurmd": "active"}, users={"alice": 2001})
SPACE = Space("/var/lib/slurm/slurmd", "/", total_mb=1000, free_mb=500, files=1000, free_files=500)
LOW = "Low RealMemory (reported:985 < 100.00% of configured:2048)"


def node(reason: str = "", *state: str, name: str = "n1") -> NodeState:
    return NodeState(name, state or ("IDLE", "DRAIN"), reason, "root" if reason else "", "2026-11-17T10:00:00")


def job(state: str = "PENDING", reason: str = "None", nodes: str = "", number: str = "7") -> JobState:
    return JobState(number, state, "alice", "main", nodes, reason, "0:00", "1:00", 1, "train")


def view(*nodes: NodeState, report: HostReport = WELL, **more: Any) -> ClusterView:
    given = {"nodes": {one.name: one for one in nodes}, "reports": {"c1": WELL, "n1": report}, **more}
    return ClusterView("c1", **given)


def log(text: str, age_s: float = 10.0) -> LogEntry:
    return LogEntry(f"[2026-11-17T10:00:00.000] {text}", age_s)


def only(found: list[Diagnosis]) -> Diagnosis:
    [one] = found
    return one


def test_healthy_cluster_has_no_findings() -> None:
    assert (
        diagnose(view(node("", "IDLE"), node("", "MIXED", name="c1"), report=replace(WELL, directories=[SPACE]))) == []
    )


def test_rejected_registration_is_found_with_its_fix() -> None:
    one = only(diagnose(view(node(LOW, "IDLE", "DRAIN", "INVALID_REG"))))
    assert (one.id, one.host, one.since, one.reason) == ("low-memory", "n1", "2026-11-17T10:00:00", LOW)
    assert one.evidence == (f"idle+drain+invalid_reg: {LOW}",)
    assert (one.action, one.explicit, one.cost.label, one.blocked) == ("register", True, "daemon restart", "")


def test_rejected_registration_is_found_behind_a_reason_of_an_earlier_time() -> None:
    words = "error: Setting node {} state to INVAL with reason:{}"
    before, other, last = (
        log(words.format(*what)) for what in (("n1", "Low CPUs"), ("n12", "Low TmpDisk"), ("n1", LOW))
    )
    controller = replace(WELL, logs=[before, other, last])
    found = view(node("Kill task failed", "IDLE", "DRAIN", "INVALID_REG"), reports={"c1": controller, "n1": WELL})
    one = only(diagnose(found))
    assert (one.id, one.action, one.reason) == ("low-memory", "register", "Kill task failed")
    assert one.evidence == ("idle+drain+invalid_reg: Kill task failed", last.text)
    earlier = view(node("Low CPUs", "IDLE", "DRAIN", "INVALID_REG"), reports={"c1": controller, "n1": WELL})
    assert only(diagnose(earlier)).id == "low-memory"
    registered = view(node("Kill task failed"), reports={"c1": controller, "n1": WELL})
    assert only(diagnose(registered)).id == "kill-task-failed"


def test_rejected_registration_is_found_beside_a_persons_reason_and_not_fixed() -> None:
    line = log(f"error: Setting node n1 state to INVAL with reason:{LOW}")
    found = view(
        node("fan broken", "IDLE", "DRAIN", "INVALID_REG"), reports={"c1": replace(WELL, logs=[line]), "n1": WELL}
    )
    rejected, person = diagnose(found)
    assert (rejected.id, rejected.action, person.id, person.action) == ("low-memory", "", "person-drain", "")
    assert "a person's note before it: fan broken" in rejected.evidence
    assert rejected.fix.endswith("then `shoal node resume n1`")


def test_persons_drain_is_information_and_has_no_action() -> None:
    one = only(diagnose(view(node("fan broken"))))
    assert (one.id, one.level, one.action) == ("person-drain", "info", "")
    assert one.evidence == ("fan broken (root)",)
    assert one.fix == "when that is solved: `shoal node resume n1`"


def test_persons_note_that_slurmd_replaced_is_shown_and_the_node_is_not_resumed() -> None:
    controller = replace(
        WELL,
        logs=[
            log("update_node: node n1 reason set to: old note"),
            log("update_node: node n1 state set to DRAINED"),
            log("update_node: node n1 state set to IDLE"),
            log("update_node: node n2 reason set to: of another node"),
            log("update_node: node n1 reason set to: fan broken"),
            log("update_node: node n1 state set to DRAINED"),
            log("update_node: node n1 reason set to: Kill task failed"),
        ],
    )
    found = view(node("Kill task failed"), reports={"c1": controller, "n1": WELL})
    one = only(diagnose(found))
    assert (one.id, one.action) == ("kill-task-failed", "")
    assert one.evidence[-1] == "a person's note before it: fan broken"
    assert one.fix.endswith("; then `shoal node resume n1`")
    ended = replace(controller, logs=controller.logs[:3])
    assert only(diagnose(replace(found, reports={"c1": ended, "n1": WELL}))).action == "resume"


def test_node_is_not_resumed_while_its_host_has_another_fault() -> None:
    full = replace(WELL, directories=[replace(SPACE, mount="/var", free_mb=3)])
    disk, spool = diagnose(view(node("SlurmdSpoolDir is full"), report=full))
    assert (disk.id, disk.what, disk.evidence) == ("disk-full", "/var is full", ("3 of 1000 MB free",))
    assert (spool.id, spool.blocked) == ("spool-full", "first: /var is full (disk-full)")
    assert only(diagnose(view(node("SlurmdSpoolDir is full")))).blocked == ""


def test_node_with_processes_of_an_old_step_is_not_resumed() -> None:
    left = replace(WELL, steps=["7.0 (pid 12)"])
    assert only(diagnose(view(node("Kill task failed"), report=left))).blocked == "still there: 7.0 (pid 12)"
    busy = view(node("Kill task failed"), report=left, jobs=(job("RUNNING", nodes="n1", number="8"),))
    assert only(diagnose(busy)).blocked == ""


def test_node_whose_host_was_not_checked_is_not_resumed() -> None:
    unreachable, other = diagnose(view(node("Epilog error"), reports={"c1": WELL}, unreached={"n1": "no route"}))
    assert (unreachable.id, unreachable.evidence) == ("unreachable", ("no route",))
    assert other.blocked


@cases(
    "change, fault, evidence",
    ({"services": {"munge": "failed"}}, "munge-stopped", "munge is failed"),
    ({"munge": {"error": "munge: timed out"}}, "munge-stopped", "munge: timed out"),
    ({"services": {"slurmd": "activating"}}, "slurmd-stopped", "slurmd is activating"),
    ({"services": {"slurmd": "inactive"}}, "slurmd-stopped", "slurmd is inactive"),
    ({"names": ["n2", "n3"]}, "name-unresolved", "does not resolve: n2, n3"),
    ({"users": {"alice": None}}, "user-missing", "alice has no account"),
    ({"users": {"alice": 2002}}, "user-missing", "alice is 2002, on c1 2001"),
    ({"directories": [replace(SPACE, free_files=3)]}, "inodes-full", "3 of 1000 inodes free"),
    ({"directories": [replace(SPACE, problem="Read-only file system")]}, "read-only", "Read-only file system"),
    ({"unfinished": ["directories"]}, "unreachable", "these checks did not end: directories"),
)
def test_fault_of_a_host_is_found_with_evidence(change: dict[str, Any], fault: str, evidence: str) -> None:
    one = only(diagnose(view(report=replace(WELL, **change))))
    assert (one.id, one.level, one.host, one.evidence) == (fault, "error", "n1", (evidence,))


def test_names_of_containers_behind_tunnels_are_not_missed() -> None:
    """They know only the controller, and no other host knows them."""
    pod = replace(node("", "IDLE", name="p1"), address="127.0.0.1")
    reports = {
        "c1": replace(WELL, names=["p1"]),
        "n1": replace(WELL, names=["n2", "p1"]),
        "p1": replace(WELL, names=["c1", "n1", "n2"]),
    }
    found = diagnose(view(node("", "IDLE"), pod, reports=reports))
    assert {one.host: one.evidence for one in found} == {
        "n1": ("does not resolve: n2",),
        "p1": ("does not resolve: c1",),
    }


def test_other_munge_key_is_told_from_other_answers() -> None:
    lines = [log("error: Munge decode failed: Invalid credential"), log("error: Munge: old", 5000), log("info: else")]
    other = view(report=replace(WELL, logs=lines), credentials={"c1": "Success", "n1": "Invalid credential"})
    one = only(diagnose(other))
    assert one.id == "munge-key"
    assert one.evidence == ("munge on c1: Invalid credential", lines[0].text)
    assert diagnose(view(credentials={"c1": "Success", "n1": "Replayed credential"})) == []


SILENT = node("Not responding", "DOWN", "NOT_RESPONDING")
STOPPED = HostReport(services={"munge": "active", "slurmd": "failed"})
WRONG_KEY = {"c1": "Success", "n1": "Invalid credential"}


@cases(
    "state, more, fault",
    (SILENT, {"report": STOPPED}, "slurmd-stopped"),
    (SILENT, {"credentials": WRONG_KEY}, "munge-key"),
    (SILENT, {}, "not-responding"),
    (node("", "IDLE", "NOT_RESPONDING"), {}, "not-responding"),
    (node("", "UNKNOWN"), {"report": STOPPED}, "slurmd-stopped"),
    (node("", "ALLOCATED", "CLOUD", "NOT_RESPONDING", "POWERING_UP"), {}, ""),
    (node("", "IDLE", "CLOUD", "POWERED_DOWN"), {}, ""),
    (node("shoal: out", "DOWN", "CLOUD", "NOT_RESPONDING", "POWERING_UP"), {}, ""),
    ids=["slurmd stopped", "wrong key", "silent", "idle", "unknown", "it still boots", "no machine", "none to be had"],
)
def test_silent_node_has_the_finding_that_explains_it_alone(state: NodeState, more: dict[str, Any], fault: str) -> None:
    assert [one.id for one in diagnose(view(state, **more))] == ([fault] if fault else [])


@cases(
    "state, fault, level, action, explicit",
    (
        node("Kill task failed", "IDLE", "DRAIN", "INVALID_REG"),  # whose line is not in the log
        *("registration-rejected", "error", "register", True),
    ),
    (
        node("ResumeTimeout reached", "DOWN", "CLOUD", "POWERED_DOWN", "NOT_RESPONDING"),
        *("resume-timeout", "warning", "", False),
    ),
    (node("shoal: health: gpu-lost: GPU-1 is gone"), "health-drain", "error", "", False),
)
def test_reason_of_a_node_decides_on_level_and_action(
    state: NodeState, fault: str, level: str, action: str, explicit: bool
) -> None:
    one = only(diagnose(view(state)))
    assert (one.id, one.level, one.action, one.explicit) == (fault, level, action, explicit)


@cases("state", "DOWN", "UNKNOWN", "DRAIN")
def test_node_out_of_service_without_a_reason_is_a_warning(state: str) -> None:
    one = only(diagnose(view(node("", state))))
    assert (one.id, one.level, one.evidence) == ("node-unexplained", "warning", (state.lower(),))


def test_slurmd_without_a_device_file_of_a_gpu_lacks_the_gpu() -> None:
    fatal = log("fatal: can't stat gres.conf file /dev/nvidia1: No such file or directory")
    report = replace(WELL, services={"slurmd": "failed"}, logs=[fatal])
    one = only(diagnose(view(node("Not responding", "DOWN", "NOT_RESPONDING"), report=report)))
    assert (one.id, one.action, one.blocked, one.reason) == ("gpu-missing", "register", "", "Not responding")
    assert one.evidence == ("slurmd is failed", fatal.text)
    low = node("gres/gpu count reported lower than configured (1 < 2)", "IDLE", "DRAIN", "INVALID_REG")
    assert [one.id for one in diagnose(view(low, report=report))] == ["gpu-missing"]
    again = replace(report, logs=[fatal, log("error: Waiting for gres.conf file /dev/nvidia1")])
    assert [one.id for one in diagnose(view(low, report=again))] == ["gpu-missing"], "it starts again"


def test_host_that_is_no_node_yet_is_no_error() -> None:
    bare = HostReport(services={"munge": "inactive", "slurmd": "inactive"}, users={"alice": None}, names=("c1", "n1"))
    reports = {"c1": replace(WELL, names=("n2",)), "n1": replace(WELL, names=("n2",)), "n2": bare}
    nodesets = {"lab": ("n1", "n2")}
    one = only(diagnose(ClusterView("c1", {"n1": node("", "IDLE")}, reports=reports, nodesets=nodesets)))
    assert (one.id, one.level, one.host) == ("not-joined", "info", "n2")
    # Where Slurm does not answer, nobody knows its nodes.
    silent = ClusterView("c1", slurm_error="no", reports=reports, nodesets=nodesets)
    assert "not-joined" not in {one.id for one in diagnose(silent)}


def test_silent_slurmctld_is_a_finding_of_the_controller() -> None:
    one = only(diagnose(view(slurm_error="does not answer within 10 s")))
    assert (one.id, one.host, one.evidence) == ("slurmctld-silent", "c1", ("does not answer within 10 s",))
    stopped = {"c1": replace(WELL, services={"slurmctld": "failed"})}
    assert [one.id for one in diagnose(view(reports=stopped, slurm_error="no"))] == ["slurmctld-stopped"]
    assert [one.id for one in diagnose(view(reports={}, unreached={"c1": "no route"}, slurm_error=""))] == [
        "unreachable"
    ]


def test_worst_comes_first() -> None:
    waiting = job(reason="ReqNodeNotAvail, UnavailableNodes:n1")
    found = diagnose(view(node("fan broken"), report=replace(WELL, services={"slurmd": "failed"}), jobs=(waiting,)))
    assert [one.level for one in found] == ["error", "warning", "info"]


@cases("reason", "launch failed requeued held", "launch_failed_requeued_held")
def test_held_job_is_found(reason: str) -> None:
    one = only(diagnose(view(jobs=(job(reason=reason),))))
    assert (one.id, one.job, one.action, one.explicit) == ("job-launch-failed", "7", "release", True)
    assert one.evidence == (f"job 7 of alice: {reason}",)
    assert job_hint(reason) == one.what


def test_findings_of_a_job_are_those_of_its_nodes() -> None:
    nodes = (node("Epilog error"), node("Epilog error", name="n2"))
    waiting = job(reason="ReqNodeNotAvail, UnavailableNodes:n[1,4]")
    found = diagnose(view(*nodes, jobs=(waiting, job("RUNNING", nodes="n2", number="8"))))
    assert [(one.id, one.host or one.job) for one in concerning_jobs(found, [waiting])] == [
        ("epilog-error", "n1"),
        ("job-waits-for-node", "7"),
    ]
    assert concerning_jobs(found, [job(reason="Resources", number="9")]) == []
    assert concerning_jobs(found, [job(reason="UnavailableNodes:n[", number="9")]) == []


def test_hint_is_for_what_slurm_writes() -> None:
    assert hint(node(LOW)) == "the host has less memory than slurm.conf says"
    assert hint(node("fan broken")) == "" and hint(node("")) == ""
    rejected = ("IDLE", "DRAIN", "INVALID_REG")
    assert hint(node("Kill task failed", *rejected)) == "Slurm rejects the registration of the node"
    assert hint(node(LOW, *rejected)) == hint(node(LOW)) and hint(node("fan broken", *rejected)) == ""
    assert job_hint("Priority") == ""


@cases(
    "values",
    {"unfinished": 3},
    {"services": []},
    {"users": {"alice": []}},
    {"directories": [{"path": "/"}]},
    {"directories": [{**asdict(SPACE), "free_mb": "many"}]},
    {"logs": [{"text": "x", "age_s": "old"}]},
    {"logs": "text"},
    {"health": {"findings": []}},
    {"health": {"age_s": "old", "findings": []}},
    {"health": {"age_s": 1, "findings": [{}]}},
)
def test_report_of_another_shape_is_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        HostReport.parse(values)


def test_report_is_read_as_it_is_sent() -> None:
    users, logs = {"alice": 2001, "bob": None}, [{"text": "x", "age_s": None}]
    health = {"age_s": 5, "findings": [{"id": "gpu-lost", "since": 1.5, "evidence": ["gone"]}]}
    found = HostReport.parse({"users": users, "directories": [asdict(SPACE)], "logs": logs, "health": health})
    expected = HealthReport(5.0, (NodeFinding("gpu-lost", 1.5, ("gone",)),))
    assert found == HostReport(users=users, directories=[SPACE], logs=[LogEntry("x", None)], health=expected)


# ---- the health program of a node


def test_findings_of_the_health_program_are_shown_with_their_time() -> None:
    entry = NodeFinding("gpu-lost", 0.0, ("GPU-1 is gone",))
    one = only(diagnose(view(report=replace(WELL, health=HealthReport(60.0, (entry,))))))
    assert (one.id, one.level, one.host, one.evidence) == ("gpu-lost", "error", "n1", ("GPU-1 is gone",))
    assert one.since.startswith("19") and (one.action, one.explicit) == ("forget", True)


def test_finding_of_a_newer_program_and_what_was_checked_again_are_left_out() -> None:
    entries = tuple(NodeFinding(name, 0.0, ("x",)) for name in ("unheard-of", "disk-full"))
    assert diagnose(view(report=replace(WELL, health=HealthReport(60.0, entries)))) == []


def test_health_program_that_does_not_run_is_a_finding() -> None:
    assert diagnose(view(report=replace(WELL, health=HealthReport(600.0)))) == []
    one = only(diagnose(view(report=replace(WELL, health=HealthReport(1200.0)))))
    assert (one.id, one.evidence) == ("health-stale", ("its last result is 20 min old",))


# ---- unreliable nodes


@cases(
    "counts, unreliable",
    ({"n1": (20, 8, 0), "n2": (100, 4, 0)}, ["n1"]),
    ({"n1": (20, 8, 0), "n2": (100, 40, 0)}, []),
    ({"n1": (20, 4, 0), "n2": (100, 0, 0)}, []),
    ({"n1": (20, 8, 0)}, []),
    ({"n1": (50, 2, 2), "n2": (50, 0, 0)}, ["n1"]),
    ({"n[1-2]": (3, 2, 1), "n1": (3, 1, 1)}, ["n1"]),
    ({"n[": (20, 20, 20)}, []),
)
def test_node_on_which_more_jobs_fail_is_found_with_the_numbers(
    counts: dict[str, tuple[int, int, int]], unreliable: list[str]
) -> None:
    records = {
        nodes: EndedJobs(jobs, (900.0,) * (failed - lost), (1000.0,) * lost)
        for nodes, (jobs, failed, lost) in counts.items()
    }
    nodes = {name: node("", "IDLE", name=name) for name in ("n1", "n2")}
    reports = {"c1": replace(WELL, records=records), "n1": WELL, "n2": WELL}
    found = diagnose(ClusterView("c1", nodes, reports=reports))
    assert [(one.id, one.host) for one in found] == [("node-unreliable", name) for name in unreliable]
    if counts.get("n1") == (20, 8, 0) and found:
        expected = "in 7 days 8 of 20 jobs failed here, 0 were lost with the node; on other nodes 4 of 100 failed"
        assert found[0].evidence == (expected,)


def test_jobs_that_were_lost_in_a_planned_reboot_do_not_make_a_node_unreliable() -> None:
    nodes = {name: node("", "IDLE", name=name) for name in ("n1", "n2")}

    def found(stops: Sequence[tuple[float, float]], nodes: Mapping[str, NodeState] = nodes) -> list[Diagnosis]:
        records = {"n[1-2]": EndedJobs(9, (980.0,), (1000.0, 1050.0, 5000.0))}
        reports = {"c1": replace(WELL, records=records), "n1": WELL, "n2": replace(WELL, stops=stops)}
        return diagnose(ClusterView("c1", nodes, reports=reports))

    assert found([(990.0, 1010.0)]) == []
    first, second = found([(990.0, 985.0), (4000.0, 4100.0)])
    assert (first.host, second.host) == ("n1", "n2"), "after that it ended unasked"
    assert first.evidence[0].startswith("in 7 days 2 of 7 jobs failed here, 2 were lost with the node")
    away = {"c1": replace(WELL, records={"n[1-2]": EndedJobs(9, (), (1000.0, 1050.0))}), "n1": WELL}
    assert diagnose(ClusterView("c1", nodes, reports=away)) == [], "n2 may be rebooting"
    rented = {name: replace(one, state=("IDLE", "CLOUD")) for name, one in nodes.items()}
    assert found([], rented) == [], "each is another machine than the last"
