"""The table of the 62 faults: every finding of the code has a test that exists, and the saved table says the same."""

import re

from tests.doctor_faults import FAULT_TESTS, KINDS, OTHER_TESTS, Outcome, saved_outcomes
from tests.documents import ROOT
from tests.matrix.doctor_cases import CASES, CLOCK_CASE
from tests.support.cases import cases

from shoal.health.reasons import FAULTS

MIN_COMPLETE = 51
"""So many faults are followed from their making to the idle node."""


def test_the_62_faults_are_numbered_and_of_a_known_kind() -> None:
    assert [row[0] for row in FAULT_TESTS] == [*range(1, 63)]
    assert {row[3] for row in FAULT_TESTS} <= {*KINDS}


def test_every_finding_has_a_test() -> None:
    assert {*FAULTS} == {row[2] for row in FAULT_TESTS} | {*OTHER_TESTS}


@cases("reference", *sorted({*OTHER_TESTS.values(), *(row[4] for row in FAULT_TESTS)}))
def test_test_of_a_fault_exists(reference: str) -> None:
    file, _, name = reference.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), reference


def test_faults_on_a_cluster_are_those_of_the_list() -> None:
    made = {fault.number: (fault.how, fault.finding) for case in (*CASES, CLOCK_CASE) for fault in case.faults}
    listed = {row[0]: (row[3], row[2]) for row in FAULT_TESTS if row[3] in ("real", "simulated")}
    assert made == listed


def test_saved_table_has_every_fault() -> None:
    saved = (ROOT / "bench/results/doctor.txt").read_text()
    for number, name, finding, kind, _ in FAULT_TESTS:
        assert re.search(rf"^{number:>2} {re.escape(name)} +{finding} +{kind} +(yes|not run) ", saved, re.MULTILINE), (
            name
        )
    complete = [row for row in saved_outcomes(saved).values() if row == Outcome(row.how, "yes", "yes", row.fix, "yes")]
    assert len(complete) >= MIN_COMPLETE and all(row.fix in ("yes", "by hand") for row in complete)
    assert f"; {len(complete)} on a cluster" in saved
