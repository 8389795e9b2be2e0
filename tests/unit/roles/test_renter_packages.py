"""A provider of somebody else's: the package that has it is installed on the controller beside Shoal itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.plan.fake_world import spec_of

from shoal.agent.document import Command
from shoal.errors import SpecError
from shoal.roles.elastic import INSTALL, _made, prefix

REEF = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets: {cloud: {provider: lambda, type: gpu_1x_a10, max: 3}}
providers:
  lambda: {key: env:LAMBDA_API_KEY PACKAGE}
"""


def install(package: str) -> Command:
    spec = spec_of(REEF.replace("PACKAGE", package and f", package: '{package}'"))
    [found] = [item for item in _made(spec) if isinstance(item, Command) and item.name == "install Shoal"]
    return found


def test_an_installation_counts_as_made_only_with_the_packages_that_are_asked_for() -> None:
    assert install("").argv[-1] == ""
    assert install("").unless == ("test", "-e", f"{prefix()}/.complete")
    assert install("reef-renter[fast]>=1.2,<2").argv[-2:] == ("", "reef-renter[fast]>=1.2,<2")
    assert install("reef-renter>=1").unless == ("test", "-e", f"{prefix()}/.complete reef-renter>=1")


@pytest.mark.parametrize("package", ["", "reef-renter>=1"])
def test_the_mark_that_is_left_is_the_one_that_is_looked_for(tmp_path: Path, package: str) -> None:
    """With a Python that only notes what its pip is asked for."""
    programs, place = tmp_path / "bin", tmp_path / "opt" / "shoal-1"
    programs.mkdir()
    place.mkdir(parents=True)
    (place / "half-made").touch()
    pip = f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {tmp_path}/asked; done\n'
    fake = f"#!/bin/sh\nmkdir -p $3/bin\ncat > $3/bin/pip <<'END'\n{pip}END\nchmod +x $3/bin/pip\n"
    (programs / "python3").write_text(fake)
    (programs / "python3").chmod(0o755)
    words = ["sh", "-c", INSTALL, "sh", str(place), "/wheels/shoal.whl", "[gcp]", *filter(None, [package])]
    subprocess.run(words, check=True, env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"})
    mark = Path(install(package).unless[-1]).name.replace(".complete", ".complete[gcp]")
    assert sorted(path.name for path in place.iterdir()) == [mark, "bin"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[asked.index("--quiet") + 1 :] == ["/wheels/shoal.whl[gcp]", *filter(None, [package])]


@pytest.mark.parametrize("package", ["-e .", "--index-url=x", "reef renter", "../reef", "reef @ file:///x", "reef;x"])
def test_what_pip_would_take_for_something_else_than_a_package_is_refused(package: str) -> None:
    with pytest.raises(SpecError, match=r"not a package.*name it as pip does, without blanks: shoal-mine>=1\.2"):
        install(package)
