"""Hosts that belong to another cluster: who has them, which jobs run there, and how a cluster takes them over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.agent.client import FactsRequest
from shoal.agent.document import File
from shoal.agent.facts import FileFact
from shoal.errors import HostError, ShoalError
from shoal.hosts.api import Host
from shoal.plan.connections import Fleet
from shoal.plan.model import Change, Cost
from shoal.plan.observe import Observation, slurm_view
from shoal.plan.progress import ProgressReporter
from shoal.roles.documents import removal
from shoal.roles.host_record import RECORD_FILES, HostRecord, foreign_records, is_controller, read_host_record
from shoal.roles.registry import cluster_services
from shoal.roles.slurm_source import other_slurm
from shoal.roles.slurm_tree import DAEMONS
from shoal.roles.wireguard import missing_wireguard
from shoal.slurm.state import ACTIVE_STATES, JobState
from shoal.spec.finding import Finding
from shoal.spec.members import members
from shoal.spec.model import Spec

TAKE_OVER_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class ForeignHost:
    """A host of the file that another cluster has."""

    name: str
    cluster: str
    """The cluster of the file."""
    record: HostRecord
    controls: bool
    """It is the controller of that cluster."""
    renamed: bool = False
    """It is the controller of the file too: the cluster got another name there."""
    answers: bool = False
    """Whether slurmctld of that cluster answers the host."""
    node: str = ""
    """Its name in that cluster."""
    jobs: tuple[JobState, ...] = ()
    """The jobs that run on it; all that run, where all need it."""
    services: tuple[str, ...] = ()
    """What the other hosts of that cluster need it for."""

    @property
    def jobs_text(self) -> str:
        lost = f", and it loses {', '.join(self.services)}" if self.services and not self.answers else ""
        return f"{_jobs_text(self.answers, self.jobs)}{lost}"

    def finding(self, take_over: bool = False) -> Finding:
        """What is wrong with it; with `take_over`, what happens to it."""
        old = self.record.cluster
        if self.renamed:
            what = f"the running cluster is called {old}, the file says {self.cluster}, and a cluster keeps its name"
            fix = (
                f"write `cluster: {old}` again. To build it anew as {self.cluster}, first run `shoal down` with "
                f"`cluster: {old}`: that ends its jobs, and records of accounting stay under {old}"
            )
            return Finding("error", what, self.jobs_text, fix, host=self.name, path="cluster")
        if self.controls:
            fix = f"run `shoal down` with the file of {old} first, or take {self.name} out of this file"
            return Finding("error", f"is the controller of cluster {self.record}", self.jobs_text, fix, host=self.name)
        if self.services and self.answers:
            what = f"has {', '.join(self.services)} of cluster {self.record}"
            fix = (
                f"name another host for it in the file of {old} and run `shoal up` there, or run `shoal down` with "
                f"that file; or take {self.name} out of this file"
            )
            return Finding("error", what, self.jobs_text, fix, host=self.name)
        if take_over:
            return Finding("warning", f"is taken over from cluster {self.record}", self.jobs_text, host=self.name)
        fix = (
            f"take {self.name} out of this file; or run `shoal node remove {self.node or self.name}` with the file of "
            f"{old}; or use `shoal up --take-over`, which ends the jobs on it"
        )
        if old == self.cluster:
            fix = (
                f"if that is this cluster, it keeps {self.record.controller} as `controller` until `shoal down`: see "
                f"docs/rebuild.md\nif it is another of this name, {fix}"
            )
        return Finding("error", f"belongs to cluster {self.record}", self.jobs_text, fix, host=self.name)

    def change(self) -> Change:
        """The take-over as a line of a plan."""
        return Change(self.name, "host", f"take over from cluster {self.record}; {self.jobs_text}", Cost.JOBS)


def _jobs_text(answers: bool, jobs: Sequence[JobState]) -> str:
    if not answers:
        return "its controller does not answer: jobs may run there"
    if not jobs:
        return "no job runs there"
    return f"running: job {', '.join(f'{job.id} ({job.user})' for job in jobs)}"


async def running_jobs_text(host: Host) -> str:
    """Which jobs run in the cluster of a host."""
    view = await slurm_view(host)
    return _jobs_text(view.running, [job for job in view.jobs if job.state in ACTIVE_STATES])


async def unusable_host_findings(spec: Spec, observed: Observation, fleet: Fleet) -> list[Finding]:
    """The hosts that cannot become what the file says: they have another Slurm, with its jobs, or lack WireGuard."""
    others = other_slurm(spec, observed.facts)

    async def inspect(name: str) -> Finding:
        what, fix = others[name]
        jobs = "none of its daemons runs"
        if any(map(observed.facts[name].is_active, DAEMONS)):
            jobs = await running_jobs_text(await fleet.host(name))
        return Finding("error", what, jobs, fix, host=name, path="slurm.from")

    return [*(await fleet.each(others, inspect)).values(), *missing_wireguard(spec, observed.facts)]


async def foreign_hosts(spec: Spec, observed: Observation, fleet: Fleet) -> tuple[ForeignHost, ...]:
    """The hosts that other clusters have. Of a cluster of the same name only while its controller answers: else this
    file has another controller because the former one is gone."""
    permanent = {member.name for member in members(spec)}
    facts = {name: fact for name, fact in observed.facts.items() if name in permanent}
    records = foreign_records(spec, facts)
    controller = members(spec)[0].name

    async def inspect(name: str) -> ForeignHost:
        fact, record = facts[name], records[name]
        view = await slurm_view(await fleet.host(name))
        node = next((node.name for node in view.nodes.values() if node.hostname == fact.hostname), "")
        controls, services = is_controller(fact), cluster_services(fact)
        all_need_it = controls or services
        jobs = [job for job in view.jobs if job.state in ACTIVE_STATES and (all_need_it or node in job.node_names)]
        renamed = controls and name == controller
        return ForeignHost(name, spec.cluster, record, controls, renamed, view.running, node, tuple(jobs), services)

    hosts = tuple((await fleet.each(records, inspect)).values())
    if any(host.renamed for host in hosts):
        return tuple(host for host in hosts if host.renamed)
    return tuple(host for host in hosts if host.answers or host.record.cluster != spec.cluster)


def reject_foreign(hosts: Iterable[ForeignHost], take_over: bool) -> None:
    """Raise ShoalError for hosts of other clusters, but for those that may be taken over."""
    reject_hosts(finding for host in hosts if (finding := host.finding(take_over)).level == "error")


def reject_hosts(found: Iterable[Finding]) -> None:
    """Raise ShoalError for hosts that cannot become members as they are."""
    if findings := list(found):
        problems = "\n".join(f"{finding.host}: {finding.what} ({finding.found})" for finding in findings)
        fixes = dict.fromkeys(line for finding in findings for line in finding.fix.splitlines())
        raise ShoalError(f"{problems}\nnothing was changed", hint="\n".join(fixes))


def without_other_clusters(observed: Observation, hosts: Iterable[ForeignHost]) -> Observation:
    """The hosts as they are once they are taken over: their former clusters decide nothing about this one."""
    removed = {item.path for item in removal() if isinstance(item, File)}
    facts = dict(observed.facts)
    for host in hosts:
        files = {path: FileFact() if path in removed else file for path, file in facts[host.name].files.items()}
        facts[host.name] = replace(facts[host.name], files=files)
    return replace(observed, facts=facts)


async def take_over_hosts(hosts: Sequence[ForeignHost], fleet: Fleet, progress: ProgressReporter) -> None:
    """End the jobs of the other clusters on these hosts, and remove these clusters from them."""

    async def end_jobs(host: ForeignHost) -> None:
        reason = f"shoal: taken over by cluster {host.cluster}"
        connection = await fleet.host(host.name)
        result = await connection.run(
            ("sh", "-c", _END_JOBS, "sh", host.node if host.answers else "", reason), timeout=TAKE_OVER_TIMEOUT_S
        )
        if result.status != 0:
            cause = f"cannot end the jobs of cluster {host.record}: {result.error_text.strip()}"
            raise HostError(host.name, cause, hint="end them on the host, then run `shoal up --take-over` again")

    by_name = {host.name: host for host in hosts}
    with progress.phase("take over", len(hosts)) as phase:
        await fleet.each(by_name, lambda name: end_jobs(by_name[name]))
        names = [name for name in by_name if name not in fleet.failures]
        await fleet.converge_all(dict.fromkeys(names, removal()), {}, phase, "shoal up --take-over")


async def records_of_others(cluster: str, fleet: Fleet, names: Iterable[str]) -> dict[str, HostRecord]:
    """Those of the hosts that belong to a cluster of another name."""

    async def read(name: str) -> HostRecord | None:
        return read_host_record(await (await fleet.agent(name)).facts(FactsRequest(files=RECORD_FILES)))

    records = await fleet.each(names, read)
    return {name: record for name, record in records.items() if record and record.cluster != cluster}


_END_JOBS = r"""
node=$1
mark() { timeout 20 scontrol update nodename="$node" state="$1" reason="$2" > /dev/null; }
# Down: Slurm requeues its jobs elsewhere, or ends them with SIGTERM, and SIGKILL after KillWait. Drained: slurmd, which
# still runs, would bring the node back into service.
if [ -n "$node" ] && mark drain "$2" && mark down "$2"; then
    for _ in $(seq 120); do
        pgrep -f '[s]lurmstepd: \[' > /dev/null || break
        sleep 1
    done
fi
pids=$(timeout 20 scontrol listpids 2> /dev/null | awk '$1 ~ /^[0-9]+$/ && $1 > 1 {print $1}')
[ ! -d /run/systemd/system ] || systemctl stop slurmd
[ -z "$pids" ] || kill -KILL $pids 2> /dev/null
pkill -KILL -f '[s]lurmstepd: \['
exit 0
"""
"""Steps outlive slurmd, and would go on beside the jobs of the new cluster."""
