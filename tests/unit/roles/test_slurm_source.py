"""From packages to Shoal's own Slurm and back: which Slurm a host has, and what the way costs."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_world import spec_of
from tests.unit.roles.test_slurm_tree_role import ADDRESSES, PREFIX, TEXT, facts_of, put_wheel

from shoal.agent.document import Command, Document, File, Packages, Service
from shoal.agent.facts import Facts, FileFact, Package
from shoal.remote import program_text, shell_command
from shoal.roles.assembly import assemble
from shoal.roles.base import MUNGE_KEY
from shoal.roles.component import Cluster
from shoal.roles.current_conf import SLURM_CONF, read_current_conf
from shoal.roles.documents import documents
from shoal.roles.host_record import HOST_RECORD, STATE_OWNER
from shoal.roles.slurm_source import MASKED, RELEASES, TABLES, installed_slurm, other_slurm, records_finding, unreadable
from shoal.roles.slurm_tree import daemon_unit
from shoal.slurm.conf import slurm_conf

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
    assert other_slurm(spec_of(TEXT), {"n1": member}) == {}  # a cluster of Shoal's moves
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


def test_daemons_of_the_distribution_without_a_task_are_masked_and_given_back() -> None:
    facts = {name: facts_of(name) for name in ADDRESSES}
    facts["n1"] = packaged(facts["n1"], "24.11.5-4", "slurmctld", "slurmd", active=False)
    assert "command mask the distribution's slurmctld" in keys(items_of(cluster(TEXT, facts), "n1"))
    assert not [key for key in keys(items_of(cluster(TEXT, facts), "c1")) if "mask" in key]
    back = {name: facts_of(name, PACKAGES) for name in ADDRESSES}
    back["n1"] = facts_of("n1", PACKAGES, **{MASKED: FileFact(text="slurmctld\n")})
    found = keys(items_of(cluster(PACKAGES, back), "n1"))
    assert found.index("command unmask the distribution's Slurm") < found.index("service slurmd")


def test_way_to_packages_removes_units_before_the_services_and_the_tree_last() -> None:
    facts = {name: facts_of(name, PACKAGES, **OURS) for name in ADDRESSES}
    for host, daemon in (("c1", "slurmctld"), ("n1", "slurmd")):
        items = items_of(cluster(PACKAGES + "auth: slurm\n", facts), host)
        [unit] = [item for item in items if isinstance(item, File) and item.path == UNIT.format(daemon)]
        assert (unit.content, unit.restarts) == (None, (daemon,))
        assert items.index(unit) < items.index(next(i for i in items if isinstance(i, Service) and i.name == daemon))
        assert keys(items)[-1] == "command remove a former Slurm of Shoal"
        assert any(isinstance(item, Packages) and daemon in item.names for item in items)
    # A unit of a daemon that has no task here goes as well.
    assert f"file {UNIT.format('slurmdbd')}" in keys(items_of(cluster(PACKAGES, facts), "n1"))


def test_munge_is_accepted_until_the_jobs_that_began_with_it_have_ended() -> None:
    facts = {name: facts_of(name, **{MUNGE_KEY: FileFact(sha256="ab")}) for name in ADDRESSES}
    before = slurm_conf(cluster(PACKAGES, {name: facts_of(name, PACKAGES) for name in ADDRESSES}).conf)
    facts["c1"] = facts_of("c1", **{MUNGE_KEY: FileFact(sha256="ab"), SLURM_CONF: FileFact(text=before)})
    busy, idle = cluster(TEXT, facts, keep_munge=True), cluster(TEXT, facts, keep_munge=False)
    assert "AuthAltTypes=auth/munge\n" in slurm_conf(busy.conf)
    assert not [key for key in keys(items_of(busy, "n1")) if "munge" in key]
    assert "munge" not in slurm_conf(idle.conf)
    assert {"service munge", f"file {MUNGE_KEY}"} <= {*keys(items_of(idle, "n1"))}


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
