"""The faults that `shoal doctor` is measured by, made on a cluster: found, with the right cause, fixed, and idle again.

    scripts/test -m matrix tests/matrix/test_doctor_faults.py -s
    SHOAL_SAVE_TABLE=1 ...      also writes bench/results/doctor.txt
    SHOAL_TEST_IMAGE=debian13 ...   with Slurm 24.11, or sid, with 26.05; bench/results/doctor-24.11.txt
    SHOAL_TEST_KIND=vm ... -k clock     the fault that needs virtual machines

The tests share the cluster. Each leaves it healthy; after one that failed it is brought up again.
"""

import os
import time
from collections.abc import Iterator

import pytest
from tests import nvml
from tests.doctor_faults import FIRST_RELEASE, Outcome, fault_table, saved_outcomes
from tests.documents import ROOT
from tests.e2e.cluster import IMAGE, KIND, Cluster, login_keys, running, taken_down
from tests.matrix.doctor_cases import CASES, CLOCK_CASE, RETURN, RETURN_DEVICE, cancel_jobs
from tests.matrix.doctor_scene import HANG_EPILOG, SCRIPT, SPEC, THAW, VM_SPEC, Case, Scene, await_health, play

COVERS = "health verbs/doctor verbs/doctor_fixes remote/node_health roles/node_health"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]


RELEASE = {"debian13": "24.11", "sid": "26.05"}.get(IMAGE, FIRST_RELEASE)
TABLE = ROOT / f"bench/results/doctor{'' if RELEASE == FIRST_RELEASE else f'-{RELEASE}'}.txt"
FRESH: set[int] = set()
"""The faults that this run has made."""


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[int, Outcome]]:
    """What was seen of each fault; the table is printed at the end, and saved if asked for.

    Faults that this run does not make keep their row.
    """
    seen = saved_outcomes(TABLE.read_text()) if os.environ.get("SHOAL_SAVE_TABLE") and TABLE.exists() else {}
    yield seen
    table = "\n".join(fault_table(seen, RELEASE)) + "\n"
    print("\n" + table)
    if os.environ.get("SHOAL_SAVE_TABLE"):
        TABLE.write_text(table)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, outcomes: dict[int, Outcome]) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("faults")
    (place / "prolog.sh").write_text(SCRIPT.format("prolog"))
    (place / "epilog.sh").write_text(SCRIPT.format("epilog") + HANG_EPILOG)
    with login_keys("alice") as keys:
        cluster = Cluster(place, SPEC.replace("KEYS", str(keys)))
        with taken_down(cluster):
            assert cluster.json("up")["whole"]
            made = Scene(cluster, nvml.build(place))
            made.age_node()
            await_health(made)
            yield made


def restore(scene: Scene) -> None:
    clean = f"{THAW}; umount -l /var/tmp /var/lib/slurm/slurmd; rm -f /run/fail-* /run/hang-epilog"
    for name in ("fish1", "fish2"):
        scene.sh(name, f"{clean}; pkill -9 slurmstepd; pkill -x -f 'sleep 600'; systemctl restart munge", check=False)
    scene.sh("fish1", f"! mountpoint -q /run/lost1 || {{ {RETURN_DEVICE}; }}")
    cancel_jobs(scene)
    scene.cluster.file.write_text(scene.cluster.file.read_text().replace(*reversed(RETURN)))
    scene.cluster.json("up", status=None)
    scene.sh("controller", "systemctl restart slurmctld")
    for name in ("fish1", "fish2"):
        scene.sh(name, "systemctl reset-failed slurmd; systemctl restart slurmd", check=False)
    scene.check_node(runs=2)
    scene.wait("slurmctld answers", lambda: "fish1" in scene.node("fish1") or True)
    scene.sh("controller", "sleep 5; scontrol update nodename=fish1,fish2 state=resume", check=False)
    await_health(scene)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_is_found_with_its_cause_and_fixed(scene: Scene, outcomes: dict[int, Outcome], case: Case) -> None:
    seen = {fault.number: Outcome(fault.how) for fault in case.faults}
    try:
        play(scene, case, seen)
    except Exception as error:
        print(f"{case.name}: {error}", flush=True)  # pytest shows it at the end of all
        restore(scene)
        raise
    finally:
        # Of a fault that is made in two ways, one that fails is shown.
        failed = {number for number in seen if number in FRESH and outcomes[number].idle != "yes"}
        outcomes |= {number: row for number, row in seen.items() if number not in failed}
        FRESH.update(seen)
        print(f"{time.strftime('%H:%M:%S')} {case.name}: {seen}", flush=True)


@pytest.mark.timeout(7200)
@pytest.mark.skipif(KIND != "vm", reason="by hand, with SHOAL_TEST_KIND=vm: it takes long under emulation")
def test_clock_set_wrong_is_found_and_corrected(
    tmp_path_factory: pytest.TempPathFactory, outcomes: dict[int, Outcome]
) -> None:
    seen = {fault.number: Outcome(fault.how) for fault in CLOCK_CASE.faults}
    with running(tmp_path_factory.mktemp("clock"), VM_SPEC) as cluster:
        scene = Scene(cluster, nodes=("fish1",))
        await_health(scene)
        try:
            play(scene, CLOCK_CASE, seen)
        finally:
            outcomes |= seen
