"""Options of slurm.conf, of a partition and of a QOS: what the file may say, and what Slurm gets."""

import json
from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.unit.slurm.slurm_clusters import CLUSTERS

from shoal.errors import SpecError
from shoal.slurm.accounting import accounts_file
from shoal.slurm.conf import gres_conf, slurm_conf, slurm_settings
from shoal.slurm.model import PartitionConf
from shoal.slurm.parsed_conf import nodes_in_conf, parse_conf
from shoal.spec.finding import Finding
from shoal.spec.loader import load_text, load_text_all
from shoal.spec.members import partitions

BASE = """\
cluster: reef
controller: {host: c1, compute: true}
nodesets: {lab: {hosts: [n1]}, fish: {hosts: [n2]}}
"""
ACCOUNTS = "accounting: {accounts: {bio: {users: [ann]}}, qos: {night: {OPTIONS}}}\n"


def findings(text: str) -> list[Finding]:
    with pytest.raises(SpecError) as caught:
        load_text(text, "shoal.yaml")
    return [finding for finding in caught.value.findings if isinstance(finding, Finding)]


def partition(options: str) -> str:
    return f"partitions: {{main: {{nodesets: ALL, options: {{{options}}}}}}}\n"


def qos(options: str) -> str:
    return ACCOUNTS.replace("OPTIONS", f"options: {{{options}}}")


def test_all_stands_for_every_nodeset_and_the_controller() -> None:
    for word in ("ALL", "all", "[ALL]"):
        spec = load_text(BASE + f"partitions: {{main: {{nodesets: {word}}}}}\n", "s.yaml")
        assert partitions(spec)["main"].nodesets == ("lab", "fish", "controller")
        again = type(spec).model_validate(json.loads(spec.model_dump_json(exclude_defaults=True)))
        assert partitions(again) == partitions(spec)


@cases(
    "text, path, what, fix",
    (partition("MaxTime: 60"), "partitions.main.options.MaxTime", "writes this key", "use `max_time`"),
    (partition("nodes: n1"), "partitions.main.options.nodes", "writes this key", "use `nodesets`"),
    (partition("Priority: 3"), "partitions.main.options.Priority", "writes this key", "use `priority`"),
    (partition("LLN: true"), "partitions.main.options.LLN", "not a value of Slurm's", "YES or NO"),
    (partition("QOS: night"), "partitions.main.options.QOS", "QOS without `accounting`", "add `accounting`"),
    (partition("LLN: YES, lln: NO"), "partitions.main.options.lln", "duplicate key", "`LLN` is the same key"),
    (
        partition("AllowAccounts: boi") + qos(""),
        "partitions.main.options.AllowAccounts",
        "unknown account",
        "did you mean `bio`?",
    ),
    (
        "partitions: {main: {nodesets: ALL, preemptable: false, options: {PreemptMode: CANCEL}}}\n",
        "partitions.main.options.PreemptMode",
        "`preemptable: false` writes this key",
        "delete one",
    ),
    (qos("MaxWall: 60"), "accounting.qos.night.options.MaxWall", "writes this key", "use `max_time`"),
    (qos("UsageFaktor: 2"), "accounting.qos.night.options.UsageFaktor", "not an option", "`UsageFactor`?"),
    (qos("UsageFactor: half"), "accounting.qos.night.options.UsageFactor", "not a value", "such as 0.5"),
    (qos('GrpTRES: "cpu=4"'), "accounting.qos.night.options.GrpTRES", "has a field", "use `group_cpus`"),
    (qos("Preempt: nigth"), "accounting.qos.night.options.Preempt", "unknown QOS", "did you mean `night`?"),
    (qos("GrpWall: soon"), "accounting.qos.night.options.GrpWall", "not a value", "write minutes"),
    ("slurm: {options: {GresTypes: shard}}\n", "slurm.options.GresTypes", "writes this key", "use `shards`"),
    ("slurm: {options: {TaskPlugin: task/none}}\n", "slurm.options.TaskPlugin", "confinement", "delete it"),
    ('slurm: {options: {MailProg: "a # b"}}\n', "slurm.options.MailProg", "not a value", "without quotes"),
)
def test_option_that_shoal_sets_or_slurm_rejects_is_an_error_with_its_place(
    text: str, path: str, what: str, fix: str
) -> None:
    [finding] = [finding for finding in findings(BASE + text) if finding.level == "error"]
    assert (finding.path, finding.level) == (path, "error")
    assert what in finding.what and fix in finding.fix, str(finding)


def test_both_ways_to_divide_a_gpu_are_rejected() -> None:
    [finding] = findings(BASE.replace("[n1]", "[n1], shards: 4, mps: 100"))
    assert finding.path == "nodesets.lab.mps" and "both `shards` and `mps`" in finding.what


def test_preempt_of_a_qos_needs_its_plugin() -> None:
    text = BASE + qos("Preempt: normal")
    [warning] = load_text_all(text, "s.yaml")[1]
    assert (warning.level, warning.path) == ("warning", "accounting.qos.night.options.Preempt")
    assert load_text_all(text + "slurm: {options: {PreemptType: preempt/qos}}\n", "s.yaml")[1] == []


CONF = CLUSTERS["22.05"]


def setting(key: str, **options: str) -> str:
    text = slurm_settings(replace(CONF, options=options))
    return next(line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}="))


def test_lists_are_merged_word_by_word() -> None:
    merged = setting("SchedulerParameters", SchedulerParameters="defer,bf_interval=60")
    assert merged == "batch_sched_delay=0,defer,bf_interval=60"
    assert setting("SchedulerParameters", schedulerparameters="batch_sched_delay=3") == "batch_sched_delay=3"
    tracked = replace(CONF, confinement=replace(CONF.confinement, tracked=True, cores=True))
    text = slurm_settings(replace(tracked, options={"PrologFlags": "X11", "TaskPlugin": "task/affinity"}))
    assert "PrologFlags=Contain,X11\n" in text and "TaskPlugin=task/cgroup,task/affinity\n" in text
    assert setting("X11Parameters", X11Parameters="home_xauthority") == "home_xauthority"


def test_value_with_blanks_is_quoted_and_nothing_leaves_the_quotes() -> None:
    assert setting("MailProg", MailProg="/usr/bin/mail -s jobs") == '"/usr/bin/mail -s jobs"'
    line = PartitionConf("main", ("n1",), options={"CpuBind": "x Nodes=evil", "State": "DRAIN", "DefMemPerNode": "100"})
    text = slurm_conf(replace(CONF, partitions=(line,)))
    parsed = parse_conf(text)
    assert parsed.partitions_of_nodes() == {"n1": ("main",)}
    assert "State=DRAIN" in text and "State=UP" not in text and "DefMemPerCPU" not in parsed.partitions[0]
    for bad in ('a"b', "a\nb", " a", "a ", "a#b", "a\\b"):
        with pytest.raises(ValueError):
            slurm_conf(replace(CONF, partitions=(replace(line, options={"CpuBind": bad}),)))


def test_shards_and_mps_are_in_both_files_and_survive_reading_back() -> None:
    with_gpus = [node for node in CONF.nodes if node.gpus]
    nodes = tuple(replace(node, shards=4 * len(node.gpus)) if node.gpus else node for node in CONF.nodes)
    conf = replace(CONF, nodes=nodes)
    text, gres = slurm_conf(conf), gres_conf(conf)
    assert "GresTypes=gpu,shard\n" in text
    count = 4 * len(with_gpus[0].gpus)
    assert f",shard:{count} " in text and f"Name=shard Count={count}\n" in gres
    assert {node.name: node.shards for node in nodes_in_conf(text, gres).values()} == {
        node.name: node.shards for node in nodes
    }
    mps = replace(CONF, nodes=tuple(replace(node, mps=100) for node in CONF.nodes))
    assert "GresTypes=gpu,mps\n" in slurm_conf(mps) and "Name=mps Count=100\n" in gres_conf(mps)


def test_options_of_a_qos_reach_the_accounts_file_in_the_words_of_sacctmgr() -> None:
    options = 'flags: DenyOnLimit, UsageFactor: 0.5, GrpWall: 90, MaxTRESPerUser: "cpu=8,mem=4G"'
    spec = load_text(BASE + qos(options), "s")
    assert spec.accounting is not None
    assert json.loads(accounts_file("reef", spec.accounting))["qos_options"]["night"] == {
        **{"Flags": "DenyOnLimit", "UsageFactor": "0.5", "GrpWall": "0-01:30:00"},
        "MaxTRESPerUser": {"cpu": "8", "mem": "4G"},
    }
