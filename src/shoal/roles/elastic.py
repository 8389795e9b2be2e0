"""What rents nodes and gives them back: on the controller, Shoal itself as a service, with the accounts at providers.

slurmctld starts a small program as its own user, which leaves a note; the service is root's and reads it. Keys of
accounts are in files that root alone reads: neither jobs nor slurmctld see them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.roles.forgotten import ACCOUNTS, STATUS, forgotten, forgotten_finding, machines_on
from shoal.roles.own_wheel import OWN_WHEEL, own_wheel
from shoal.roles.part import How, Part
from shoal.roles.rented import PROGRAMS
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.spec.rented import account_settings, accounts, rented_sets

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

SERVICE = "shoal-elastic"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
SETTINGS = "/etc/shoal/elastic"
SPEC = f"{SETTINGS}/spec.json"
KEYS = f"{SETTINGS}/keys"
IDENTITY = f"{SETTINGS}/id_ed25519"
"""With this the controller logs in to machines that it rented."""
SINCE = f"{SETTINGS}/since"
"""Since when the service here is in charge: of two for one cluster, the later one is."""
STATE = "/var/lib/shoal/elastic"
SUCCEEDED = f"{STATE}/succeeded"
"""Where it is, the service has seen that another one is in charge, and touches nothing."""
HOLD = f"{STATE}/hold"
"""While this is there and young, no machine becomes a node: keys are being changed."""
HOLD_SECONDS = 120
"""So old it counts no more: whoever made it was killed."""
REQUESTS = f"{STATE}/requests"
STARTS = f"{STATE}/starts"
"""Where jobs wait for nodes that are being woken."""
START_LOOK_SECONDS = 30
"""How often such a job looks for its nodes where the service says nothing."""
INSTALLED = "/opt/shoal"
WHEELS = f"{INSTALLED}/wheels"
WHEEL_SECRET = "shoal itself"
OLDEST_PYTHON = (3, 11)
VERBS = ("resume", "suspend", "resume-fail")
_HEAD = "# Written by shoal; changes here are lost.\n"

INSTALL = r"""
set -eu
place=$1 wheel=$2 extras=$3
shift 3
rm -rf "$place"
python3 -m venv "$place"
"$place/bin/pip" install --disable-pip-version-check --no-input --no-cache-dir --quiet "$wheel$extras" "$@"
touch "$place/.complete"
"""
"""A venv counts once its mark is there: what a failed run left without one is made again. No service runs from that."""

IN_CHARGE = r"""
now=$(date +%s)
for before in $(cat "$1" 2>/dev/null) $(sed -n 's/^since //p' "$2" 2>/dev/null); do
    [ "$now" -gt "$before" ] || now=$((before + 1))
done
echo "$now" > "$1" && rm -f "$2"
"""
"""Since now, and in any case later than before and than the one by which the service here was succeeded."""

FORGET = r"""
for old in "$1"/shoal-* "$2"/*; do
    case "$old" in "$3" | "$4") ;; *) rm -rf "$old" ;; esac
done
"""
"""What earlier versions left, once the service runs from the new one."""


class Elastic(Part):
    """The service that rents, where the spec has rented nodesets, and nothing of it where it has none."""

    files: Mapping[str, How] = {UNIT: "there", STATUS: "text", ACCOUNTS: "text"}
    services = (SERVICE,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("python3-venv", "openssh-client") if _rents(spec, member) else ()

    def given(self, spec: Spec) -> Mapping[str, str]:
        """The accounts' keys; and Shoal itself, which like a secret is sent only where its digest is another."""
        if not rented_sets(spec):
            return {}
        keys = {secret_name(name): account.key for name, account in accounts(spec).items() if account.key}
        return {**keys, WHEEL_SECRET: OWN_WHEEL}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if _rents(cluster.spec, member):
            return {Stage.SERVICES: _made(cluster.spec), Stage.CONTROLLER: _running(cluster.spec)}
        # slurmctld runs its programs until it has read that there are none.
        gone = {Stage.SERVICES: without_service(), Stage.NODES: without_programs()}
        return gone if has_service(cluster.facts[member.name]) else {}

    def farewell(self) -> Document:
        return (*without_service(), *without_programs())

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """A controller whose Python cannot run Shoal, and machines that nobody would give back any more."""
        name = cluster.controller.name
        facts = cluster.facts.get(name)
        left = forgotten(cluster.spec, facts)
        others = [(host, found) for host, found in cluster.facts.items() if host != name and has_service(found)]
        told = (
            *((forgotten_finding(cluster.spec, left, name),) if left else ()),
            *(_moving(host, found, name) for host, found in others),
        )
        if facts is None or not _rents(cluster.spec, cluster.controller) or _new_enough(facts.python):
            return told
        return (
            *told,
            Finding(
                "error",
                "the service that rents nodes needs Python 3.11 or newer",
                f"Python {facts.python}",
                "use a controller with Debian 12, Ubuntu 24.04 or newer",
                host=name,
            ),
        )


def secret_name(account: str) -> str:
    """The name of an account's key among secrets, as messages about it say it."""
    return f"providers.{account}.key"


def has_service(facts: Facts) -> bool:
    """Whether what rents is installed on a host."""
    unit = facts.files.get(UNIT)
    return unit is not None and unit.there


def _moving(host: str, facts: Facts, controller: str) -> Finding:
    """That another host rented for the cluster so far, and what becomes of that."""
    what = f"what rents moves from here to {controller}, with its ledger"
    machines = ", ".join(map(str, machines_on(facts)))
    if not machines:
        return Finding("info", what, host=host)
    fix = "wait until they have gone; `shoal up --allow-job-loss` gives them back at once"
    return Finding("error", f"{what}; jobs on machines that are rented would end", machines, fix, host=host)


def prefix(spec: Spec) -> str:
    """Where this Shoal is installed on the controller, with what the accounts need.

    It is named by all that is in it. So whatever changes is made beside the one that the service runs from, which goes
    on giving machines back if that fails.
    """
    beside = hashlib.sha256("\n".join((_extras(spec), *_packages(spec))).encode()).hexdigest()
    return f"{INSTALLED}/shoal-{own_wheel().mark}-{beside[:8]}"


def unit(spec: Spec) -> str:
    """The service. It changes the controller's own files when nodes come and go, so it is not shut away."""
    return (
        f"{_HEAD}"
        "[Unit]\n"
        "Description=Rents nodes when Slurm asks for them, and gives them back\n"
        "After=network-online.target munge.service slurmctld.service\n"
        "Wants=network-online.target\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStart={prefix(spec)}/bin/python -m shoal.elastic\n"
        # Whatever happens to it, machines bill on while it is not there.
        "Restart=always\n"
        "RestartSec=3\n"
        "UMask=0077\n"
        f"Environment=HOME=/root XDG_CACHE_HOME={STATE}/cache\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def accounts_json(spec: Spec) -> str:
    """What the service knows of accounts; where their keys are, and not the keys."""
    told = {
        name: {
            "kind": account.kind or name,
            "url": account.url or "",
            "settings": dict(account_settings(account)),
            "key": f"{KEYS}/{name}" if account.key else "",
        }
        for name, account in accounts(spec).items()
    }
    return json.dumps(told, indent=1, sort_keys=True) + "\n"


def start_program() -> str:
    """What slurmctld runs before each job, so that it starts when its nodes are there. See shoal.elastic.job_starts."""
    text = files("shoal").joinpath("elastic/start.sh").read_text(encoding="utf-8")
    return text.replace("@STARTS@", STARTS).replace("@LOOK@", str(START_LOOK_SECONDS))


def without_service() -> Document:
    """The service taken away, with its keys. The ledger stays: it says what was rented and what it cost."""
    away = (SETTINGS, REQUESTS, STATUS, SUCCEEDED)
    gone = " && ".join(f"! test -e {path}" for path in away)
    return (
        Service(SERVICE, enabled=False, running=False),
        File(UNIT),
        Command(
            "forget accounts at providers",
            ("sh", "-c", f"rm -rf {' '.join(away)} {INSTALLED}/shoal-* {WHEELS}"),
            unless=("sh", "-c", gone),
        ),
    )


def without_programs() -> Document:
    """What slurmctld started taken away."""
    away = Command(
        "forget programs that wake nodes", ("rm", "-rf", PROGRAMS, STARTS), unless=("test", "!", "-e", PROGRAMS)
    )
    return (away,)


def _made(spec: Spec) -> Document:
    wheel = f"{WHEELS}/{own_wheel().mark}/{own_wheel().name}"
    proxies = spec.proxy.variables if spec.proxy else {}
    environment = ("env", *(f"{name}={value}" for name, value in proxies.items())) if proxies else ()
    restarts = (SERVICE,)
    keys = [
        File(f"{KEYS}/{name}", SecretRef(secret_name(name)), mode=0o600, restarts=restarts)
        for name, account in accounts(spec).items()
        if account.key
    ]
    return (
        Directory("/etc/shoal"),
        Directory(SETTINGS, mode=0o700),
        Directory(KEYS, mode=0o700),
        Directory("/var/lib/shoal"),
        Directory(STATE),
        Command(
            "put its service in charge",
            ("sh", "-c", IN_CHARGE, "sh", SINCE, SUCCEEDED),
            unless=("sh", "-c", 'test -s "$1" && ! test -e "$2"', "sh", SINCE, SUCCEEDED),
            restarts=restarts,
        ),
        Directory(REQUESTS, owner="slurm", group="slurm", mode=0o700),
        Directory(STARTS, owner="slurm", group="slurm", mode=0o700),
        Directory(PROGRAMS),
        File(f"{PROGRAMS}/start", start_program(), mode=0o755),
        *(File(f"{PROGRAMS}/{verb}", _program(), mode=0o755) for verb in VERBS),
        Command(
            "make a key for rented machines",
            ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"shoal {spec.cluster}", "-f", IDENTITY),
            unless=("test", "-s", f"{IDENTITY}.pub"),
        ),
        Directory(INSTALLED),
        Directory(f"{WHEELS}/{own_wheel().mark}"),
        File(wheel, SecretRef(WHEEL_SECRET, own_wheel().sha256)),
        # Before the accounts: a service that starts again after this failed must find none that it has no packages for.
        Command(
            "install Shoal",
            (*environment, "sh", "-c", INSTALL, "sh", prefix(spec), wheel, _extras(spec), *_packages(spec)),
            unless=("test", "-e", f"{prefix(spec)}/.complete"),
            timeout=1800.0,
            restarts=restarts,
            fix="see that the host reaches a package index, or set `proxy`",
        ),
        *keys,
        File(ACCOUNTS, accounts_json(spec), mode=0o600, restarts=restarts),
        File(SPEC, spec.model_dump_json(exclude_defaults=True, indent=1) + "\n", mode=0o600, restarts=restarts),
        File(UNIT, unit(spec), restarts=restarts),
    )


def _extras(spec: Spec) -> str:
    return "[gcp]" if any(account.kind == "gcp" for account in accounts(spec).values()) else ""


def _packages(spec: Spec) -> tuple[str, ...]:
    """Providers of somebody else's."""
    return tuple(sorted({account.package for account in accounts(spec).values() if account.package}))


def _running(spec: Spec) -> Document:
    wheels = f"{WHEELS}/{own_wheel().mark}"
    kept = (INSTALLED, WHEELS, prefix(spec), wheels)
    return (
        Service(SERVICE),
        Command(
            "forget older versions of Shoal",
            ("sh", "-c", FORGET, "sh", *kept),
            unless=("sh", "-c", 'test "$(ls -d "$1"/shoal-* "$2"/* | wc -l)" -le 2', "sh", *kept),
        ),
    )


def _program() -> str:
    """What slurmctld starts: the same under three names."""
    return files("shoal").joinpath("elastic/request.py").read_text(encoding="utf-8")


def _rents(spec: Spec, member: Member) -> bool:
    return "controller" in member.roles and bool(rented_sets(spec))


def _new_enough(python: str) -> bool:
    found = tuple(int(part) for part in python.split(".")[:2] if part.isdigit())
    return len(found) < 2 or found >= OLDEST_PYTHON
