"""`slurm: {from: shoal}`: one Slurm on all hosts, beside their distributions' and never over it."""

import hashlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tests.documents import ROOT
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.item_text import folded_text
from tests.support.specs import WITH_LOGIN
from tests.unit.roles.test_role_documents import REEF, document_of, reef

from shoal.agent.document import Command, File, SecretRef
from shoal.agent.facts import Facts, FileFact
from shoal.cloud.service.join_checks import unfit_machines
from shoal.errors import SpecError, UsageError
from shoal.remote import program_text, shell_command
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster
from shoal.roles.controller import controller
from shoal.roles.current_conf import MPI_CONF
from shoal.roles.documents import documents, fact_files
from shoal.roles.elastic import ARCHIVES
from shoal.roles.registry import user_secrets
from shoal.roles.slurm_tree import find_trees, read_archive, require_tree
from shoal.roles.users import pam_block
from shoal.slurm.conf import mpi_conf

TEXT = (
    WITH_LOGIN
    + """\
accounting: true
slurm: {from: shoal}
"""
)
ADDRESSES = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11"}
PREFIX = "/opt/shoal/slurm-24.11.5-1"


def wheel_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_wheel", ROOT / "scripts/slurm_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_wheel(cache: Path, version: str = "24.11.5-1", arch: str = "x86_64", tree: bytes = b"tree") -> Path:
    """A wheel as scripts/build-slurm leaves it."""
    script, tag = wheel_script(), f"manylinux_2_31_{arch}"
    path = cache / "slurm" / f"shoal_slurm-{script.wheel_version(version)}-py3-none-{tag}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(script.wheel(version, tag, tree, {}))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    put_wheel(tmp_path)
    return tmp_path


def facts_of(name: str, text: str = TEXT, **files: FileFact) -> Facts:
    known = {**dict.fromkeys(fact_files(spec_of(text)), FileFact()), **files}
    return host_facts(name, ADDRESSES[name], arch="x86_64", files=known)


def cluster(text: str = TEXT, **files: FileFact) -> Cluster:
    return assemble(spec_of(text), {name: facts_of(name, text, **files) for name in ADDRESSES}, ADDRESSES)


@cases("name, role", ("c1", "accounting"), ("door", "login"), ("n1", "compute"))
def test_host_with_the_tree_matches_its_golden(name: str, role: str) -> None:
    bases = {role: document_of(reef(REEF + "accounting: true\n"), name)}
    if name != "c1":
        bases["tree-c1"] = document_of(cluster(), "c1")
    assert_golden(f"roles/tree-{name}.txt", folded_text(document_of(cluster(), name), **bases))


def test_fences_of_pmix_go_around_a_ring_unless_the_operator_says_otherwise() -> None:
    own = TEXT + "files: {/etc/slurm/mpi.conf: mine}\n"
    packages = TEXT.replace("slurm: {from: shoal}", "slurm: {}")
    for of, contents in ((cluster(), [mpi_conf()]), (cluster(own), []), (cluster(packages), [])):
        found = [item for item in controller(of) if isinstance(item, File) and item.path == MPI_CONF]
        assert [file.content for file in found] == contents


def test_archive_travels_once_by_digest() -> None:
    def archives(of: Cluster) -> list[SecretRef]:
        items = [item for document in documents(of, of.members[2]).values() for item in document]
        inputs = [item.stdin for item in items if isinstance(item, Command)]
        return [secret for secret in inputs if isinstance(secret, SecretRef)]

    digest = hashlib.sha256(b"tree").hexdigest()
    assert archives(cluster()) == [SecretRef("Slurm for x86_64", digest)]
    assert archives(cluster(**{f"{PREFIX}/.complete": FileFact(text=f"{digest}\n")})) == []
    assert len(archives(cluster(**{f"{PREFIX}/.complete": FileFact(text="another\n")}))) == 1


def test_newest_tree_is_used_and_a_machine_without_one_gets_the_fix(cache: Path) -> None:
    put_wheel(cache, "24.11.5-2", tree=b"newer")
    put_wheel(cache, "24.11.5-2", "aarch64", tree=b"arm")
    assert require_tree().prefix == "/opt/shoal/slurm-24.11.5-2"
    assert (read_archive("x86_64"), read_archive("aarch64")) == (b"newer", b"arm")
    put_wheel(cache, "24.11.5-10", tree=b"newest")
    assert find_trees().keys() == {"x86_64"}  # all hosts get one release
    assert user_secrets(spec_of(TEXT))["Slurm for x86_64"] == "own:slurm-x86_64"
    with pytest.raises(UsageError, match="no Slurm for aarch64; it has one for x86_64"):
        require_tree("aarch64")
    for path in (cache / "slurm").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="this machine has no Slurm for the hosts") as error:
        fact_files(spec_of(TEXT))
    assert "scripts/build-slurm" in error.value.hint


def test_spec_chooses_auth_slurm_and_rejects_munge() -> None:
    assert spec_of(TEXT).auth == "slurm" and spec_of(TEXT + "auth: slurm\n").auth == "slurm"
    with pytest.raises(SpecError, match="has no munge") as error:
        spec_of(TEXT + "auth: munge\n")
    assert "delete this line" in str(error.value)
    with pytest.raises(SpecError, match="unknown source of Slurm"):
        spec_of(TEXT.replace("from: shoal", "from: source"))
    with pytest.raises(SpecError, match=r"unknown key, found .form., did you mean `from`"):
        spec_of(TEXT.replace("from: shoal", "form: shoal"))


def test_login_rule_names_the_module_of_the_tree() -> None:
    assert f"account required {PREFIX}/lib/security/pam_slurm_adopt.so " in pam_block(PREFIX)


def test_archive_is_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    script, tree = wheel_script(), tmp_path / "made/slurm-24.11.5-1"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/srun").write_text("#!/bin/sh\n")
    place = tmp_path / "opt/slurm-24.11.5-1"
    place.parent.mkdir()

    def unpack(archive: bytes) -> int:
        command = shell_command(program_text("slurm_tree.sh"), str(place), "digest")
        return subprocess.run(command, input=archive, capture_output=True, timeout=60).returncode

    whole = script.archive(tree)
    assert unpack(whole[:-20]) != 0 and not list(place.parent.iterdir())
    for _ in range(2):
        assert unpack(whole) == 0
        assert (place / ".complete").read_text() == "digest\n" and (place / "bin/srun").exists()
        assert [path.name for path in place.parent.iterdir()] == [place.name]


RENTED = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  spot: {provider: lambda, type: gpu_1x_a10, max: 2, cpus: 1, memory: 1G}
providers:
  lambda: {key: env:LAMBDA_API_KEY}
slurm: {from: shoal}
"""


def test_controller_keeps_the_archives_for_rented_machines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(cache, arch="aarch64", tree=b"arm")
    spec = spec_of(RENTED)
    digests = {"x86_64": hashlib.sha256(b"tree").hexdigest(), "aarch64": hashlib.sha256(b"arm").hexdigest()}
    paths = {arch: f"{ARCHIVES}/slurm-24.11.5-1-{arch}.tar.gz" for arch in digests}

    def sent(**files: FileFact) -> set[str]:
        known = {**dict.fromkeys(fact_files(spec), FileFact()), **files}
        facts = {"c1": host_facts("c1", "10.0.0.1", arch="x86_64", files=known)}
        of = assemble(spec, facts, {"c1": "10.0.0.1"})
        items = [item for document in documents(of, of.members[0]).values() for item in document]
        return {item.path for item in items if isinstance(item, File) and item.path.startswith(ARCHIVES)}

    assert sent() == {*paths.values()}
    assert sent(**{paths["x86_64"]: FileFact(digests["x86_64"])}) == {paths["aarch64"]}
    # The service on the controller finds them in its own cache.
    place = cache / "controller/slurm"
    place.mkdir(parents=True)
    (place / Path(paths["aarch64"]).name).write_bytes(b"arm")
    monkeypatch.setenv("SHOAL_CACHE", str(place.parent))
    assert (read_archive("aarch64"), require_tree("aarch64").sha256) == (b"arm", digests["aarch64"])


def test_rented_machine_of_another_cpu_is_unfit() -> None:
    spec = spec_of(RENTED)
    controller = host_facts("c1", "10.0.0.1", arch="x86_64")
    machines = {
        name: host_facts(name, "10.0.0.9", arch=arch) for name, arch in (("spot1", "aarch64"), ("spot2", "x86_64"))
    }
    errors = unfit_machines(spec, {"c1": controller, **machines}, "c1", machines)
    assert list(errors) == ["spot1"] and "its CPU is aarch64" in errors["spot1"]
