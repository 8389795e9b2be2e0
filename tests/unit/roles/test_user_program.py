"""Shoal for users on the hosts where they log in: what a host gets, where it is left out, and what `check` says."""

import io
import platform
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import items_of

from shoal.agent.document import HEADER, SecretRef
from shoal.agent.facts import FileFact
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.runtime_archive import RUNTIME_ARCHIVE, runtime_archive, runtime_mark, runtime_requirements
from shoal.roles.user_program import FAILED, PROGRAM, SECRET, UserProgramComponent, launcher

REEF = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
login: {hosts: [{name: l1, address: 10.0.0.2}]}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]}
"""
USERS = "users: {ann: {}}\n"
HERE = {"python": platform.python_version(), "arch": platform.machine()}
COMPONENT = UserProgramComponent()


def cluster_of(text: str = REEF + USERS, **facts: Any) -> Cluster:
    addresses = {"c1": "10.0.0.1", "l1": "10.0.0.2", "n1": "10.0.0.11"}
    found = {name: host_facts(name, at, **{**HERE, **facts}) for name, at in addresses.items()}
    return assemble(spec_of(text), found, addresses)


def items(cluster: Cluster, name: str) -> dict[str, Any]:
    return items_of(cluster, name, COMPONENT, Stage.NODES)


def install(cluster: Cluster, name: str = "c1") -> Any:
    return items(cluster, name)["command install Shoal for users"]


def test_hosts_where_users_log_in_get_the_archive_and_root_owns_it() -> None:
    cluster = cluster_of()
    for name in ("c1", "l1"):
        made = items(cluster, name)
        packed = made[f"file /opt/shoal/users/{runtime_mark()}.tgz"]
        assert packed.content == SecretRef(SECRET) and packed.owner == "root"
        program = made[f"file {PROGRAM}"]
        assert (program.owner, program.mode) == ("root", 0o755) and "fits" in install(cluster, name).argv
    assert items(cluster, "n1") == {} and items(cluster_of(REEF), "c1") == {}
    assert COMPONENT.user_secrets(spec_of(REEF + USERS)) == {SECRET: RUNTIME_ARCHIVE}
    assert COMPONENT.user_secrets(spec_of(REEF)) == {}


def test_other_python_installs_the_same_packages_from_an_index() -> None:
    cluster = cluster_of(python="3.99.0")
    command = install(cluster)
    assert "other" in command.argv and set(runtime_requirements()) <= set(command.argv)
    assert any(requirement.startswith("pydantic==") for requirement in runtime_requirements())
    packages = {
        python: COMPONENT.packages(cluster.spec, cluster.controller, host_facts("c1", "10.0.0.1", **{**HERE, **facts}))
        for python, facts in {"same": {}, "other": {"python": "3.99.0"}, "old": {"python": "3.9.2"}}.items()
    }
    assert packages == {"same": (), "other": ("python3-venv",), "old": ()}


def test_old_python_and_a_program_of_somebody_elses_are_left_alone_and_reported() -> None:
    old = cluster_of(python="3.9.2")
    assert items(old, "c1") == {}
    [finding, other] = COMPONENT.findings(old)
    assert (finding.level, finding.host, finding.found, other.host) == ("info", "c1", "Python 3.9.2", "l1")
    assert "users have no `shoal` here" in finding.what and "Python 3.11" in finding.fix
    foreign = cluster_of(files={PROGRAM: FileFact(text="#!/usr/bin/python3\n")})
    assert items(foreign, "c1") == {}
    assert f"{PROGRAM} is not from `shoal up`" in COMPONENT.findings(foreign)[0].found


def test_host_without_a_package_index_says_so_and_up_does_not_fail() -> None:
    cluster = cluster_of(python="3.99.0", files={FAILED: FileFact(text="No matching distribution\n")})
    finding = COMPONENT.findings(cluster)[0]
    assert finding.found == "No matching distribution" and "package index" in finding.fix
    assert FAILED in install(cluster).unless


def test_cluster_without_users_any_more_removes_it() -> None:
    ours = {PROGRAM: FileFact(text=launcher("/opt/shoal/users/shoal-1"))}
    [removal] = items(cluster_of(REEF, files=ours), "c1").values()
    assert removal == COMPONENT.removal()[0]


def test_removal_spares_a_program_that_is_not_ours(tmp_path: Path) -> None:
    [removal] = COMPONENT.removal()
    for text, stays in ((f"#!/bin/sh\n{HEADER}", False), ("#!/usr/bin/python3\n", True)):
        program, trees = tmp_path / "shoal", tmp_path / "users"
        program.write_text(text)
        trees.mkdir()
        places = {PROGRAM: str(program), "/opt/shoal/users": str(trees)}
        argv, done = ([places.get(word, word) for word in line] for line in (removal.argv, removal.unless))
        assert subprocess.run(done).returncode != 0
        subprocess.run(argv, check=True)
        assert (program.exists(), trees.exists()) == (stays, False) and subprocess.run(done).returncode == 0


def test_archive_loads_all_commands_without_other_packages(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(runtime_archive())) as archive:
        archive.extractall(tmp_path, filter="data")
    loaded = (tmp_path / "load.py").read_text()
    assert all(f"shoal.{name}" in loaded for name in ("cli.env_commands", "cli.prove_commands", "verbs.env_user"))
    subprocess.run([sys.executable, "-I", "-S", tmp_path / "load.py"], check=True, timeout=300)


def test_program_without_its_tree_says_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "shoal"
    program.write_text(launcher(str(tmp_path / "absent")))
    done = subprocess.run(["sh", program, "status"], capture_output=True, text=True)
    assert done.returncode == 1 and "use your own machine" in done.stderr
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".complete").touch()
    (tree / "start.py").write_text("import sys\nprint(sys.argv[1:], sys.flags.isolated)\n")
    program.write_text(launcher(str(tree)).replace("/usr/bin/python3", sys.executable))
    done = subprocess.run(["sh", program, "run", "a b"], capture_output=True, text=True)
    assert done.stdout == "['run', 'a b'] 1\n"
