"""Which Slurm a host has, that its cluster keeps it, and what the next one can read."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_world import spec_of
from tests.unit.roles.test_slurm_tree_role import ADDRESSES, PREFIX, TEXT, facts_of, put_wheel

from shoal.agent.document import Command, Document
from shoal.agent.facts import Facts, FileFact, Package
from shoal.remote import program_text, shell_command
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster
from shoal.roles.current_conf import read_current_conf
from shoal.roles.documents import documents
from shoal.roles.host_record import HOST_RECORD, STATE_OWNER
from shoal.roles.slurm_source import RELEASES, TABLES, installed_slurm, other_slurm, records_finding, unreadable
from shoal.roles.slurm_tree import daemon_unit
from shoal.verbs.rebuild import has_other_slurm

PACKAGES = TEXT.replace("slurm: {from: shoal}\n", "")
UNIT = "/etc/systemd/system/{}.service"
OURS = {
    UNIT.format(name): FileFact(text=daemon_unit(name, f"{PREFIX}/sbin/{name}"))
    for name in ("slurmctld", "slurmdbd", "slurmd", "sackd")
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    put_wheel(tmp_path)
    return tmp_path


def packaged(facts: Facts, version: str, *daemons: str, active: bool = True) -> Facts:
    """The host with Slurm of its distribution."""
    files = {**facts.files, **{f"/usr/sbin/{name}": FileFact(there=True) for name in daemons}}
    services = {**facts.services, **dict.fromkeys(daemons, "active" if active else "inactive")}
    packages = {name: Package(version, version) for name in (*daemons, "slurm-client")}
    return replace(facts, files=files, services=services, packages={**facts.packages, **packages})


def cluster(text: str, facts: dict[str, Facts], **options: bool) -> Cluster:
    return assemble(spec_of(text), facts, ADDRESSES, read_current_conf(facts["c1"]), **options)


def items_of(of: Cluster, name: str) -> Document:
    member = next(member for member in of.members if member.name == name)
    return tuple(item for document in documents(of, member).values() for item in document)


def keys(items: Document) -> list[str]:
    return [item.key for item in items]


def test_slurm_that_runs_and_is_not_of_shoal_is_named_with_the_fix() -> None:
    foreign = packaged(facts_of("n1"), "24.11.5-4", "slurmd")
    what, fix = other_slurm(spec_of(TEXT), {"n1": foreign})["n1"]
    assert what == "has another Slurm that runs (slurmd)"
    assert "systemctl disable --now slurmd" in fix and "delete `from: shoal`" in fix
    stopped = packaged(facts_of("n1"), "24.11.5-4", "slurmd", active=False)
    assert other_slurm(spec_of(TEXT), {"n1": stopped}) == {}
    member = replace(foreign, files={**foreign.files, HOST_RECORD: FileFact(text="{}")})
    assert other_slurm(spec_of(TEXT), {"n1": member}) == {}  # of a cluster of Shoal's
    own_build = replace(facts_of("n1"), services={"slurmd": "active"})
    assert "n1" in other_slurm(spec_of(TEXT), {"n1": own_build})
    container = replace(own_build, init="none")
    assert other_slurm(spec_of(TEXT), {"n1": container}) == {}  # it has no units
    assert other_slurm(spec_of(PACKAGES), {"n1": foreign}) == {}


def test_version_is_that_of_the_unit_or_of_the_package() -> None:
    ours = installed_slurm(facts_of("n1", **OURS))
    assert (ours.ours, str(ours.version)) == (True, "24.11.5")
    theirs = installed_slurm(packaged(facts_of("n1"), "22.05.8-4+deb12u3", "slurmd"))
    assert (theirs.ours, str(theirs.version), theirs.daemons) == (False, "22.05.8", ("slurmd",))
    assert installed_slurm(facts_of("n1")).version is None


def test_daemons_of_the_distribution_without_a_task_are_masked() -> None:
    facts = {name: facts_of(name) for name in ADDRESSES}
    facts["n1"] = packaged(facts["n1"], "24.11.5-4", "slurmctld", "slurmd", active=False)
    assert "command mask the distribution's slurmctld" in keys(items_of(cluster(TEXT, facts), "n1"))
    assert not [key for key in keys(items_of(cluster(TEXT, facts), "c1")) if "mask" in key]


RECORD = {HOST_RECORD: FileFact(text='{"cluster": "reef", "controller": "c1"}')}


def test_source_is_that_of_a_host_of_the_cluster_with_systemd() -> None:
    packages = packaged(facts_of("n1", **RECORD), "24.11.5-4", "slurmd")
    tree = facts_of("n1", PACKAGES, **RECORD, **OURS)
    assert has_other_slurm(spec_of(TEXT), packages) and has_other_slurm(spec_of(PACKAGES), tree)
    assert not has_other_slurm(spec_of(PACKAGES), packages) and not has_other_slurm(spec_of(TEXT), tree)
    assert not has_other_slurm(spec_of(TEXT.replace("cluster: reef", "cluster: atoll")), packages)
    assert not has_other_slurm(spec_of(TEXT), packaged(facts_of("n1"), "24.11.5-4", "slurmd"))  # `down` released it
    assert not has_other_slurm(spec_of(TEXT), replace(packages, init="none"))


def controller_with(old: str, text: str = TEXT, **files: FileFact) -> dict[str, Facts]:
    facts = {name: facts_of(name, text) for name in ADDRESSES}
    state = {STATE_OWNER: FileFact(text="reef"), TABLES: FileFact(there=True), **files}
    facts["c1"] = packaged(facts_of("c1", text, **state), old, "slurmctld", "slurmdbd")
    return facts


def test_records_that_the_new_slurm_cannot_read_are_kept_beside() -> None:
    old = cluster(TEXT, controller_with("22.05.8-4+deb12u3"))
    finding = records_finding(old, "c1")
    assert finding is not None and "Slurm 24.11.5 cannot read what Slurm 22.05.8 wrote" in finding.what
    assert "--leave-records" in finding.fix
    items = [item for item in items_of(old, "c1") if isinstance(item, Command)]
    names = [item.name for item in items]
    assert "keep the state of Slurm 22.05.8 as /var/lib/slurm/slurmctld.slurm-22.05" in names
    assert "keep the records of Slurm 22.05.8 as database slurm_acct_db_slurm_22_05" in names
    same = cluster(TEXT, controller_with("24.11.5-4"))
    assert records_finding(same, "c1") is None
    assert not [key for key in keys(items_of(same, "c1")) if "keep the" in key]
    newer = cluster(TEXT, controller_with("26.05.5-1"))
    assert records_finding(newer, "c1") is not None  # an older Slurm reads nothing of a newer one
    marked = controller_with("22.05.8-4", **{path: FileFact(text="24.11.5\n") for path in RELEASES.values()})
    assert records_finding(cluster(TEXT, marked), "c1") is None  # of Shoal's Slurm, which `down` removed
    assert unreadable(cluster(TEXT, {name: facts_of(name) for name in ADDRESSES}), "c1", "slurmctld") is None


def test_way_back_to_an_older_slurm_of_packages_names_both_fixes() -> None:
    marks = {path: FileFact(text="24.11.5\n") for path in RELEASES.values()}
    back = cluster(PACKAGES, controller_with("22.05.8-4", PACKAGES, **marks))
    finding = records_finding(back, "c1")
    assert finding is not None and "Slurm 22.05.8 cannot read what Slurm 24.11.5 wrote" in finding.what
    assert "write `slurm: {from: shoal}` again" in finding.fix


def test_tree_with_a_running_program_stays(tmp_path: Path) -> None:
    def tree(number: int) -> Path:
        place = tmp_path / f"slurm-24.11.5-{number}"
        (place / "bin").mkdir(parents=True)
        (place / "bin/sleep").write_bytes(Path("/bin/sleep").read_bytes())
        (place / "bin/sleep").chmod(0o755)
        return place

    used, idle, new = tree(1), tree(2), tree(3)
    program = program_text("slurm_programs.sh")

    def run(action: str) -> int:
        return subprocess.run(shell_command(program, action, f"{tmp_path}/slurm-", str(new)), check=False).returncode

    with subprocess.Popen([used / "bin/sleep", "60"]) as process:
        try:
            assert (run("tidied"), run("tidy"), run("tidied")) == (1, 0, 0)
            assert (used.exists(), idle.exists(), new.exists()) == (True, False, True)
        finally:
            process.kill()
    assert (run("tidied"), run("tidy"), run("tidied")) == (1, 0, 0)
    assert (used.exists(), new.exists()) == (False, True)
