"""A real slurmctld and slurmd start on the rendered text and run a job, in namespaces that leave nothing behind.

22.05 is part of the normal run; 24.11 and 26.05 are with `-m matrix`, as their images take a while to make.
"""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import real_slurm
from slurm_clusters import ALIKE, CLUSTERS, CONTROLLER, files

from shoal.contract import GRACE_S
from shoal.jobs import record
from shoal.slurm.model import ClusterConf, PartitionConf, Switch
from shoal.slurm.preemption import contract_violations
from shoal.slurm.state import JOBCOMP, parse_config, parse_partitions

TWO_SITES = replace(
    CLUSTERS["22.05"],
    nodes=(CONTROLLER, *ALIKE[:4]),
    partitions=(PartitionConf("main", ("n1", "gpu01", "gpu02"), default=True),),
    switches=(Switch("a", ("n1", "gpu01")), Switch("b", ("gpu02", "gpu03", "gpu04"))),
)

CASES = [
    pytest.param("22.05", CLUSTERS["22.05"], id="22.05", marks=pytest.mark.sandbox),
    pytest.param("22.05", CLUSTERS["23.11+22.05"], id="23.11+22.05 on 22.05", marks=pytest.mark.sandbox),
    pytest.param("22.05", TWO_SITES, id="two sites on 22.05", marks=pytest.mark.sandbox),
    pytest.param("24.11", CLUSTERS["24.11"], id="24.11", marks=pytest.mark.matrix),
    pytest.param("24.11", CLUSTERS["26.05+24.11"], id="26.05+24.11 on 24.11", marks=pytest.mark.matrix),
    pytest.param("26.05", CLUSTERS["26.05"], id="26.05", marks=pytest.mark.matrix),
    pytest.param("22.05", CLUSTERS["22.05 rented"], id="rented on 22.05", marks=pytest.mark.sandbox),
    pytest.param("26.05", CLUSTERS["26.05 rented"], id="rented on 26.05", marks=pytest.mark.matrix),
    pytest.param("26.05", CLUSTERS["26.05+24.11"], id="26.05+24.11 on 26.05", marks=pytest.mark.matrix),
]

# The two complaints that are left out are about Debian's own defaults, not about our text.
SCRIPT = """
srun -w n1 --gres=gpu:2 sh -c 'echo "gpus $CUDA_VISIBLE_DEVICES"'
scontrol reconfigure
until srun -w n1 true; do sleep 0.2; done
until sinfo -h -n n1 -o %T | grep -qx idle; do sleep 0.1; done
grep -hiE "(error|fatal): .*(pars|invalid|unrecognized|ignor|deprecat|unknown|obsolete|gres)" /var/log/slurm/*.log |
    grep -vE "MailProg|plugstack" || echo "no complaint"
"""


BROKEN = {"KillWait": "5", "PreemptMode": "CANCEL", "JobRequeue": "0"}


@pytest.mark.parametrize(
    ("release", "name"),
    [
        pytest.param("22.05", "22.05", marks=pytest.mark.sandbox),
        pytest.param("24.11", "24.11", marks=pytest.mark.matrix),
        pytest.param("26.05", "26.05", marks=pytest.mark.matrix),
    ],
)
def test_contract_is_read_from_the_active_slurm_configuration(release: str, name: str, tmp_path: Path) -> None:
    if lack := real_slurm.missing():
        pytest.skip(lack)
    script = "scontrol show config; scontrol -o show partition"
    kept, broken = (
        real_slurm.run(release, files(replace(CLUSTERS[name], options=options)), script, tmp_path, slurmd=False)
        for options in ({}, BROKEN)
    )
    assert contract_violations(parse_config(kept.stdout)) == [], kept.stderr
    assert {breach.key for breach in contract_violations(parse_config(broken.stdout))} == set(BROKEN)
    assert {partition.grace for partition in parse_partitions(kept.stdout)} == {GRACE_S}
    assert {partition.preempt_mode for partition in parse_partitions(kept.stdout)} == {"REQUEUE"}


@pytest.mark.parametrize(("release", "cluster"), CASES)
def test_slurm_accepts_the_configuration_and_runs_a_job(release: str, cluster: ClusterConf, tmp_path: Path) -> None:
    if lack := real_slurm.missing():
        pytest.skip(lack)
    done = real_slurm.run(release, files(cluster), SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["gpus 0,1", "no complaint"], done.stderr


POWER_SAVING = """
sinfo -h -N -p cloud -o '%N %T'
job=$(sbatch --parsable -p cloud -N2 --gres=gpu:a10:1 -o /dev/null --wrap true)
until grep -q resume /tmp/asked; do sleep 0.2; done
cat /tmp/asked
sinfo -h -N -n cloud1 -p cloud -o '%N %T'
scontrol update nodename=cloud[1-2] state=down reason="shoal: none to be had"
scontrol update nodename=cloud[1-2] state=power_down_force
until grep -q suspend /tmp/asked; do sleep 0.2; done
tail -n 1 /tmp/asked
squeue -h -j "$job" -o %T
"""


@pytest.mark.parametrize(
    ("release", "name"),
    [
        pytest.param("22.05", "22.05 rented", marks=pytest.mark.sandbox),
        pytest.param("26.05", "26.05 rented", marks=pytest.mark.matrix),
    ],
)
def test_slurm_resumes_rented_nodes_at_once_and_suspends_them(release: str, name: str, tmp_path: Path) -> None:
    if lack := real_slurm.missing():
        pytest.skip(lack)
    done = real_slurm.run(release, files(CLUSTERS[name]), POWER_SAVING, tmp_path)
    assert done.stdout.splitlines() == [
        *(f"cloud{number} idle~" for number in range(1, 5)),
        "resume cloud[1-2]",
        "cloud1 allocated#",
        "suspend cloud[1-2]",
        "PENDING",
    ], done.stderr


SUBMIT = "--parsable --hold --chdir=/tmp --wrap true"
PART = "=====part====="
FORGED = """
other="setpriv --reuid=65534 --regid=65534 --clear-groups"
first=$(sbatch SUBMIT -J first)
record="UserId=root(0) GroupId=root(0) JobState=FAILED"
$other sbatch SUBMIT --array=1-2 -J "$(printf "x $record\\nJobId=%s JobName=a $record\\nJobId=99 JobName=b" $first)" >&2
$other sbatch SUBMIT --comment "$(printf "\\nJobId=98 JobName=c $record ")" -J "d $record" >&2
scontrol -o show job
echo PART
OWNERS
for job in 1 2 3; do echo PART; scontrol -o show job $job; done
$other scancel 3
$other scancel 2
scancel 1
echo PART
cat JOBCOMP
""".replace("SUBMIT", SUBMIT).replace("PART", PART)


@pytest.mark.parametrize(
    "release",
    [
        pytest.param("22.05", marks=pytest.mark.sandbox),
        pytest.param("24.11", marks=pytest.mark.matrix),
        pytest.param("26.05", marks=pytest.mark.matrix),
    ],
)
def test_no_name_or_comment_of_a_job_is_a_record_of_another(release: str, tmp_path: Path) -> None:
    if lack := real_slurm.missing():
        pytest.skip(lack)
    owners_line = shlex.join(record.OWNERS_COMMAND)
    script = FORGED.replace("OWNERS", owners_line).replace("JOBCOMP", JOBCOMP)
    done = real_slurm.run(release, files(CLUSTERS[release]), script, tmp_path, slurmd=False)
    shown, owner_text, *answers, ended = done.stdout.split(f"{PART}\n")
    owners = record.parse_owners(owner_text)
    assert owners == {"1": "0", "2": "65534", "3": "65534"}, done.stderr
    assert record.doubtful_ids(shown, owners) == ["2", "1"]
    found = record.combine_records(shown, owners, dict(zip("12", answers, strict=False)))
    jobs = {job.id: (job.user, job.state) for job in found}
    assert jobs == {"1": ("root", "PENDING"), "2_1-2": ("nobody", "PENDING"), "3": ("nobody", "PENDING")}
    past = record.parse_jobcomp(ended)  # in the order of their ends, which a second may divide
    assert sorted((job.number, job.user) for job in past) == [("1", "root"), ("2", "nobody"), ("3", "nobody")], ended
