"""Hosts that do not fit their cluster: clocks, versions, files of Slurm, cgroups, and nodes unlike their nodeset."""

from typing import Any

from tests.support.cases import cases

from shoal.health.consistency import CGROUP_ERRORS
from shoal.health.diagnosis import ClusterView, diagnose
from shoal.health.report import HostReport, LogEntry


def find(reports: dict[str, HostReport], **more: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """Each finding with its place and evidence."""
    diagnoses = diagnose(ClusterView("c1", reports=reports, **more))
    return [(diagnosis.id, diagnosis.host or diagnosis.job, diagnosis.evidence) for diagnosis in diagnoses]


@cases("offset, evidence", (75.0, None), (90.0, "80 s ahead of c1"), (-90.0, "100 s behind c1"), (10.0, None))
def test_clock_is_compared_with_the_controllers(offset: float, evidence: str | None) -> None:
    """This machine's own clock may be wrong as well: both hosts are ten seconds or more ahead of it."""
    found = find(
        {"c1": HostReport(), "n1": HostReport()}, clocks={"c1": 15.0 if offset == 75.0 else 10.0, "n1": offset}
    )
    assert found == ([("clock", "n1", (evidence,))] if evidence else [])


def test_answer_of_munge_is_evidence_of_a_wrong_clock() -> None:
    found = find({}, clocks={"c1": 0.0, "n1": 600.0}, credentials={"n1": "Rewound credential"})
    assert found == [("clock", "n1", ("600 s ahead of c1", "munge on c1: Rewound credential"))]


def test_controller_that_all_others_differ_from_has_the_wrong_clock() -> None:
    found = find({}, clocks={"c1": -400.0, "n1": 0.5, "n2": -0.5})
    assert found == [("clock", "c1", ("400 s behind this machine and n[1-2]",))]
    both = find({}, clocks={"c1": -400.0, "n1": -800.0, "n2": 0.0})
    assert [(host, evidence) for _, host, evidence in both] == [
        ("n1", ("400 s behind c1",)),
        ("n2", ("400 s ahead of c1",)),
    ]


@cases(
    "slurmctld, slurmd, is_wrong",
    ("slurm-wlm 22.05.8", "slurm-wlm 22.05.8", False),
    ("slurm-wlm 24.11.5", "slurm-wlm 23.11.4", False),
    ("slurm-wlm 22.05.8", "slurm-wlm 24.11.5", True),
    ("slurm 26.05.3", "slurm-wlm 22.05.8", True),
    ("slurm-wlm 22.05.8", "", False),
)
def test_release_that_slurmctld_does_not_accept_is_found(slurmctld: str, slurmd: str, is_wrong: bool) -> None:
    found = find({"c1": HostReport(version=slurmctld), "n1": HostReport(version=slurmd)})
    assert [(id, host) for id, host, _ in found] == ([("version-skew", "n1")] if is_wrong else [])


def test_node_with_other_files_of_slurm_is_found() -> None:
    own = {"slurm.conf": "a", "gres.conf": "b"}
    other = HostReport(confs={"slurm.conf": "x", "gres.conf": "b", "plugstack.conf": "c"})
    found = find({"c1": HostReport(confs=own), "n1": HostReport(confs=own), "n2": other, "login": HostReport()})
    assert found == [("conf-differs", "n2", ("not as on c1: slurm.conf",))]


@cases("error", *CGROUP_ERRORS)
def test_errors_of_cgroups_are_found_until_slurmd_has_started(error: str) -> None:
    line, start = LogEntry(f"error: {error}", 60.0), LogEntry("slurmd version 22.05.8 started", 30.0)
    stopped, running = {"slurmd": "failed"}, {"slurmd": "active"}
    report = HostReport(services=running, logs=[start, line])
    assert find({"n1": report}) == [("cgroups", "n1", (line.text,))]
    assert find({"n1": HostReport(services=running, logs=[line, start])}) == []
    for logs in ([start, line], [line]):
        found = find({"n1": HostReport(services=stopped, logs=logs)})
        assert [id for id, _, _ in found] == ["slurmd-stopped", "cgroups"]
    found = find({"n1": HostReport(services=stopped, logs=[line, start])})
    assert [id for id, _, _ in found] == ["slurmd-stopped"], "it has started since"


def test_node_unlike_its_nodeset_is_found() -> None:
    usual = {
        "kernel": "6.1.0-30",
        "NVIDIA driver": "535.1",
        "slurmd": "22.05.8-4",
        "/etc/slurm/prolog.sh": "0123456789ab",
    }
    changed = {"kernel": "6.1.0-32", "slurmd": "22.05.8-4", "/etc/slurm/prolog.sh": "No such file or directory"}
    reports = {
        "c1": HostReport(),
        **{name: HostReport(facts=usual) for name in ("n1", "n2")},
        "n3": HostReport(facts=changed),
        "m1": HostReport(facts=changed),
        "n4": HostReport(facts={**usual, "/etc/slurm/prolog.sh": "ffffffffffff"}),
    }
    nodesets = {"lab": ("n1", "n2", "n3", "n4", "off"), "other": ("m1",)}
    differences = {host: evidence for _, host, evidence in find(reports, nodesets=nodesets)}
    assert differences == {
        "n3": (
            "kernel: 6.1.0-32, on n1 6.1.0-30",
            "NVIDIA driver: none, on n1 535.1",
            "/etc/slurm/prolog.sh: No such file or directory; it is on n1",
        ),
        "n4": ("/etc/slurm/prolog.sh: another text than on n1",),
    }


def test_of_two_nodes_the_second_differs() -> None:
    reports = {"n1": HostReport(facts={"kernel": "1"}), "n2": HostReport(facts={"kernel": "2"})}
    assert find(reports, nodesets={"lab": ("n1", "n2")}) == [("node-differs", "n2", ("kernel: 2, on n1 1",))]


def test_job_that_holds_its_nodes_after_its_end_is_found() -> None:
    report = HostReport.parse(
        {
            "completing": [
                {"job": str(seconds), "user": "alice", "nodes": "n1", "seconds": seconds} for seconds in (119, 240)
            ]
        }
    )
    assert find({"c1": report}) == [("job-completing", "240", ("job 240 of alice on n1 ended 4 min ago",))]
