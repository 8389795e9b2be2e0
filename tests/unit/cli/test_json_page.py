"""The page on `--json` names every key that every command prints, and no other."""

import json
import re
from dataclasses import fields

import pytest
from tests.documents import ROOT
from tests.support.cases import cases
from tests.unit.cli.test_command_line import ALL
from tests.unit.cli.test_screens import FINISHES, ended

from shoal.cli.rental_commands import cost_json
from shoal.cli.session import Session
from shoal.cloud.providers.api import Offer
from shoal.cloud.service.costs import CostReport
from shoal.containers.images import StoredContainer, StoredImage
from shoal.health.diagnosis import Diagnosis
from shoal.jobs.failure import FailureReason
from shoal.jobs.logs import LogLine
from shoal.jobs.record import JobRecord
from shoal.jobs.tree_files import LeftOut
from shoal.network.links import LinkSpeed
from shoal.plan.model import Change
from shoal.proof.types import ProofResult
from shoal.slurm.state import JobState, NodeState, PartitionState
from shoal.slurm.usage import UsageRow
from shoal.spec.finding import Finding
from shoal.validation.types import MpirunProgram, StepEnvironment, ValidationResult, ValidationRow
from shoal.verbs.cost import CostResult
from shoal.verbs.doctor import DoctorResult, FixOutcome
from shoal.verbs.env import CleanResult, EnvironmentState
from shoal.verbs.env_build import BuildResult
from shoal.verbs.fetch import FetchResult, SkippedFile
from shoal.verbs.images import PushedImage
from shoal.verbs.jobs import CancelResult, JobsResult, JobView
from shoal.verbs.joined_cluster import JoinResult
from shoal.verbs.keys import KeysResult
from shoal.verbs.links import LinksResult
from shoal.verbs.logs import LogsResult
from shoal.verbs.provider_accounts import OffersResult
from shoal.verbs.provider_trial import TryResult
from shoal.verbs.reap import ReapResult
from shoal.verbs.restore import Backup, RestoreResult
from shoal.verbs.simulate import Simulated
from shoal.verbs.submission import SubmittedJob
from shoal.verbs.ui import WebPage
from shoal.verbs.usage import UsageResult
from shoal.verbs.validate import ValidationHistory

PAGE = (ROOT / "docs/json.md").read_text()


def of(kind: type, *more: str) -> set[str]:
    """The keys of a value of this class."""
    return {*(field.name for field in fields(kind)), *more}


COMMANDS = {
    "doctor": of(DoctorResult),
    "join": of(JoinResult),
    "run": of(SubmittedJob),
    "logs": of(LogsResult),
    "fetch": of(FetchResult),
    "jobs": of(JobsResult),
    "cancel": of(CancelResult),
    "prove": of(ProofResult, "passed"),
    "usage": of(UsageResult),
    "restore": of(RestoreResult),
    "keys rotate": of(KeysResult),
    "offers": of(OffersResult),
    "cost": set(cost_json(CostResult("reef", CostReport(0, "2026-11", 0, 0, 0, 0)))),
    "try": of(TryResult),
    "reap": of(ReapResult),
    "bench links": of(LinksResult, "whole"),
    "validate": of(ValidationResult, "passed", "complete") | of(ValidationHistory),
    "env build": of(BuildResult),
    "env remove": of(CleanResult),
    "env clean": of(CleanResult),
    "image pull": of(StoredImage),
    "image build": of(StoredImage),
    "image save": of(StoredImage),
    "image push": of(PushedImage),
    "ui": of(WebPage),
    "simulate": of(Simulated),
}
"""What commands print whose object is a value of a class; those of the others are printed below."""
PARTS = {
    "`findings`": of(Finding),
    "`findings` of `doctor`": of(Diagnosis),
    "`fixes` and `history` of `doctor`": of(FixOutcome),
    "`changes` of `plan`": of(Change),
    "`nodes` of `status`": of(NodeState),
    "`partitions` of `status`": of(PartitionState),
    "`jobs` of `status`": of(JobState),
    "`jobs` of `jobs`": of(JobView),
    "`record`": of(JobRecord),
    "`reason` beside a `record`": of(FailureReason),
    "`left_out` of `run`": of(LeftOut),
    "`lines` of `logs`": of(LogLine),
    "`skipped` of `fetch`": of(SkippedFile),
    "`rows` and `total` of `usage`": of(UsageRow),
    "`backups` of `restore`": of(Backup),
    "`offers` of `offers`": of(Offer),
    "`links` of `bench links`": of(LinkSpeed),
    "`rows` of `validate`": of(ValidationRow),
    "`mpiruns` of `validate`": of(MpirunProgram),
    "`environments` of `validate`": of(StepEnvironment),
    "`environments` of `env list`": of(EnvironmentState),
    "`images` of `image list`": of(StoredImage),
    "`containers` of `image list`": of(StoredContainer),
}


def told(first: str) -> set[str]:
    """The keys that a row of the page names."""
    [keys] = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", keys))


def test_every_command_has_a_row() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.split("## Keys of inner objects")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named - {"run --dry-run", "run --now --dry-run"} == {" ".join(words) for words in ALL} - {"schema"}


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
