"""The contestants: how each is started, and how it says that nothing had to be changed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from ground import BenchFailed
from hosts import Hosts
from inputs import write_inputs

HERE = Path(__file__).parent
SHOAL = Path(sys.executable).with_name("shoal")


class Contestant(Protocol):
    name: str

    def prepare(self, hosts: Hosts) -> None:
        """Whatever it needs before the clock starts."""

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        """The command line and its environment: one run, first or again."""

    def unchanged(self, output: str) -> bool:
        """Whether a run said that there was nothing to change."""

    def finish(self, hosts: Hosts) -> None:
        """Let go of what it keeps open between runs."""


class Shoal:
    name = "Shoal"

    def prepare(self, hosts: Hosts) -> None:
        pass

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        return [str(SHOAL), "up", "--file", str(hosts.spec)], {}

    def unchanged(self, output: str) -> bool:
        return "no changes" in output

    def finish(self, hosts: Hosts) -> None:
        pass


class Pyinfra:
    name = "pyinfra"

    def __init__(self, programs: Path) -> None:
        self.program = programs / "pyinfra"

    def prepare(self, hosts: Hosts) -> None:
        asyncio.run(write_inputs(hosts.spec, hosts.directory))

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        here = HERE / "pyinfra"
        environment = {
            "CONVERGE_HOSTS": str(hosts.inventory),
            "CONVERGE_INPUTS": str(hosts.directory / "inputs.json"),
        }
        return [str(self.program), "-y", str(here / "inventory.py"), str(here / "deploy.py")], environment

    def unchanged(self, output: str) -> bool:
        total = re.search(r"Grand total\s+(\S+)\s+(\S+)\s+(\S+)", output)
        # The columns are operations, then those that did something and those that failed; a dash is none.
        return total is not None and total.group(2, 3) == ("-", "-")

    def finish(self, hosts: Hosts) -> None:
        pass


class Ansible:
    name = "Ansible"

    def __init__(self, programs: Path) -> None:
        self.program = programs / "ansible-playbook"

    def prepare(self, hosts: Hosts) -> None:
        asyncio.run(write_inputs(hosts.spec, hosts.directory))
        # Its apt module needs this on the host and would install it inside the timed run.
        hosts.everywhere("apt-get install -q -y --no-install-recommends python3-apt")
        groups = {
            role: {"hosts": {name: None for name in hosts.names if hosts.role(name) == role}, "vars": {"role": role}}
            for role in ("controller", "compute")
        }
        (hosts.directory / "inventory.json").write_text(json.dumps({"all": {"children": groups}}))

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        here = HERE / "ansible"
        environment = {
            "ANSIBLE_CONFIG": str(here / "ansible.cfg"),
            "ANSIBLE_HOME": str(hosts.directory / "ansible"),
            "ANSIBLE_SSH_ARGS": f"-F {hosts.ssh_config} -o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._sockets(hosts)),
        }
        line = [str(self.program), "--forks", str(len(hosts.names)), "--inventory", "inventory.json"]
        return [*line, "--extra-vars", "@inputs.json", str(here / "playbook.yml")], environment

    def unchanged(self, output: str) -> bool:
        recap = output.partition("PLAY RECAP")[2]
        changed = re.findall(r"\bchanged=(\d+)", recap)
        return bool(changed) and set(changed) == {"0"}

    def finish(self, hosts: Hosts) -> None:
        for socket in self._sockets(hosts).glob("*"):
            end = ["ssh", "-F", str(hosts.ssh_config), "-o", f"ControlPath={socket}", "-O", "exit", hosts.controller]
            subprocess.run(end, capture_output=True, check=False)

    def _sockets(self, hosts: Hosts) -> Path:
        return hosts.directory / "cp"


def timed(contestant: Contestant, hosts: Hosts) -> tuple[float, str]:
    """One run, from outside: start of the program to its end, with what it printed. Raises when it fails."""
    argv, environment = contestant.command(hosts)
    begin = time.perf_counter()
    process = subprocess.Popen(
        argv,
        cwd=hosts.directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # Ansible's forks too
        process.wait()
        raise
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise BenchFailed(f"{contestant.name} ended with status {process.returncode}:\n{output[-12000:]}")
    return seconds, output
