"""Third-party providers: their package is installed on the controller beside Shoal."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.agent.document import Command
from shoal.errors import SpecError
from shoal.remote import program_text, shell_command
from shoal.roles.elastic import (
    ACCOUNTS,
    KEYS,
    LEDGER,
    SPEC,
    UNIT,
    WHEELS,
    _service_files,
    _service_start,
    install_prefix,
    unit,
)
from shoal.roles.wheel import build_wheel
from shoal.spec.model import Spec

REEF = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets: {cloud: {provider: lambda, type: gpu_1x_a10, max: 3}}
providers:
  lambda: {key: env:LAMBDA_API_KEY PACKAGE}
"""


def reef(package: str = "", account: str = "") -> Spec:
    return spec_of(REEF.replace("PACKAGE", package and f", package: '{package}'") + account)


def install(package: str) -> Command:
    [found] = [
        item for item in _service_files(reef(package)) if isinstance(item, Command) and item.name == "install Shoal"
    ]
    return found


def test_installation_contains_the_requested_packages() -> None:
    assert install("").argv[-1].endswith(".whl")
    assert install("reef-renter[fast]>=1.2,<2").argv[-2:] == (install("").argv[-1], "reef-renter[fast]>=1.2,<2")
    assert install("reef-renter>=1").unless == ("test", "-e", f"{install_prefix(reef('reef-renter>=1'))}/.complete")


def test_each_package_set_has_its_own_prefix() -> None:
    specs = [reef(), reef("reef-renter>=1"), reef("reef-renter>=2"), reef(account="  gcp: {key: env:K, project: p}\n")]
    places = [install_prefix(spec) for spec in specs]
    assert len(set(places)) == len(places)
    assert len({place.rpartition("-")[0] for place in places}) == 1, "of the same Shoal"
    for spec, place in zip(specs, places, strict=True):
        assert f"ExecStart={place}/bin/python -m shoal.elastic\n" in unit(spec)


def test_service_files_change_only_after_the_installation() -> None:
    names = [item.key for item in _service_files(reef("reef-renter>=1"))]
    before = names[: names.index("command install Shoal")]
    assert [path for path in (ACCOUNTS, SPEC, UNIT) if f"file {path}" not in names] == []
    assert [path for path in (ACCOUNTS, SPEC, UNIT) if f"file {path}" in before] == []
    assert not [name for name in before if name.startswith(f"file {KEYS}")]


def installed(tmp_path: Path, place: Path, *packages: str, status: int = 0) -> int:
    """The program with a Python that only notes what its pip is asked for, and a pip that ends as is said."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    pip = f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {tmp_path}/asked; done\nexit {status}\n'
    fake = f"#!/bin/sh\nmkdir -p $3/bin\ncat > $3/bin/pip <<'END'\n{pip}END\nchmod +x $3/bin/pip\n"
    (programs / "python3").write_text(fake)
    (programs / "python3").chmod(0o755)
    words = shell_command(program_text("service_venv.sh"), str(place), "/wheels/shoal.whl[gcp]", *packages)
    return subprocess.run(words, env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}).returncode


@cases("packages", (), ("reef-renter>=1",))
def test_completion_mark_matches_the_guard(tmp_path: Path, packages: tuple[str, ...]) -> None:
    place = tmp_path / "opt" / "shoal-1"
    place.mkdir(parents=True)
    (place / "half-made").touch()
    assert installed(tmp_path, place, *packages) == 0
    mark = Path(install("".join(packages)).unless[-1]).name
    assert sorted(path.name for path in place.iterdir()) == [mark, "bin"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[asked.index("--quiet") + 1 :] == ["/wheels/shoal.whl[gcp]", *packages]


def test_failed_installation_leaves_no_mark_and_keeps_the_other(tmp_path: Path) -> None:
    old, new = tmp_path / "shoal-1-aa", tmp_path / "shoal-1-bb"
    assert installed(tmp_path, old) == 0 and installed(tmp_path, new, "no-such-renter", status=1) == 1
    assert sorted(path.name for path in old.iterdir()) == [".complete", "bin"]
    assert [path.name for path in new.iterdir()] == ["bin"]


def test_older_installations_are_removed_after_the_service_starts(tmp_path: Path) -> None:
    service, unblock, forget = _service_start(reef("reef-renter>=1"))
    assert service.running and isinstance(forget, Command) and LEDGER in unblock.argv and LEDGER in unblock.unless
    old, new = (f"opt{install_prefix(spec)}" for spec in (reef(), reef("reef-renter>=1")))
    wheels, other = f"opt{WHEELS}/{build_wheel().mark}", "opt/opt/shoal/mlflow-3"
    for name in (old, new, wheels, other):
        (tmp_path / name).mkdir(parents=True)

    def here(command: tuple[str, ...]) -> list[str]:
        return [*command[:4], *(f"{tmp_path}/opt{path}" for path in command[4:])]

    assert subprocess.run(here(forget.unless)).returncode, "there are two"
    assert subprocess.run(here(forget.argv)).returncode == 0
    assert [name for name in (old, new, wheels, other) if (tmp_path / name).exists()] == [new, wheels, other]
    assert subprocess.run(here(forget.unless)).returncode == 0


@cases("package", "-e .", "--index-url=x", "reef renter", "../reef", "reef @ file:///x", "reef;x")
def test_invalid_package_name_is_rejected(package: str) -> None:
    with pytest.raises(SpecError, match=r"not a package.*name it as pip does, without blanks: shoal-mine>=1\.2"):
        install(package)
