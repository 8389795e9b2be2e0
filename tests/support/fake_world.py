"""A cluster in memory: fake hosts with fake agents, and a Slurm that runs what the controller received."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.agent.facts import Address, Cgroup, Cpu, Facts, FileFact, Gpu, Package, UnixIds
from shoal.hostlist import expand
from shoal.hosts.api import Result, Target
from shoal.jobs.record import OWNERS_COMMAND
from shoal.plan.connections import Fleet
from shoal.roles.current_conf import HOSTS, HOSTS_BLOCK, SLURM_CONF
from shoal.roles.documents import fact_files
from shoal.slurm.parsed_conf import nodes_in_conf, parse_conf
from shoal.slurm.state import JOB_RECORD, JOBS_COMMAND
from shoal.spec.loader import load_text
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal_simulators.fake_host import Call, FakeAgent, FakeConnector, FakeHost

LAB = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab:
    hosts: [{name: n1, address: 10.0.0.11}, {name: n2, address: 10.0.0.12}]
partitions:
  main: {nodesets: [lab], default: true}
"""


def spec_of(text: str) -> Spec:
    return load_text(text, "shoal.yaml")


def host_facts(name: str, address: str, **changes: Any) -> Facts:
    """A Debian 12 host as the agent finds it."""
    found = Facts(
        hostname=name,
        os_id="debian",
        os_version="12",
        package_manager="apt",
        cpu=Cpu(cpus=4, sockets=1, cores_per_socket=2, threads_per_core=2),
        memory_mb=16000,
        cgroup=Cgroup(2, ("cpuset", "cpu", "memory", "devices")),
        addresses=(Address("eth0", address, 24),),
        files=dict.fromkeys(fact_files(spec_of(LAB)), FileFact()),
        users={"munge": UnixIds(104, 110)},
        groups={"munge": UnixIds(110)},
    )
    return replace(found, **changes)


def gpus(count: int, name: str = "NVIDIA H100 80GB HBM3") -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"GPU-{index}", name, 81559, f"/dev/nvidia{index}") for index in range(count))


def slurm_package(version: str) -> dict[str, Package]:
    return {"slurm-client": Package(installed=version)}


class FakeSlurm:
    """Answers scontrol and squeue on the controller. Its nodes are those of the slurm.conf that was applied."""

    def __init__(self, controller: FakeAgent) -> None:
        self._controller = controller
        self.states: dict[str, str] = {}
        """State of a node that is not idle, as scontrol writes it."""
        self.reasons: dict[str, str] = {}
        self.jobs: dict[str, str] = {}
        """Running jobs: id -> hostlist."""
        self.job_states: dict[str, str] = {}
        """State of a job that is not RUNNING."""
        self.job_users: dict[str, str] = {}
        """User of a job that is not root's."""
        self.broken = ""
        """The error of every command when slurmctld does not answer."""
        self.updates: list[tuple[str, ...]] = []

    @property
    def conf(self) -> str:
        return str(self._controller.items.get(f"file {SLURM_CONF}", {}).get("content") or "")

    @property
    def nodes(self) -> list[str]:
        return sorted(nodes_in_conf(self.conf, ""))

    def scontrol(self, call: Call) -> bytes | Result:
        if self.broken:
            return Result(1, stderr=self.broken.encode())
        words = call.argv[1:]
        if words == ("--version",):
            return b"slurm-wlm 22.05.8\n"
        if words[0] == "update":
            return self._update(words[1:])
        if words == ("show", "config"):
            return "".join(f"{key:<23} = {value}\n" for key, value in parse_conf(self.conf).settings.items()).encode()
        if words[-1] == "partition":
            return "".join(
                f"{line.replace('MaxTime=UNLIMITED', '')} MaxTime=UNLIMITED\n"
                for line in self.conf.splitlines()
                if line.startswith("PartitionName=")
            ).encode()
        return "".join(self._node(name) for name in self.nodes).encode()

    def squeue(self, call: Call) -> bytes | Result:
        if self.broken:
            return Result(1, stderr=self.broken.encode())
        if call.argv == OWNERS_COMMAND:
            return "".join(f"{job} 0\n" for job in self.jobs).encode()
        wanted = call.argv[call.argv.index("--nodelist") + 1] if "--nodelist" in call.argv else None
        assert call.argv[: len(JOBS_COMMAND)] == JOBS_COMMAND
        found = {job: nodes for job, nodes in self.jobs.items() if wanted is None or wanted in expand(nodes)}
        states = {job: self.job_states.get(job, "RUNNING") for job in found}
        rest = ("None", "0:10", "UNLIMITED", "1", "train")
        return "".join(
            JOB_RECORD + "\x1f".join((job, states[job], self.job_users.get(job, "root"), "main", nodes, *rest)) + "\n"
            for job, nodes in found.items()
        ).encode()

    def _node(self, name: str) -> str:
        reason = f" Reason={self.reasons[name]} [root@2026-01-01T00:00:00]" if name in self.reasons else ""
        state = self.states.get(name, "IDLE")
        return f"NodeName={name} CPUAlloc=0 CPUTot=4 RealMemory=14700 State={state} Version=22.05.8{reason}\n"

    def _update(self, words: tuple[str, ...]) -> bytes | Result:
        self.updates.append(words)
        values = dict(word.split("=", 1) for word in words)
        for name in expand(values["nodename"]):
            if name not in self.nodes:
                return Result(1, stderr=b"slurm_update error: Invalid node name specified\n")
            if "state" not in values:
                continue
            if values["state"] == "drain":
                self.states[name], self.reasons[name] = "IDLE+DRAIN", values["reason"]
            elif name not in self.states:
                return Result(1, stderr=b"slurm_update error: Invalid node state specified\n")
            else:
                self.states.pop(name), self.reasons.pop(name, None)
        return b""


class World:
    """The hosts of a spec."""

    def __init__(self, spec: Spec, facts: Mapping[str, Facts]) -> None:
        self.spec = spec
        self.agents = {name: FakeAgent(fact) for name, fact in facts.items()}
        self.controller = members(spec)[0].name
        self.slurm = FakeSlurm(self.agents[self.controller])
        self.hosts = {name: FakeHost(Target(name), self._answers(name)) for name in facts}
        self.connector = FakeConnector(*self.hosts.values())

    def _answers(self, name: str) -> dict[tuple[str, ...], Any]:
        slurm = {
            ("scontrol",): self.slurm.scontrol,
            ("squeue",): self.slurm.squeue,
        }
        return {("python3",): self.agents[name].play, **(slurm if name == self.controller else {})}

    def look_again(self) -> None:
        """What was applied to the hosts is what their agents find from here on."""
        for agent in self.agents.values():
            agent.facts = replace(agent.facts, files=_files(agent), services=_services(agent))

    def applied(self, op: str = "apply") -> list[str]:
        """The hosts whose agents got a request of this kind."""
        return [name for name, agent in self.agents.items() if any(request["op"] == op for request in agent.requests)]

    def fleet(self, *names: str) -> Fleet:
        return Fleet({name: Target(name) for name in names or self.hosts}, self.connector)


def lab(text: str = LAB, **changes: dict[str, Any]) -> World:
    """The world of LAB; `changes` are facts of its hosts that differ."""
    spec = spec_of(text)
    return World(
        spec,
        {
            member.name: host_facts(member.name, str(member.address), **changes.get(member.name, {}))
            for member in members(spec)
        },
    )


def _files(agent: FakeAgent) -> dict[str, FileFact]:
    found = dict.fromkeys(fact_files(spec_of(LAB)), FileFact())
    found |= {path: FileFact(hashlib.sha256(content).hexdigest()) for path, content in agent.secrets.items()}
    for item in agent.items.values():
        if item["kind"] == "file" and item.get("content") is not None:
            found[item["path"]] = FileFact(hashlib.sha256(item["content"].encode()).hexdigest(), item["content"])
        if item["kind"] == "block" and item["path"] == HOSTS and item["content"]:
            text = f"127.0.0.1 localhost\n# BEGIN shoal {HOSTS_BLOCK}\n{item['content']}# END shoal {HOSTS_BLOCK}\n"
            found[HOSTS] = FileFact(hashlib.sha256(text.encode()).hexdigest(), text)
    return found


def _services(agent: FakeAgent) -> dict[str, str]:
    items = [item for item in agent.items.values() if item["kind"] == "service"]
    return {item["name"]: "active" if item["running"] else "inactive" for item in items}
