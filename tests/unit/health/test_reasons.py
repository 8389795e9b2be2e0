"""Slurm's reasons by release: each leads to its fault, and a person's words stay a person's.

The texts are those of the format strings in the sources of slurm-22-05-8-1, slurm-24-11-5-1 and slurm-26-05-3-1.
"""

from tests.documents import ROOT
from tests.support.cases import cases

from shoal.cloud.service.slurm import format_reason
from shoal.health.docs import doctor_markdown
from shoal.health.faults import HOST_FAULTS, JOB_FAULTS
from shoal.health.node_faults import NODE_FAULTS
from shoal.health.reasons import FAULTS, REASONS, STATES, faults_in, is_written_by_person
from shoal.plan.nodes import LEAVING_REASON

ALL = ("22.05", "24.11", "26.05")
LATER = ("24.11", "26.05")
WRITTEN = [
    ("low-memory", "Low RealMemory (reported:985 < 100.00% of configured:2048)", ALL),
    ("low-memory", "Low RealMemory", ("before 22.05",)),
    ("low-cores", "Low socket*core*thread count", ALL),
    ("low-cpus", "Low CPUs", ALL),
    ("low-tmpdisk", "Low TmpDisk", ALL),
    ("gpu-missing", "gres/gpu count reported lower than configured (1 < 2)", ALL),
    ("gpu-missing", "gres/gpu count too low (1 < 2)", ALL),
    ("gpu-type-missing", "gres/gpu:a100 count too low (1 < 2)", ALL),
    ("gpu-type-unknown", "gres/gpu type (h100) reported but not configured", LATER),
    ("gpu-changed-under-jobs", "gres/gpu count changed and jobs are using them (1 != 2)", ALL),
    ("gpu-changed-under-jobs", "gres/gpu type changed and jobs are using them", LATER),
    ("gres-unreadable", "Could not unpack gres data", ALL),
    ("restricted-cores", "RestrictedCoresPerGPU=4 but no gpus on node n1", LATER),
    ("restricted-cores", "RestrictedCoresPerGPU=4 but the gpus given don't have any topology on node n1.", LATER),
    (
        "restricted-cores",
        "RestrictedCoresPerGPU: We can't restrict 4 core(s) per gpu. GPU a100(0) doesn't have access to that many "
        "unique cores (2).",
        LATER,
    ),
    ("core-specialization", "CoreSpec differ", LATER),
    (
        "features",
        "Reported active features (a,b) are not a superset of currently active changeable features (c)",
        LATER,
    ),
    ("dynamic-node", "Failed to parse dynamic_conf nodeline", ("26.05",)),
    ("dynamic-node", "Failed to set topology 'default:s1'", ("26.05",)),
    ("prolog-error", "Prolog error", ALL),
    ("prolog-error", "Job env setup error", ALL),
    ("prolog-epilog-failure", "Prolog/Epilog failure", ALL),
    ("epilog-error", "Epilog error", ALL),
    ("kill-task-failed", "Kill task failed", ("22.05", "24.11")),
    ("kill-task-failed", "Kill task failed (JobId=17 StepId=17.0)", ("26.05",)),
    ("step-not-running", "Job step not running", ("22.05", "24.11")),
    ("step-not-running", "Job step not running (JobId=17 StepId=17.batch)", ("26.05",)),
    ("spool-full", "SlurmdSpoolDir is full", ALL),
    ("batch-complete-failure", "batch job complete failure", ALL),
    ("duplicate-job", "Duplicate jobid", ALL),
    ("no-address", "NO NETWORK ADDRESS FOUND", ALL),
    ("not-responding", "Not responding", ALL),
    ("unexpected-reboot", "Node unexpectedly rebooted", ALL),
    ("resume-timeout", "ResumeTimeout reached", ALL),
    ("reboot", "reboot requested", ALL),
    ("reboot", "Reboot ASAP : reboot issued", ALL),
    ("reboot", "reboot issued", ALL),
    ("reboot", "reboot complete", ALL),
    ("reboot-timeout", "reboot timed out", ALL),
    ("reboot-timeout", "Reboot ASAP : reboot issued : reboot timed out", ALL),
    ("bad-core-count", "Bad core count", ALL),
    ("switch-plugin", "switch_g_job_postfini failed", LATER),
    ("feature-not-set", "Failed to set node feature(s): 'knl'", LATER),
    ("leaving", LEAVING_REASON, ("Shoal",)),
    ("health-drain", "shoal: health: gpu-lost: GPU-1 is gone", ("Shoal",)),
]


@cases("fault, reason, releases", *WRITTEN)
def test_reason_leads_to_its_fault_alone(fault: str, reason: str, releases: tuple[str, ...]) -> None:
    assert [one.id for one in faults_in(reason)] == [fault], releases
    assert not is_written_by_person(reason)


def test_every_fault_of_a_reason_has_a_text_in_this_test() -> None:
    assert {fault for fault, _, _ in WRITTEN} == {fault.id for fault in REASONS}
    assert {release for _, _, releases in WRITTEN for release in releases} >= {*ALL}


@cases("separator", ", ", " : ")
def test_reasons_that_slurm_joins_lead_to_all_their_faults(separator: str) -> None:
    texts = ["Low socket*core*thread count", "Low CPUs", "Low RealMemory (reported:1 < 100.00% of configured:2)"]
    joined = separator.join(texts)
    assert {one.id for one in faults_in(joined)} == {"low-cores", "low-cpus", "low-memory"}
    assert not is_written_by_person(joined)


@cases(
    "reason",
    "fan broken",
    "Kill task failed, I look at it: Anna",
    "drained by hand",
    "new DIMM comes on Monday : Low RealMemory (reported:1 < 100.00% of configured:2)",
    "not shoal: leaving the cluster",
)
def test_reason_with_other_words_is_a_persons(reason: str) -> None:
    assert is_written_by_person(reason)


@cases("reason", "", format_reason("no capacity", 1000.0), LEAVING_REASON)
def test_reason_of_shoal_is_no_persons(reason: str) -> None:
    assert not is_written_by_person(reason)


def test_every_finding_has_an_id_of_its_own_and_a_fix() -> None:
    assert len(FAULTS) == len(HOST_FAULTS) + len(NODE_FAULTS) + len(REASONS) + len(JOB_FAULTS) + len(STATES)
    assert all(fault.what and fault.cause and fault.fix for fault in FAULTS.values())


def test_page_is_made_from_the_table() -> None:
    hint = "run `python -m shoal.health.docs > docs/doctor.md`"
    assert (ROOT / "docs/doctor.md").read_text() == doctor_markdown(), hint
