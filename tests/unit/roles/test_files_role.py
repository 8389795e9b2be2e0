"""`files:` of the spec: what it accepts, what each host gets and when, and scripts that no host has."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.goldens import HERE
from tests.support.cases import cases
from tests.support.fake_world import host_facts

from shoal.agent.document import File, to_wire
from shoal.agent.facts import Facts, FileFact
from shoal.errors import ShoalError, SpecError
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.current_conf import MPI_CONF
from shoal.roles.files import RECORD, FilesComponent, missing_scripts, reject_missing_scripts
from shoal.spec.files import dump_contents, load_contents
from shoal.spec.finding import Finding
from shoal.spec.loader import load_all
from shoal.spec.members import members
from shoal.spec.model import Spec

BASE = """\
cluster: reef
controller: {host: c1}
nodesets: {lab: {hosts: [n1]}, fish: {hosts: [n2]}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "prolog.sh").write_text("#!/bin/sh\n")
    (tmp_path / "prolog.sh").chmod(0o755)
    (tmp_path / "plugin.so").write_bytes(b"\x7fELF\xff")
    return tmp_path


def load(place: Path, text: str) -> Spec:
    (place / "shoal.yaml").write_text(BASE + text)
    return load_all(place / "shoal.yaml")[0]


def errors(place: Path, text: str) -> list[Finding]:
    with pytest.raises(SpecError) as caught:
        load(place, text)
    return [finding for finding in caught.value.findings if isinstance(finding, Finding)]


@cases(
    "entry, what",
    ("/etc/slurm/a.sh: nowhere.sh", "cannot read the source, found nowhere.sh: No such file or directory"),
    ("/etc/slurm/a.sh: .", "cannot read the source, found .: not a regular file"),
    ("/etc/slurm/a.sh: large", "cannot read the source, found large: longer than 1024 KiB"),
    ("/etc/shadow: prolog.sh", "a place that Shoal or the system manages"),
    ("/etc/slurm/slurm.conf: prolog.sh", "a place that Shoal or the system manages"),
    ("/tmp/a.sh: prolog.sh", "a place that Shoal or the system manages"),
    ("/etc/shoal/x: prolog.sh", "a place that Shoal or the system manages"),
    ("/etc/slurm/../shadow: prolog.sh", "not a path for a file"),
    ("etc/a.sh: prolog.sh", "not a path for a file"),
    ("/etc/a.sh: {source: prolog.sh, mode: 0777}", "others could write to a file that root executes"),
    ("/etc/a.sh: {source: prolog.sh, mode: rwx}", "not a mode of a file"),
    ("/etc/a.sh: {source: prolog.sh, hosts: [labb]}", "unknown nodeset"),
    ("/etc/a.sh: [prolog.sh]", "not a file to copy"),
    ("/etc/slurm/job_submit.lua: prolog.sh", "no plugin reads it"),
)
def test_bad_entry_is_an_error_with_line_and_fix(place: Path, entry: str, what: str) -> None:
    (place / "large").write_bytes(bytes(1024 * 1024 + 1))
    [finding] = errors(place, f"files:\n  {entry}\n")
    assert what in str(finding) and finding.line == 5 and finding.fix, str(finding)


def test_script_that_is_not_executable_is_an_error(place: Path) -> None:
    (place / "prolog.sh").chmod(0o644)
    text = "slurm: {options: {Prolog: /etc/p.sh}}\nfiles: {/etc/p.sh: prolog.sh}\n"
    [finding] = errors(place, text)
    assert "Prolog executes it, and it is not executable" in finding.what
    assert load(place, text.replace("prolog.sh}", '{source: prolog.sh, mode: "755"}}'))


FILES = """\
files:
  /etc/slurm/prolog.sh: prolog.sh
  /opt/plugins/plugin.so: {source: plugin.so, mode: 0644, hosts: [lab]}
"""
OPTIONS = "slurm: {options: {Prolog: /etc/slurm/prolog.sh, HealthCheckProgram: /usr/sbin/nhc}}\n"


def facts(**files: FileFact) -> dict[str, Facts]:
    names = {"c1": "10.0.0.1", "n1": "10.0.0.2", "n2": "10.0.0.3"}
    return {
        name: replace(host_facts(name, address), files={RECORD: FileFact(), **files}) for name, address in names.items()
    }


def stages(spec: Spec, name: str, found: dict[str, Facts]) -> dict[Stage, tuple[File, ...]]:
    cluster = assemble(spec, found, {})
    member = next(member for member in cluster.members if member.name == name)
    documents = FilesComponent().documents(cluster, member)
    return {stage: tuple(item for item in items if isinstance(item, File)) for stage, items in documents.items()}


def test_files_come_with_the_services_and_leave_after_the_controller(place: Path) -> None:
    spec = load(place, FILES)
    prolog, plugin, record = stages(spec, "n1", facts())[Stage.SERVICES]
    found = (prolog.path, prolog.content, prolog.mode, prolog.keep)
    assert found == ("/etc/slurm/prolog.sh", "#!/bin/sh\n", 0o755, True)
    assert (plugin.content, plugin.mode) == (b"\x7fELF\xff", 0o644)
    assert str(record.content).splitlines()[1:] == ["/etc/slurm/prolog.sh", "/opt/plugins/plugin.so"]
    assert [item.path for item in stages(spec, "n2", facts())[Stage.SERVICES]] == ["/etc/slurm/prolog.sh", RECORD]
    written = facts(**{RECORD: FileFact(text=str(record.content))})
    assert not stages(spec, "n1", written)[Stage.SERVICES][0].keep, "an update of ours is not put aside"

    later = stages(load(place, ""), "n1", written)
    assert [item.path for item in later[Stage.SERVICES]] == [RECORD]
    assert [(item.path, item.content) for item in later[Stage.NODES]] == [
        ("/etc/slurm/prolog.sh", None),
        ("/opt/plugins/plugin.so", None),
        (RECORD, None),
    ]
    assert stages(load(place, ""), "n1", facts()) == {}


def test_bytes_travel_and_the_rental_service_gets_the_content(place: Path) -> None:
    spec = load(place, FILES)
    assert to_wire((stages(spec, "n1", facts())[Stage.SERVICES][1],))[0]["content_b64"] == "f0VMRv8="
    again = Spec.model_validate(json.loads(spec.model_dump_json(exclude_defaults=True)))
    restored = load_contents(again.files, json.loads(json.dumps(dump_contents(spec.files))))
    assert {path: (file.content, file.permissions) for path, file in restored.items()} == {
        path: (file.content, file.permissions) for path, file in spec.files.items()
    }


def test_plugstack_on_the_controller_reconfigures_slurmctld(place: Path) -> None:
    (place / "plugstack.conf").write_text("required /opt/x.so a=1 # b\noptional /opt/y.so\n")
    spec = load(place, "files: {/etc/slurm/plugstack.conf: plugstack.conf}\n")
    assert stages(spec, "c1", facts())[Stage.SERVICES][0].reloads == ("command reconfigure",)
    assert stages(spec, "n1", facts())[Stage.SERVICES][0].reloads == ()
    missing = list(missing_scripts(spec, members(spec), facts()))
    assert {(one.host, one.what) for one in missing} == {
        (host, "/etc/slurm/plugstack.conf names /opt/x.so, and there is no such file") for host in ("n1", "n2")
    }


def test_script_that_is_neither_shipped_nor_there_is_an_error_and_stops_up(place: Path) -> None:
    spec, found = load(place, OPTIONS + FILES), facts()
    found["n2"] = replace(found["n2"], files={"/usr/sbin/nhc": FileFact(there=True)})
    [finding] = missing_scripts(spec, members(spec), found)
    assert (finding.level, finding.host, finding.path) == ("error", "n1", "slurm.options.HealthCheckProgram")
    assert FilesComponent().fact_files(spec)["/usr/sbin/nhc"] == "program"
    with pytest.raises(ShoalError, match=r"n1: HealthCheckProgram names /usr/sbin/nhc.*\nnothing was changed"):
        reject_missing_scripts(spec, found)
    only_lab = FILES.replace("prolog.sh: prolog.sh", "prolog.sh: {source: prolog.sh, hosts: [lab]}")
    prologs = [
        one for one in missing_scripts(load(place, OPTIONS + only_lab), members(spec), found) if "Prolog" in one.what
    ]
    assert [one.host for one in prologs] == ["n2"]


def test_every_path_that_shoal_writes_is_refused(place: Path) -> None:
    """The goldens of the roles list every file of each kind of host."""
    goldens = "".join(golden.read_text() for golden in sorted((HERE / "roles").glob("*.txt")))
    absent = re.findall(r"^-- files absent: (/.*(?:\n   /.*)*)", goldens, re.MULTILINE)
    paths = {*re.findall(r"(?:^-- | \.\.\. )file (/\S+)", goldens, re.MULTILINE), *" ".join(absent).split()}
    assert len(paths) > 10 and MPI_CONF in paths
    assert load(place, f"files: {{{MPI_CONF}: prolog.sh}}\n")  # the operator's takes the place of Shoal's
    for path in paths - {MPI_CONF}:
        assert errors(place, f"files: {{{path}: prolog.sh}}\n"), path
