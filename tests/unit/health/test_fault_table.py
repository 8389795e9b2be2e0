"""The table of the 62 faults: every finding of the code has a test that exists, and the saved table says the same."""

from __future__ import annotations

import re

import pytest
from tests.doctor_faults import FAULT_TESTS, KINDS, OTHER_TESTS, fault_table
from tests.documents import ROOT

from shoal.health.reasons import FAULTS


def test_the_62_faults_are_numbered_and_of_a_known_kind() -> None:
    assert [row[0] for row in FAULT_TESTS] == [*range(1, 63)]
    assert {row[3] for row in FAULT_TESTS} <= {*KINDS}


def test_every_finding_has_a_test() -> None:
    assert {*FAULTS} == {row[2] for row in FAULT_TESTS} | {*OTHER_TESTS}


@pytest.mark.parametrize("reference", sorted({*OTHER_TESTS.values(), *(row[4] for row in FAULT_TESTS)}))
def test_test_of_a_fault_exists(reference: str) -> None:
    file, _, name = reference.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), reference


def test_saved_table_is_made_from_the_list() -> None:
    saved = (ROOT / "bench/results/doctor.txt").read_text()
    assert saved == "\n".join(fault_table()) + "\n", "run `python -m tests.doctor_faults > bench/results/doctor.txt`"
