"""What `check` finds on a running cluster, from facts alone."""

from shoal.agent.client import ItemResult, Report
from shoal.agent.facts import Disk, Facts, Space
from shoal.plan.cluster_findings import (
    drained_findings,
    edited_findings,
    image_version,
    member_version_findings,
    space_findings,
    state_finding,
)
from shoal.plan.nodes import LEAVING_REASON
from shoal.slurm.conf import LOG_DIRECTORY, STATE_DIRECTORY
from shoal.slurm.state import NodeState
from shoal.slurm.versions import Version
from shoal.spec.members import default_spec


def test_drained_nodes_are_named_with_their_reason() -> None:
    nodes = [
        NodeState("n1", ("IDLE", "DRAIN"), "bad fan", "root", "2026-01-01T00:00:00"),
        NodeState("n2", ("ALLOCATED", "DRAIN"), "bad fan", "root", "2026-01-01T00:00:00"),
        NodeState("n3", ("IDLE", "DRAIN"), LEAVING_REASON),
        NodeState("n4", ("DOWN", "DRAIN"), "gone"),
        NodeState("n5", ("IDLE",)),
        NodeState("n6", ("IDLE", "DRAIN")),
    ]
    assert [str(finding) for finding in drained_findings(nodes)] == [
        "n[1-2]: is drained and takes no jobs, found bad fan (by root 2026-01-01T00:00:00), when that is solved, run "
        "`shoal node resume n[1-2]`",
        "n6: is drained and takes no jobs, found no reason, when that is solved, run `shoal node resume n6`",
    ]


def test_full_and_read_only_file_systems_of_slurm_are_errors() -> None:
    facts = Facts(
        disks=(Disk("/", 20_000, 300), Disk("/home", 20_000, 1)),
        spaces={
            STATE_DIRECTORY: Space("/var/lib/slurm", 5_000, "its file system is read-only"),
            LOG_DIRECTORY: Space("/", 300),
        },
    )
    assert [str(finding) for finding in space_findings({"c1": facts})] == [
        "c1: little space on /, found 300 MB, free at least 1 GB",
        f"c1: Slurm cannot write {STATE_DIRECTORY}, found its file system is read-only, make room, or make it writable",
    ]
    finding = state_finding("c1", facts)
    assert finding and finding.found == "its file system is read-only"
    assert state_finding("c1", Facts(spaces={STATE_DIRECTORY: Space("/", 40)})) is None


def test_edited_files_are_named() -> None:
    items = (ItemResult("file /etc/slurm/slurm.conf", "change", edited=True), ItemResult("file /etc/x", "change"))
    [finding] = edited_findings({"c1": Report(items, 2, 0)})
    assert (finding.level, finding.host) == ("warning", "c1")
    assert finding.what.startswith("/etc/slurm/slurm.conf was edited by hand; `shoal up` replaces it, and keeps a copy")


def test_images_tell_the_version_of_slurm() -> None:
    assert image_version("debian12") == Version(22, 5, 8) and image_version("sid") == Version(26, 5, 5)
    assert image_version("plan9") is None


def test_members_that_cannot_talk_to_the_controller_are_errors() -> None:
    versions = {"controller": Version(22, 5, 8), "fish1": Version(24, 11, 5), "fish2": Version(22, 5, 8)}
    [finding] = member_version_findings(default_spec(), versions)
    assert (finding.host, finding.what) == ("fish1", "Slurm newer than the controller's")
    assert member_version_findings(default_spec(), {"fish1": Version(24, 11, 5)}) == []
