"""Run the commands of the README and of CONTRIBUTING as written."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import COLLECT, COMMANDS, LENT, ROOT, commands, examples
from tests.e2e.cluster import LIMIT
from tests.e2e.existing_hosts import Lent, lent_hosts

from shoal.spec.member import Shape

COVERS = (
    "README.md CONTRIBUTING.md examples/toy scripts/demo scripts/test scripts/environment tests/documents.py "
    "verbs/init cli"
)
pytestmark = pytest.mark.sandbox

README = ROOT / "README.md"
HOSTS = ("desktop", "gpu01", "gpu02")


def run(line: str, place: Path, environment: dict[str, str] | None = None, timeout: float = LIMIT) -> str:
    """A command line as a person types it, in a shell."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    with lent_hosts("t-readme", {name: Shape(memory_mb=1024) for name in HOSTS}) as hosts:
        key = "mkdir -m 700 -p ~ubuntu/.ssh; cp ~/.ssh/authorized_keys ~ubuntu/.ssh; chown -R ubuntu: ~ubuntu/.ssh"
        for name in HOSTS:
            hosts.shell(name, f"useradd -m -s /bin/bash ubuntu; {key}")
            hosts.shell(name, "echo 'ubuntu ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/ubuntu")
        yield hosts


@pytest.fixture
def home(lent: Lent, tmp_path: Path) -> dict[str, str]:
    """The environment of a person whose SSH knows the hosts of the README by name."""
    (tmp_path / ".ssh").mkdir()
    config = tmp_path / ".ssh/config"
    for name in HOSTS:
        at = lent.instances[name].target
        with config.open("a") as file:
            file.write(f"Host {name}\n  HostName {at.address}\n  User ubuntu\n  IdentityFile {lent.identity}\n")
    # OpenSSH takes the home directory from the account, not from $HOME.
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    ssh.chmod(0o755)
    path = f"{tmp_path}/shoal/bin:{ssh.parent}:{os.environ['PATH']}"
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "XDG_", "VIRTUAL_ENV"))}
    settings = Path.home() / ".config/pip/pip.conf"
    pip = {"PIP_CONFIG_FILE": str(settings)} if settings.exists() else {}
    return {**mine, **pip, "HOME": str(tmp_path), "PATH": path}


def test_readme_commands_build_a_cluster(home: dict[str, str], tmp_path: Path) -> None:
    use, _, _, begin = commands(README)
    assert {COMMANDS[line] for line in (*use, *begin)} == {LENT}
    install, *first = begin
    run(install, ROOT, home)

    place = tmp_path / "first"
    place.mkdir()
    for line in first:
        output = run(line, place, home)
    assert "reef: changed desktop,gpu[01-02]" in output

    (place / "shoal.yaml").write_text(small(examples(README)[0]))
    output = {line: run(line, place, home) for line in use}
    assert "no errors" in output["shoal check"]
    assert "desktop" in output["shoal plan"]
    assert "reef: changed" in output["shoal up"]
    assert re.search(r"desktop,gpu\[01-02\] +idle", output["shoal status"])
    assert len(output["shoal ssh desktop srun -N2 hostname"].split()) == 2
    assert "no changes" in run("shoal up", place, home)
    run("shoal down --yes", place, home)


def small(example: str) -> str:
    """The README's example without its rack of sixteen, for which there is no room here."""
    lines = [line for line in example.splitlines(keepends=True) if "rack" not in line]
    assert len(lines) == len(example.splitlines()) - 2
    return "".join(lines)


@pytest.mark.parametrize("line", [line for line, how in COMMANDS.items() if how == COLLECT])
def test_test_script_passes_arguments_to_pytest(line: str) -> None:
    some = "--ignore-glob='tests/unit/[!s]*'"  # to collect all of them takes many times as long
    output = run(f"{line} --collect-only -q {some}", ROOT)
    assert re.search(r"^\d+(/\d+)? tests collected", output, re.MULTILINE), output
