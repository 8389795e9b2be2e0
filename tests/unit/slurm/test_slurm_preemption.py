"""A job has the time to save its work that the training library expects, or a finding says so."""

from dataclasses import replace

from slurm_clusters import CLUSTERS
from tests.support.cases import cases

from shoal import contract
from shoal.jobs.model import job_from_options
from shoal.slurm.conf import slurm_conf
from shoal.slurm.parsed_conf import parse_conf
from shoal.slurm.preemption import ContractViolation, contract_violations, partition_findings
from shoal.slurm.state import PartitionState, parse_config


def _settings(name: str = "22.05", **options: str) -> dict[str, str]:
    return dict(parse_conf(slurm_conf(replace(CLUSTERS[name], options=options))).settings)


@cases("name", *CLUSTERS)
def test_rendered_configuration_satisfies_the_contract(name: str) -> None:
    text = slurm_conf(CLUSTERS[name])
    assert contract_violations(parse_conf(text).settings) == []
    partitions = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    assert partitions and all(f" GraceTime={contract.GRACE_S} " in line for line in partitions)


def test_default_signal_is_that_of_the_contract() -> None:
    job = job_from_options({"script": "train.py"})
    assert (job.signal, job.grace) == (contract.WARNING, contract.WARNING_S)
    assert contract.GRACE_S >= contract.WARNING_S, "a preempted job has as long"


def test_user_signal_setting_is_valid_for_every_member() -> None:
    assert "preemptparameters" not in _settings("22.05")
    assert "preemptparameters" not in _settings("23.11+22.05"), "22.05 refuses a key that it does not know"
    assert "preempt_send_user_signal" in _settings("23.11+22.05")["slurmctldparameters"].split(",")
    assert _settings("26.05+24.11")["preemptparameters"] == "send_user_signal"
    assert "preempt_send_user_signal" not in _settings("26.05+24.11")["slurmctldparameters"]


def test_user_parameters_are_appended_to_the_defaults() -> None:
    settings = _settings("26.05", PreemptParameters="youngest_first")
    assert settings["preemptparameters"] == "send_user_signal,youngest_first"
    assert contract_violations(settings) == []


@cases(
    "options, finding",
    (
        {"killwait": "5"},
        "slurm.options.killwait: jobs have less time to save after SIGTERM than they count on, found 5 s, "
        "delete it, or say 30",
    ),
    (
        {"PreemptMode": "CANCEL"},
        "slurm.options.PreemptMode: a preempted job does not save its work and start again, found CANCEL, "
        "delete it, or say REQUEUE",
    ),
    (
        {"PreemptMode": "SUSPEND,GANG"},
        "slurm.options.PreemptMode: a preempted job does not save its work and start again, found SUSPEND,GANG, "
        "delete it, or say REQUEUE",
    ),
    (
        {"JobRequeue": "0"},
        "slurm.options.JobRequeue: a job that loses its node does not start again, found 0, delete it, or say 1",
    ),
)
def test_option_that_breaks_the_contract_is_reported_with_the_fix(options: dict[str, str], finding: str) -> None:
    assert [str(breach.finding(options, "c1")) for breach in contract_violations(_settings(**options))] == [finding]


@cases(
    "options",
    {"KillWait": "300"},
    {"PreemptMode": "REQUEUE,GANG"},
    {"PreemptType": "preempt/none", "PreemptMode": "OFF"},
)
def test_harmless_option_is_not_reported(options: dict[str, str]) -> None:
    assert contract_violations(_settings(**options)) == []


def test_unexplained_setting_is_reported_for_the_controller() -> None:
    config = "KillWait                = 10 sec\nPreemptMode             = REQUEUE\nSlurmctldParameters     = (null)\n"
    told = [str(breach.finding({"MessageTimeout": "5"}, "c1")) for breach in contract_violations(parse_config(config))]
    assert told == [
        "c1: jobs have less time to save after SIGTERM than they count on, found 10 s, run `shoal up`, which sets 30",
        "c1: a preempted job is not warned by the signal it asked for, found no such word, run `shoal up`, "
        "which sets send_user_signal",
    ]


def test_settings_of_slurm_conf_precede_other_files() -> None:
    text = "Configuration data as of 2026-01-01\nKillWait = 30 sec\n\nCgroup Support Configuration:\nKillWait = 1\n"
    assert parse_config(text) == {"killwait": "30 sec"}
    assert contract_violations({}) == [
        ContractViolation(
            "PreemptParameters",
            "a preempted job is not warned by the signal it asked for",
            "no such word",
            "send_user_signal",
        )
    ]


def test_only_preemptable_partitions_need_a_grace() -> None:
    low = PartitionState("low", "UP", nodes="n[1-4]", grace=20, preempt_mode="REQUEUE")
    high = PartitionState("high", "UP", nodes="n[4-5]", priority=10)
    assert [str(finding) for finding in partition_findings([low, high])] == [
        "partitions.low: a preempted job has less time to save than it counts on, found 20 s, "
        "say `grace: 60` or more, and run `shoal up`"
    ]
    assert partition_findings([low, replace(high, nodes="n5")]) == [], "no node in common"
    assert partition_findings([low, replace(high, priority=1)]) == [], "no higher priority"
    assert partition_findings([replace(low, preempt_mode="OFF"), high]) == []
    assert partition_findings([replace(low, grace=60), high]) == []
