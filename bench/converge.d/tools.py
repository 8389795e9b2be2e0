"""The tools that are compared: how each is started, and how it reports that nothing had to be changed."""

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

from harness import BenchError
from hosts import Hosts
from inputs import write_inputs

HERE = Path(__file__).parent
SHOAL = Path(sys.executable).with_name("shoal")


class Tool(Protocol):
    name: str

    def prepare(self, hosts: Hosts) -> None:
        """Create what it needs before the clock starts."""

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        """The command line of a run, and its environment variables."""

    def is_unchanged(self, output: str) -> bool:
        """Whether the output of a run reports that nothing was changed."""

    def close(self, hosts: Hosts) -> None:
        """Close what it keeps open between runs."""


class Shoal:
    name = "Shoal"

    def prepare(self, hosts: Hosts) -> None:
        pass

    def command(self, hosts: Hosts) -> tuple[list[str], dict[str, str]]:
        return [str(SHOAL), "up", "--file", str(hosts.spec)], {}

    def is_unchanged(self, output: str) -> bool:
        return "no changes" in output

    def close(self, hosts: Hosts) -> None:
        pass


class ShoalTree(Shoal):
    """The same with one Slurm for all hosts."""

    name = "Shoal, tree"

    def prepare(self, hosts: Hosts) -> None:
        hosts.spec.write_text(f"{hosts.spec.read_text()}slurm: {{from: shoal}}\n")


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

    def is_unchanged(self, output: str) -> bool:
        total = re.search(r"Grand total\s+(\S+)\s+(\S+)\s+(\S+)", output)
        # Columns: operations, those that changed something, those that failed; a dash is none.
        return total is not None and total.group(2, 3) == ("-", "-")

    def close(self, hosts: Hosts) -> None:
        pass


class Ansible:
    name = "Ansible"

    def __init__(self, programs: Path) -> None:
        self.program = programs / "ansible-playbook"

    def prepare(self, hosts: Hosts) -> None:
        asyncio.run(write_inputs(hosts.spec, hosts.directory))
        # Its apt module needs python3-apt on the host and would install it in the timed run.
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

    def is_unchanged(self, output: str) -> bool:
        recap = output.partition("PLAY RECAP")[2]
        changed = re.findall(r"\bchanged=(\d+)", recap)
        return bool(changed) and set(changed) == {"0"}

    def close(self, hosts: Hosts) -> None:
        for socket in self._sockets(hosts).glob("*"):
            line = ["ssh", "-F", str(hosts.ssh_config), "-o", f"ControlPath={socket}", "-O", "exit", hosts.controller]
            subprocess.run(line, capture_output=True, check=False)

    def _sockets(self, hosts: Hosts) -> Path:
        return hosts.directory / "cp"


def run_tool(tool: Tool, hosts: Hosts) -> tuple[float, str]:
    """Seconds and output of one run, from the start of the program to its end. Raises if it fails."""
    argv, environment = tool.command(hosts)
    start = time.perf_counter()
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
        os.killpg(process.pid, signal.SIGKILL)  # the forks of Ansible too
        process.wait()
        raise
    seconds = time.perf_counter() - start
    if process.returncode != 0:
        raise BenchError(f"{tool.name} ended with status {process.returncode}:\n{output[-12000:]}")
    return seconds, output
