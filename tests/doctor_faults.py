"""The 62 faults that `shoal doctor` is measured by, each with the test that finds it.

`tests/unit/health/test_fault_table.py` compares this list with the findings of the code, the tests that exist, and the
saved table, bench/results/doctor.txt, which `tests/matrix/test_doctor_faults.py` writes from what it has seen.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KINDS = {
    "real": "on sandbox hosts (30: virtual machines), in their files, mounts, daemons and clock, with a real Slurm",
    "simulated": "on those hosts, with files of the kernel, an NVML or a version that are simulated",
    "text": "by the text that Slurm writes as a node's reason in 22.05, 24.11 and 26.05",
}
FIRST_RELEASE = "22.05"
HEADER = (
    "as tests/matrix/test_doctor_faults.py saw them on two nodes of the sandbox.",
    "  detected   `shoal doctor` has the finding, for the right node or job",
    "  cause      its evidence names the cause, and no other finding is there that the fault does not explain",
    "  fix        yes: `shoal doctor --fix FINDING` claims it and does it, after a person's repair where the finding",
    "             asks for one; by hand: Shoal claims none, and the repair that the finding names is enough",
    "  IDLE again all nodes are IDLE, and `shoal doctor` finds nothing",
    "How the fault was made. Rows of the last kind were not made on a cluster, and have no other columns:",
)
TEXTS = "unit/health/test_reasons.py::test_reason_leads_to_its_fault_alone"
VIRTUAL_MACHINES = "matrix/test_doctor_faults.py::test_clock_set_wrong_is_found_and_corrected"
CLUSTER = "matrix/test_doctor_faults.py::test_fault_is_found_with_its_cause_and_fixed"
FAULT_TESTS = (
    (1, "less memory than configured", "low-memory", "real", CLUSTER),
    (2, "fewer cores or threads", "low-cores", "real", CLUSTER),
    (3, "fewer CPUs", "low-cpus", "real", CLUSTER),
    (4, "less temporary disk", "low-tmpdisk", "real", CLUSTER),
    (5, "GPU gone (count)", "gpu-missing", "real", CLUSTER),
    (6, "GPU of a type gone", "gpu-type-missing", "real", CLUSTER),
    (7, "type unknown to slurm.conf (24.11)", "gpu-type-unknown", "text", TEXTS),
    (8, "GPUs changed under jobs", "gpu-changed-under-jobs", "text", TEXTS),
    (9, "gres data unreadable", "gres-unreadable", "text", TEXTS),
    (10, "cores reserved per GPU impossible (24.11)", "restricted-cores", "text", TEXTS),
    (11, "core specialization differs", "core-specialization", "text", TEXTS),
    (12, "active features not a superset", "features", "text", TEXTS),
    (13, "topology of slurmd rejected (26.05)", "dynamic-node", "text", TEXTS),
    (14, "prolog failed", "prolog-error", "real", CLUSTER),
    (15, "prolog or epilog failed at launch", "prolog-epilog-failure", "text", TEXTS),
    (16, "epilog failed", "epilog-error", "real", CLUSTER),
    (17, "processes survive SIGKILL", "kill-task-failed", "real", CLUSTER),
    (18, "step gone before it ran", "step-not-running", "text", TEXTS),
    (19, "spool full", "spool-full", "real", CLUSTER),
    (20, "batch job could not be ended well", "batch-complete-failure", "real", CLUSTER),
    (21, "job id known there already", "duplicate-job", "real", CLUSTER),
    (22, "name does not resolve", "no-address", "real", CLUSTER),
    (23, "not heard of", "not-responding", "real", CLUSTER),
    (24, "rebooted on its own", "unexpected-reboot", "real", CLUSTER),
    (25, "cloud node late", "resume-timeout", "real", CLUSTER),
    (26, "reboot timed out", "reboot-timeout", "real", CLUSTER),
    (27, "core map broken", "bad-core-count", "text", TEXTS),
    (28, "switch plugin failed (24.11)", "switch-plugin", "text", TEXTS),
    (29, "other munge key", "munge-key", "real", CLUSTER),
    (30, "clocks apart", "clock", "real", VIRTUAL_MACHINES),
    (31, "munged away", "munge-stopped", "real", CLUSTER),
    (32, "version skew", "version-skew", "simulated", CLUSTER),
    (33, "other slurm.conf", "conf-differs", "real", CLUSTER),
    (34, "cgroups", "cgroups", "real", CLUSTER),
    (35, "uid unknown on node", "user-missing", "real", CLUSTER),
    (36, "jobs hang in COMPLETING", "job-completing", "real", CLUSTER),
    (37, "disk full", "disk-full", "real", CLUSTER),
    (38, "inodes gone", "inodes-full", "real", CLUSTER),
    (39, "file system read-only", "read-only", "real", CLUSTER),
    (40, "share stale or server away", "share-hangs", "real", CLUSTER),
    (41, "disk errors", "disk-errors", "simulated", CLUSTER),
    (42, "processes in D state", "processes-stuck", "real", CLUSTER),
    (43, "memory used on an idle node", "memory-held", "simulated", CLUSTER),
    (44, "GPU used without a job", "gpu-process-left", "simulated", CLUSTER),
    (45, "machine checks, ECC of RAM", "memory-errors", "simulated", CLUSTER),
    (46, "network link slower", "link-slow", "simulated", CLUSTER),
    (47, "clock source lost", "clock-source", "simulated", CLUSTER),
    (48, "fans, power supply, temperature", "sensors", "simulated", CLUSTER),
    (49, "driver and library differ", "gpu-driver-mismatch", "simulated", CLUSTER),
    (50, "slurmd not there", "slurmd-stopped", "real", CLUSTER),
    (51, "fewer GPUs than yesterday", "gpu-lost", "simulated", CLUSTER),
    (52, "driver asks for an action", "gpu-recovery", "simulated", CLUSTER),
    (53, "XID in the kernel log", "gpu-xid", "simulated", CLUSTER),
    (54, "uncorrected ECC errors", "gpu-ecc", "simulated", CLUSTER),
    (55, "row remap pending", "gpu-remap-pending", "simulated", CLUSTER),
    (56, "row remap failed", "gpu-remap-failed", "simulated", CLUSTER),
    (57, "pages retired pending", "gpu-remap-pending", "simulated", CLUSTER),
    (58, "NVLink inactive", "gpu-nvlink", "simulated", CLUSTER),
    (59, "NVLink errors rise", "gpu-nvlink-errors", "simulated", CLUSTER),
    (60, "clock held down", "gpu-clock", "simulated", CLUSTER),
    (61, "PCIe narrower", "gpu-pcie", "simulated", CLUSTER),
    (62, "persistence mode off", "gpu-persistence", "simulated", CLUSTER),
)  # fmt: skip
"""Number, fault, finding, how it is made, and its test as FILE::NAME below tests/."""

OTHER_TESTS = {
    "not-joined": "unit/health/test_diagnosis.py::test_host_that_is_no_node_yet_is_no_error",
    "unreachable": "e2e/test_doctor.py::test_hung_host_is_a_finding_and_hides_no_other",
    "slurmctld-stopped": "e2e/test_doctor.py::test_stopped_slurmctld_is_started",
    "slurmctld-silent": "unit/health/test_diagnosis.py::test_silent_slurmctld_is_a_finding_of_the_controller",
    "name-unresolved": "e2e/test_doctor.py::test_faults_of_hosts_are_found_and_fixed",
    "node-unreliable": "unit/health/test_diagnosis.py::test_node_on_which_more_jobs_fail_is_found_with_the_numbers",
    "health-stale": "unit/health/test_diagnosis.py::test_health_program_that_does_not_run_is_a_finding",
    "node-differs": "unit/health/test_consistency.py::test_node_unlike_its_nodeset_is_found",
    "gpu-test": "unit/health/test_gpu_acceptance.py::test_gpu_that_fails_is_found_until_it_passes",
    "gpu-slow": "unit/health/test_gpu_acceptance.py::test_speed_is_compared_with_the_best",
    "fabric-manager": "unit/health/test_gpu_checks.py::test_switches_without_their_manager_are_found",
    "cpu-governor": "unit/health/test_node_health.py::test_settings_are_compared_with_the_first",
    "gpu-driver": "unit/health/test_gpu_driver.py::test_device_on_the_bus_without_a_driver_is_found",
    "gpu-xid-past": "unit/health/test_gpu_checks.py::test_driver_that_asks_for_nothing_settles_an_xid",
    "step-left": "e2e/test_doctor.py::test_leftovers_and_idle_gpus_are_found",
    "gpu-idle": "e2e/test_doctor.py::test_leftovers_and_idle_gpus_are_found",
    "driver-reboot": "unit/health/test_gpu_driver.py::test_installed_driver_asks_for_one_reboot",
    "training-hung": "unit/health/test_training.py::test_rank_without_a_step_is_found",
    "reboot": "unit/health/test_reasons.py::test_reason_leads_to_its_fault_alone",
    "feature-not-set": "unit/health/test_reasons.py::test_reason_leads_to_its_fault_alone",
    "leaving": "unit/health/test_reasons.py::test_reason_leads_to_its_fault_alone",
    "health-drain": "e2e/test_doctor.py::test_health_program_lifts_its_own_drain_and_no_other",
    "node-unexplained": "unit/health/test_diagnosis.py::test_node_out_of_service_without_a_reason_is_a_warning",
    "job-failed": "e2e/test_doctor.py::test_failed_job_is_explained",
    "job-hung": "unit/jobs/test_hang.py::test_training_without_a_step_hangs",
    "job-launch-failed": "e2e/test_doctor.py::test_failing_scripts_drain_nodes_until_they_are_corrected",
    "job-waits-for-node": "e2e/test_doctor.py::test_failing_scripts_drain_nodes_until_they_are_corrected",
    "registration-rejected": "unit/health/test_diagnosis.py::test_reason_of_a_node_decides_on_level_and_action",
    "person-drain": "e2e/test_doctor.py::test_persons_drain_and_note_are_kept",
}
"""Findings beyond the 62, each with its test."""


@dataclass
class Outcome:
    """What was seen of a fault on a cluster."""

    how: str
    detected: str = "NO"
    cause: str = "NO"
    fix: str = "NO"
    idle: str = "NO"


def fault_table(outcomes: Mapping[int, Outcome], release: str = FIRST_RELEASE) -> Iterator[str]:
    """The lines of the saved table, from what the tests on a cluster have seen. Of other releases, those rows alone."""
    rows = [row for row in FAULT_TESTS if release == FIRST_RELEASE or row[0] in outcomes]
    yield f"{len(rows)} faults on Slurm {release},"
    yield from HEADER
    yield from (f"  {kind:<11}{text}" for kind, text in KINDS.items())
    yield ""
    yield f"   {'fault':<44}{'finding':<24}{'how':<11}{'detected':<10}{'cause':<7}{'fix':<11}IDLE again"
    for number, name, finding, kind, _ in rows:
        detected = "yes" if kind not in ("real", "simulated") else "not run"
        row = outcomes.get(number, Outcome(kind, detected, "-", "-", "-"))
        columns = f"{row.how:<11}{row.detected:<10}{row.cause:<7}{row.fix:<11}{row.idle}"
        yield f"{number:>2} {name:<44}{finding:<24}{columns}"
    yield ""
    counts = [f"{sum(row[3] == kind for row in rows)} {kind}" for kind in KINDS]
    complete = sum(row.idle == "yes" for row in outcomes.values())
    yield f"{len(rows)} faults: {', '.join(counts)}; {complete} on a cluster, from the fault to the idle node"


def saved_outcomes(table: str) -> dict[int, Outcome]:
    """The rows of a saved table that were seen on a cluster."""
    outcomes = {}
    for line in table.splitlines():
        match = re.fullmatch(
            r" ?(\d+) .* (real|simulated) +(yes|NO) +(yes|NO) +(yes|NO|by hand|by itself) +(yes|NO)", line
        )
        if match:
            outcomes[int(match[1])] = Outcome(*match.groups()[1:])
    return outcomes
