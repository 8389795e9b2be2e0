"""The 62 faults that `shoal doctor` is measured by, each with the test that finds it.

`tests/unit/health/test_fault_table.py` compares this list with the findings of the code, the tests that exist, and the
saved table, bench/results/doctor.txt, which `python -m tests.doctor_faults` prints.
"""

from __future__ import annotations

from collections.abc import Iterator

KINDS = {
    "real": "created on sandbox hosts with a real Slurm",
    "simulated": "through a simulated NVML, kernel log or libcuda",
    "text": "by the text that Slurm writes as a node's reason in 22.05, 24.11 and 26.05",
    "unit": "by a unit test with the answers or files that a host would give",
}
TEXTS = "unit/health/test_reasons.py::test_reason_leads_to_its_fault_alone"
GPUS = "unit/health/test_gpu_checks.py::test_fault_of_a_gpu_is_found"
HOSTS = "e2e/test_doctor.py::test_faults_of_hosts_are_found_and_fixed"
FAULT_TESTS = (
    (1, "less memory than configured", "low-memory", "real",
     "e2e/test_doctor.py::test_rejected_registration_is_fixed_by_one_command"),
    (2, "fewer cores or threads", "low-cores", "text", TEXTS),
    (3, "fewer CPUs", "low-cpus", "text", TEXTS),
    (4, "less temporary disk", "low-tmpdisk", "text", TEXTS),
    (5, "GPU gone (count)", "gpu-missing", "text", TEXTS),
    (6, "GPU of a type gone", "gpu-type-missing", "text", TEXTS),
    (7, "type unknown to slurm.conf (24.11)", "gpu-type-unknown", "text", TEXTS),
    (8, "GPUs changed under jobs", "gpu-changed-under-jobs", "text", TEXTS),
    (9, "gres data unreadable", "gres-unreadable", "text", TEXTS),
    (10, "cores reserved per GPU impossible (24.11)", "restricted-cores", "text", TEXTS),
    (11, "core specialization differs", "core-specialization", "text", TEXTS),
    (12, "active features not a superset", "features", "text", TEXTS),
    (13, "topology of slurmd rejected (26.05)", "dynamic-node", "text", TEXTS),
    (14, "prolog failed", "prolog-error", "real",
     "e2e/test_doctor.py::test_failing_scripts_drain_nodes_until_they_are_corrected"),
    (15, "prolog or epilog failed at launch", "prolog-epilog-failure", "text", TEXTS),
    (16, "epilog failed", "epilog-error", "real",
     "e2e/test_doctor.py::test_failing_scripts_drain_nodes_until_they_are_corrected"),
    (17, "processes survive SIGKILL", "kill-task-failed", "text",
     "e2e/test_doctor.py::test_persons_drain_and_note_are_kept"),
    (18, "step gone before it ran", "step-not-running", "text", TEXTS),
    (19, "spool full", "spool-full", "real", "e2e/test_doctor.py::test_full_spool_drains_a_node_until_there_is_space"),
    (20, "batch job could not be ended well", "batch-complete-failure", "text", TEXTS),
    (21, "job id known there already", "duplicate-job", "text", TEXTS),
    (22, "name does not resolve", "no-address", "text", TEXTS),
    (23, "not heard of", "not-responding", "text", TEXTS),
    (24, "rebooted on its own", "unexpected-reboot", "text", TEXTS),
    (25, "cloud node late", "resume-timeout", "text", TEXTS),
    (26, "reboot timed out", "reboot-timeout", "text", TEXTS),
    (27, "core map broken", "bad-core-count", "text", TEXTS),
    (28, "switch plugin failed (24.11)", "switch-plugin", "text", TEXTS),
    (29, "other munge key", "munge-key", "real", HOSTS),
    (30, "clocks apart", "clock", "unit",
     "unit/health/test_consistency.py::test_clock_is_compared_with_the_controllers"),
    (31, "munged away", "munge-stopped", "real", HOSTS),
    (32, "version skew", "version-skew", "unit",
     "unit/health/test_consistency.py::test_release_that_slurmctld_does_not_accept_is_found"),
    (33, "other slurm.conf", "conf-differs", "real", "e2e/test_doctor.py::test_node_unlike_its_nodeset_is_found"),
    (34, "cgroups", "cgroups", "unit",
     "unit/health/test_consistency.py::test_errors_of_cgroups_are_found_until_slurmd_has_started"),
    (35, "uid unknown on node", "user-missing", "real", HOSTS),
    (36, "jobs hang in COMPLETING", "job-completing", "unit",
     "unit/health/test_consistency.py::test_job_that_holds_its_nodes_after_its_end_is_found"),
    (37, "disk full", "disk-full", "real", HOSTS),
    (38, "inodes gone", "inodes-full", "real", HOSTS),
    (39, "file system read-only", "read-only", "real", HOSTS),
    (40, "share stale or server away", "share-hangs", "real",
     "e2e/test_doctor.py::test_share_that_hangs_drains_its_node_until_it_is_gone"),
    (41, "disk errors", "disk-errors", "unit",
     "unit/health/test_node_health.py::test_errors_of_disks_in_the_kernel_log_are_found"),
    (42, "processes in D state", "processes-stuck", "unit",
     "unit/health/test_node_health.py::test_process_that_waits_in_two_runs_is_found"),
    (43, "memory used on an idle node", "memory-held", "unit",
     "unit/health/test_leftovers.py::test_memory_held_on_an_idle_node_is_found"),
    (44, "GPU used without a job", "gpu-process-left", "simulated",
     "e2e/test_doctor.py::test_leftovers_and_idle_gpus_are_found"),
    (45, "machine checks, ECC of RAM", "memory-errors", "unit",
     "unit/health/test_node_health.py::test_errors_of_memory_are_found"),
    (46, "network link slower", "link-slow", "unit",
     "unit/health/test_node_health.py::test_links_are_compared_with_the_baseline"),
    (47, "clock source lost", "clock-source", "unit",
     "unit/health/test_node_health.py::test_settings_are_compared_with_the_first"),
    (48, "fans, power supply, temperature", "sensors", "unit",
     "unit/health/test_node_health.py::test_alarm_of_a_sensor_is_found_unless_it_always_was"),
    (49, "driver and library differ", "gpu-driver-mismatch", "simulated",
     "unit/health/test_gpu_checks.py::test_library_of_another_release_is_found"),
    (50, "slurmd not there", "slurmd-stopped", "real", HOSTS),
    (51, "fewer GPUs than yesterday", "gpu-lost", "simulated",
     "unit/health/test_gpu_checks.py::test_gpu_that_is_gone_is_found_by_the_baseline"),
    (52, "driver asks for an action", "gpu-recovery", "simulated", GPUS),
    (53, "XID in the kernel log", "gpu-xid", "simulated",
     "unit/health/test_gpu_checks.py::test_xid_that_needs_an_action_is_found"),
    (54, "uncorrected ECC errors", "gpu-ecc", "simulated", GPUS),
    (55, "row remap pending", "gpu-remap-pending", "simulated", GPUS),
    (56, "row remap failed", "gpu-remap-failed", "simulated", GPUS),
    (57, "pages retired pending", "gpu-remap-pending", "simulated", GPUS),
    (58, "NVLink inactive", "gpu-nvlink", "simulated", GPUS),
    (59, "NVLink errors rise", "gpu-nvlink-errors", "simulated",
     "unit/health/test_gpu_checks.py::test_errors_of_nvlinks_are_found_when_they_rise"),
    (60, "clock held down", "gpu-clock", "simulated", GPUS),
    (61, "PCIe narrower", "gpu-pcie", "simulated", GPUS),
    (62, "persistence mode off", "gpu-persistence", "simulated", GPUS),
)  # fmt: skip
"""Number, fault, finding, how it is made, and its test as FILE::NAME below tests/."""

OTHER_TESTS = {
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
    "person-drain": "e2e/test_doctor.py::test_persons_drain_and_note_are_kept",
}
"""Findings beyond the 62, each with its test."""


def fault_table() -> Iterator[str]:
    """The lines of the saved table."""
    yield "The 62 faults, and the test that finds each. Fixes, and nodes that are idle after them, are seen in the"
    yield "tests that are marked real, on Slurm 22.05. The other faults were not created on a cluster."
    yield from (f"  {kind:<11}{text}" for kind, text in KINDS.items())
    yield ""
    for number, name, finding, kind, test in FAULT_TESTS:
        yield f"{number:>2} {name:<44}{finding:<24}{kind:<11}{test}"
    yield ""
    counts = [f"{sum(row[3] == kind for row in FAULT_TESTS)} {kind}" for kind in KINDS]
    yield f"{len(FAULT_TESTS)} faults: {', '.join(counts)}"


if __name__ == "__main__":
    print("\n".join(fault_table()))
