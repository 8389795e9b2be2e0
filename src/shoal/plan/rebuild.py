"""What a cluster keeps from `shoal up` to `shoal down`: its controller, and where its Slurm comes from.

Jobs and rented machines know only their controller, and two rental services would release each other's machines. Jobs
end with the Slurm and the keys that they began with. A file that changes one of these is rejected before anything
changes, with the commands that take the cluster down and build it again with its records. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.accounting import DATABASE_PROGRAM
from shoal.roles.current_conf import read_current_conf
from shoal.roles.elastic import LEDGER, STATE, has_service
from shoal.roles.host_record import is_controller, read_host_record
from shoal.roles.orphaned_rentals import reported_rentals
from shoal.roles.slurm_source import installed_slurm
from shoal.roles.slurm_tree import uses_tree
from shoal.slurm.accounting import BACKUPS
from shoal.spec.finding import Finding
from shoal.spec.members import members, rented_sets
from shoal.spec.model import Spec

SAVE_RECORDS = f"""\
  shoal exec -w HOST -- {DATABASE_PROGRAM} backup move
  shoal ssh HOST sudo tar -C / -c {BACKUPS[1:]} > accounting.tar
"""
RESTORE_RECORDS = """\
  shoal ssh HOST sudo tar -C / -x < accounting.tar
  shoal restore   # lists the backups
  shoal restore NAME   # the newest that ends in -move.sql.gz
"""
SAVE_LEDGER = f"""\
  shoal exec -w HOST -- systemctl stop {SERVICE}
  shoal ssh HOST sudo tar -C {STATE} -c ledger.db > ledger.tar
"""
RESTORE_LEDGER = f"""\
  shoal exec -w HOST -- systemctl stop {SERVICE}
  shoal exec -w HOST -- sh -c 'rm -f {LEDGER}*'
  shoal ssh HOST sudo tar -C {STATE} -x < ledger.tar
  shoal exec -w HOST -- systemctl start {SERVICE}
"""


@dataclass(frozen=True)
class StandingCluster:
    """The cluster of this name that stands, where the file differs from it in what a cluster keeps."""

    controller: str
    what: str
    line: str
    """What the file said."""


def controls(spec: Spec, facts: Facts) -> bool:
    """Whether a host is the controller of the spec's cluster."""
    record = read_host_record(facts)
    return record is not None and record.cluster == spec.cluster and is_controller(facts)


def former_controller(spec: Spec, host: str) -> StandingCluster:
    """The cluster where another host than the spec's controller is its controller."""
    what = f"is the controller of cluster {spec.cluster}, the file says {members(spec)[0].name}"
    return StandingCluster(host, what, f"{host} as `controller`")


def standing_cluster(spec: Spec, facts: Mapping[str, Facts]) -> StandingCluster | None:
    """The cluster that stands, where the spec differs from it in what a cluster keeps."""
    controller = members(spec)[0].name
    is_new = controller not in facts or not controls(spec, facts[controller])
    for name, fact in facts.items():
        # A login host with the controller's hostname looks like it, but for the rental service.
        if name != controller and controls(spec, fact) and (is_new or has_service(fact)):
            return former_controller(spec, name)
    source, old = ("shoal", "packages") if uses_tree(spec) else ("packages", "shoal")
    if controller not in facts or not any(_slurm_source(spec, fact) == old for fact in facts.values()):
        return None
    what = f"has Slurm from {old}, the file says `slurm: {{from: {source}}}`"
    return StandingCluster(controller, what, f"`slurm: {{from: {old}}}`")


def _slurm_source(spec: Spec, facts: Facts) -> str:
    """Where the Slurm of a host of the cluster comes from; empty where it has none, or no units that tell."""
    record, installed = read_host_record(facts), installed_slurm(facts)
    if record is None or record.cluster != spec.cluster or facts.init != "systemd":
        return ""
    if installed.ours:
        return "shoal"
    return "packages" if any(map(facts.is_active, installed.daemons)) else ""


def rebuild_finding(spec: Spec, standing: StandingCluster, controller: Facts, jobs: str) -> Finding:
    """The error for it, with what runs there and the commands."""
    rentals = ", ".join(map(str, reported_rentals(controller)))
    found = f"{jobs}; rented: {rentals}" if rentals else jobs
    what = f"{standing.what}, and a cluster keeps that until `shoal down`"
    nodes = [name for name, node in read_current_conf(controller).nodes.items() if not node.cloud]
    return Finding("error", what, found, rebuild_commands(spec, standing, nodes), host=standing.controller)


def rebuild_commands(spec: Spec, standing: StandingCluster, nodes: Iterable[str]) -> str:
    """The commands that end the cluster that stands, build the spec's, and bring the records along."""
    old, new, node_names = standing.controller, members(spec)[0], compress(nodes)
    made = {member.name for member in members(spec) if member.provider is not None}  # `shoal down` deletes them
    keeps_queue = old == new.name and new.name not in made
    drain = f"  shoal node drain {node_names}\n" if node_names else ""
    resume = f"  shoal node resume {node_names}\n" if node_names and keeps_queue else ""
    save = restore = ""
    if spec.accounting is not None:
        old_host, new_host = spec.accounting.host or old, spec.accounting.host or new.name
        if old_host != new_host or new_host in made:
            save += SAVE_RECORDS.replace("HOST", old_host)
            restore += RESTORE_RECORDS.replace("HOST", new_host)
    if rented_sets(spec) and not keeps_queue:
        save += SAVE_LEDGER.replace("HOST", old)
        restore += RESTORE_LEDGER.replace("HOST", new.name)
    note = "" if keeps_queue else " (jobs that wait are lost: submit them again)"
    text = (
        f"with {standing.line}, run{note}:\n{drain}  shoal jobs   # wait until none runs\n{save}  shoal down\n"
        f"then, with the new file:\n  shoal up\n{restore}{resume}"
    )
    return text.rstrip()
