"""The record on every host of the cluster it belongs to, and which hosts of a file belong to another cluster. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal.agent.document import Directory, Document, File
from shoal.agent.facts import Facts
from shoal.roles.component import Cluster, FileQuery
from shoal.roles.current_conf import SLURM_CONF
from shoal.slurm.conf import STATE_DIRECTORY
from shoal.slurm.parsed_conf import is_written_by_shoal, parse_conf
from shoal.spec.model import Spec
from shoal.storage.sshfs import HOST_KEY, strip_comment

HOST_RECORD = "/etc/shoal/member.json"
STATE_OWNER = f"{STATE_DIRECTORY}/clustername"
"""Where slurmctld keeps the name of the cluster whose state it has. It does not start under another name."""
RECORD_FILES: Mapping[str, FileQuery] = {HOST_RECORD: "text", SLURM_CONF: "text", HOST_KEY: "text"}
"""The files that tell whose host it is."""


@dataclass(frozen=True)
class HostRecord:
    """The cluster that a host belongs to."""

    cluster: str
    controller: str
    address: str = ""
    """Of the controller, on the cluster's network."""
    id: str = ""
    """Made from the controller's host key when the cluster was built: two clusters may have the same name."""

    def __str__(self) -> str:
        return f"{self.cluster} (controller {', '.join(filter(None, (self.controller, self.address)))})"


def host_record_items(cluster: Cluster) -> Document:
    """The record, the same on all hosts."""
    controller = cluster.controller.name
    record = HostRecord(
        cluster.spec.cluster,
        controller,
        cluster.addresses.get(controller, ""),
        _cluster_id(cluster.spec.cluster, cluster.controller_facts),
    )
    text = json.dumps(asdict(record), indent=1, sort_keys=True) + "\n"
    return (Directory("/etc/shoal"), File(HOST_RECORD, text))


def read_host_record(facts: Facts) -> HostRecord | None:
    """The record of a host; None where it belongs to no cluster."""
    try:
        data = json.loads(facts.text(HOST_RECORD))
        return HostRecord(**{name: str(data.get(name, "")) for name in HostRecord.__dataclass_fields__})
    except (ValueError, AttributeError):
        return None


def is_controller(facts: Facts) -> bool:
    """Whether the host is the controller of its cluster."""
    conf = facts.text(SLURM_CONF)
    if not is_written_by_shoal(conf):
        return False
    return parse_conf(conf).settings.get("slurmctldhost", "").partition("(")[0] == facts.hostname


def foreign_records(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, HostRecord]:
    """The hosts that belong to another cluster, or to one of this name with a controller that the file lacks."""
    records = {name: record for name, fact in facts.items() if (record := read_host_record(fact)) is not None}
    own = {name: record for name, record in records.items() if record.cluster == spec.cluster}
    ids = {host_id(fact) for fact in facts.values()}
    ids |= {record.id for name, record in own.items() if is_controller(facts[name])}
    return {name: record for name, record in records.items() if name not in own or record.id not in ids}


def state_of_other_cluster(cluster: Cluster) -> str:
    """The cluster whose state slurmctld would find: a host keeps it after `down`. Of a running one it is nobody else's.

    From 24.11 on, Slurm writes its number of the cluster after the name: `reef|536`.
    """
    facts = cluster.controller_facts
    name = facts.text(STATE_OWNER).partition("|")[0].strip()
    return "" if name == cluster.spec.cluster or facts.is_active("slurmctld") else name


def _cluster_id(cluster: str, controller: Facts) -> str:
    """The id in the controller's own record: its host key may have changed since."""
    record = read_host_record(controller)
    if record and record.id and record.cluster == cluster and is_controller(controller):
        return record.id
    return host_id(controller)


def host_id(facts: Facts) -> str:
    """From its host key: its name may change, and others may have the same."""
    key = strip_comment(facts.text(HOST_KEY)) or facts.hostname
    return hashlib.sha256(key.encode()).hexdigest()[:16]
