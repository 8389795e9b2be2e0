"""The page on `--json` names every key that every command prints, and no other."""

import json
import re
from dataclasses import fields
from pkgutil import resolve_name

import pytest
from tests.documents import ROOT
from tests.support.cases import cases
from tests.unit.cli.test_command_line import ALL
from tests.unit.cli.test_screens import FINISHES, ended

from shoal.cli.rental_commands import cost_json
from shoal.cli.session import Session
from shoal.cloud.service.costs import CostReport
from shoal.verbs.cost import CostResult

PAGE = (ROOT / "docs/json.md").read_text()


def of(place: str, *more: str) -> set[str]:
    """The keys of a value of the class that is there, by its module below `shoal` and its name."""
    return {*(field.name for field in fields(resolve_name(f"shoal.{place}"))), *more}


COMMANDS = {
    "doctor": of("verbs.doctor:DoctorResult"),
    "join": of("verbs.joined_cluster:JoinResult"),
    "run": of("verbs.submission:SubmittedJob"),
    "logs": of("verbs.logs:LogsResult"),
    "fetch": of("verbs.fetch:FetchResult"),
    "jobs": of("verbs.jobs:JobsResult"),
    "cancel": of("verbs.jobs:CancelResult"),
    "prove": of("proof.types:ProofResult", "passed"),
    "usage": of("verbs.usage:UsageResult"),
    "restore": of("verbs.restore:RestoreResult"),
    "keys rotate": of("verbs.keys:KeysResult"),
    "offers": of("verbs.provider_accounts:OffersResult"),
    "cost": set(cost_json(CostResult("reef", CostReport(0, "2026-11", 0, 0, 0, 0)))),
    "try": of("verbs.provider_trial:TryResult"),
    "reap": of("verbs.reap:ReapResult"),
    "bench links": of("verbs.links:LinksResult", "whole"),
    "validate": of("validation.types:ValidationResult", "passed", "complete") | of("verbs.validate:ValidationHistory"),
    "env build": of("verbs.env_build:BuildResult"),
    "env remove": of("verbs.env:CleanResult"),
    "env clean": of("verbs.env:CleanResult"),
    "image pull": of("containers.images:StoredImage"),
    "image build": of("containers.images:StoredImage"),
    "image save": of("containers.images:StoredImage"),
    "image push": of("verbs.images:PushedImage"),
    "ui": of("verbs.ui:WebPage"),
    "simulate": of("verbs.simulate:Simulated"),
}
"""What commands print whose object is a value of a class; those of the others are printed below."""
PARTS = {
    "`findings`": of("spec.finding:Finding"),
    "`findings` of `doctor`": of("health.diagnosis:Diagnosis"),
    "`fixes` and `history` of `doctor`": of("verbs.doctor:FixOutcome"),
    "`changes` of `plan`": of("plan.model:Change"),
    "`nodes` of `status`": of("slurm.state:NodeState"),
    "`partitions` of `status`": of("slurm.state:PartitionState"),
    "`jobs` of `status`": of("slurm.state:JobState"),
    "`jobs` of `jobs`": of("verbs.jobs:JobView"),
    "`record`": of("jobs.record:JobRecord"),
    "`reason` beside a `record`": of("jobs.failure:FailureReason"),
    "`left_out` of `run`": of("jobs.tree_files:LeftOut"),
    "`lines` of `logs`": of("jobs.logs:LogLine"),
    "`skipped` of `fetch`": of("verbs.fetch:SkippedFile"),
    "`rows` and `total` of `usage`": of("slurm.usage:UsageRow"),
    "`backups` of `restore`": of("verbs.restore:Backup"),
    "`offers` of `offers`": of("cloud.providers.api:Offer"),
    "`links` of `bench links`": of("network.links:LinkSpeed"),
    "`rows` of `validate`": of("validation.types:ValidationRow"),
    "`mpiruns` of `validate`": of("validation.types:MpirunProgram"),
    "`environments` of `validate`": of("validation.types:StepEnvironment"),
    "`environments` of `env list`": of("verbs.env:EnvironmentState"),
    "`images` of `image list`": of("containers.images:StoredImage"),
    "`containers` of `image list`": of("containers.images:StoredContainer"),
}


def told(first: str) -> set[str]:
    """The keys that a row of the page names."""
    [keys] = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", keys))


def test_every_command_has_a_row() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.split("## Keys of inner objects")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named - {"run --dry-run"} == {" ".join(words) for words in ALL} - {"schema"}


@cases("command", *COMMANDS)
def test_row_names_the_keys_of_its_command(command: str) -> None:
    assert told(f"`{command}`") == COMMANDS[command]


@cases("command", "check", "plan", "up", "down", "status", "exec")
def test_row_names_the_printed_keys(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended(Session(json=True), FINISHES[command][0])
    printed = json.loads(capsys.readouterr().out)
    assert told("`up`, `node remove`" if command == "up" else f"`{command}`") == set(printed)
    if command == "exec":
        assert told("`groups` of `exec`") == set(printed["groups"][0])


@cases("part", *PARTS)
def test_row_names_the_keys_of_a_part(part: str) -> None:
    assert told(part) == PARTS[part]
