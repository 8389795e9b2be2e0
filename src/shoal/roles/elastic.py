"""The rental service on the controller: Shoal itself, with the provider accounts.

slurmctld starts a small program as its own user, which queues a request; the service runs as root and reads it. Keys of
provider accounts are in files that only root can read: neither jobs nor slurmctld see them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from shoal.agent.document import Block, Command, Directory, Document, File, Packages, SecretRef, Service, daemon_unit
from shoal.agent.facts import Facts
from shoal.cloud.providers.prices import catalog_prices
from shoal.cloud.status_file import PUBLIC_REPORT
from shoal.network.tunnel import AUTHORIZED
from shoal.remote import program_text, python_command, shell_command
from shoal.remote.power_request import REQUESTS, VERBS
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.environments import install_venv
from shoal.roles.orphaned_rentals import ACCOUNTS, STATUS, orphan_finding, orphaned_rentals
from shoal.roles.rented import PROGRAMS
from shoal.roles.slurm_tree import archive_paths, archives_for_rentals, uses_tree
from shoal.roles.wheel import SHOAL_WHEEL, build_wheel
from shoal.spec.files import dump_contents
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import provider_accounts, rented_sets
from shoal.spec.model import Spec
from shoal.spec.rental import account_settings

UNIT = f"/etc/systemd/system/{SERVICE}.service"
SETTINGS = "/etc/shoal/elastic"
SPEC = f"{SETTINGS}/spec.json"
CONTENTS = f"{SETTINGS}/files.json"
"""What is in the files of the spec's `files`, for machines that join."""
KEYS = f"{SETTINGS}/keys"
IDENTITY = f"{SETTINGS}/id_ed25519"
"""The key with which the controller logs in to rented machines, and to permanent hosts when rented nodes change."""
PUBLIC_KEY = f"{IDENTITY}.pub"
BLOCK = "rental service"
"""The name of the lines in a permanent host's authorized_keys."""
LEADER_SINCE = f"{SETTINGS}/since"
"""Since when this service is the leader: of two services for one cluster, the later one leads."""
STATE = "/var/lib/shoal/elastic"
LEDGER = f"{STATE}/ledger.db"
SUPERSEDED = f"{STATE}/succeeded"
"""Exists when the service has seen that another one leads; it then changes nothing."""
HOLD = f"{STATE}/hold"
"""While this file is young, no machine becomes a node: keys are being rotated."""
HOLD_MAX_AGE_S = 120
"""An older file is ignored: the command that made it was killed."""
STARTS = f"{STATE}/starts"
"""Where jobs wait for nodes that are being resumed."""
START_CHECK_INTERVAL_S = 30
"""How often such a job checks its nodes without a message from the service."""
INSTALLED = "/opt/shoal"
WHEELS = f"{INSTALLED}/wheels"
ARCHIVES = f"{STATE}/cache/shoal/slurm"
"""Slurm for rented machines, in the service's own cache."""
PRICES = f"{STATE}/cache/shoal/prices.csv"
"""Prices from catalogs that this machine read, in the service's own cache: it reads them anew for each order."""
WHEEL_SECRET = "shoal itself"
EXTRAS = ("gcp", "nebius")
"""The kinds of providers whose client needs a package of its own: the extra of that name."""
OLDEST_PYTHON = (3, 11)

REMOVE_OLD_VERSIONS = r"""
for old in "$1"/shoal-* "$2"/*; do
    case "$old" in "$3" | "$4") ;; *) rm -rf "$old" ;; esac
done
"""
"""Removes earlier versions, once the service runs from the new one."""


class ElasticComponent(Component):
    """The rental service, where the spec has rented nodesets."""

    files: Mapping[str, FileQuery] = {
        UNIT: "there",
        **dict.fromkeys((STATUS, ACCOUNTS, PUBLIC_KEY, AUTHORIZED), "text"),
    }
    services = (SERVICE,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("python3-venv", "openssh-client") if _rents(spec, member) else ()

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return dict.fromkeys(archive_paths(ARCHIVES), "hash") if uses_tree(spec) and rented_sets(spec) else {}

    def user_secrets(self, spec: Spec) -> Mapping[str, str]:
        """The keys of provider accounts; and Shoal's wheel, which is sent only when its digest changes."""
        if not rented_sets(spec):
            return {}
        keys = {secret_name(name): account.key for name, account in provider_accounts(spec).items() if account.key}
        return {**keys, WHEEL_SECRET: SHOAL_WHEEL}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """A key that the other hosts must authorize. It never leaves the controller."""
        if not _rents(spec, member) or facts.text(PUBLIC_KEY).strip():
            return ()
        make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"shoal {spec.cluster}", "-f", IDENTITY)
        return (
            Packages(("openssh-client",)),
            Directory("/etc/shoal"),
            Directory(SETTINGS, mode=0o700),
            Command("make a key for rented machines", make, unless=("test", "-s", PUBLIC_KEY)),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        access = {Stage.BASE: document} if (document := service_access(cluster, member)) else {}
        if _rents(cluster.spec, member):
            archives = archives_for_rentals(cluster.facts[member.name], ARCHIVES) if uses_tree(cluster.spec) else ()
            files = (*archives, *_service_files(cluster.spec))
            return {**access, Stage.SERVICES: files, Stage.CONTROLLER: _service_start(cluster.spec)}
        # slurmctld starts the programs until it has read a configuration without them.
        removed = {Stage.SERVICES: service_removal(), Stage.NODES: program_removal()}
        return {**access, **removed} if has_service(cluster.facts[member.name]) else access

    def removal(self) -> Document:
        return (*service_removal(), *program_removal(), Block(AUTHORIZED, BLOCK, ""))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """A controller whose Python is too old for Shoal, and rentals that no service would release any more."""
        name = cluster.controller.name
        facts = cluster.facts.get(name)
        orphans = orphaned_rentals(cluster.spec, facts)
        findings = [orphan_finding(cluster.spec, orphans, name)] if orphans else []
        python = [int(number) for number in facts.python.split(".")[:2] if number.isdigit()] if facts else []
        if facts and rented_sets(cluster.spec) and len(python) == 2 and tuple(python) < OLDEST_PYTHON:
            what = "the rental service needs Python 3.11 or newer"
            fix = "use a controller with Debian 12, Ubuntu 24.04 or newer"
            findings.append(Finding("error", what, f"Python {facts.python}", fix, host=name))
        return tuple(findings)


def secret_name(account: str) -> str:
    """The name of an account's key among secrets, as messages show it."""
    return f"providers.{account}.key"


def has_service(facts: Facts) -> bool:
    """Whether the rental service is installed on a host."""
    return facts.has_file(UNIT)


def service_access(cluster: Cluster, member: Member) -> Document:
    """Lets the rental service log in to a permanent host, from the controller only; or no longer."""
    permanent = bool(rented_sets(cluster.spec)) and not member.rented and member.name != cluster.controller.name
    key = cluster.controller_facts.text(PUBLIC_KEY).strip()
    if not permanent or not key:
        is_there = f"# BEGIN shoal {BLOCK}\n" in cluster.facts[member.name].text(AUTHORIZED)
        return (Block(AUTHORIZED, BLOCK, ""),) if is_there else ()
    make = ("install", "-m", "0600", "/dev/null", AUTHORIZED)
    line = f'restrict,from="{cluster.addresses.get(cluster.controller.name, "")}" {key}\n'
    return (
        Directory("/root/.ssh", mode=0o700),
        Command("authorized keys", make, unless=("test", "-e", AUTHORIZED)),
        Block(AUTHORIZED, BLOCK, line),
    )


def install_prefix(spec: Spec) -> str:
    """Where this version of Shoal is installed on the controller, with the packages that accounts need.

    Its name depends on everything in it. So a change is installed beside the version that the service runs, which goes
    on releasing machines if the installation fails.
    """
    digest = hashlib.sha256("\n".join((_extras(spec), *_packages(spec))).encode()).hexdigest()
    return f"{INSTALLED}/shoal-{build_wheel().mark}-{digest[:8]}"


def unit(spec: Spec) -> str:
    """The unit. The service changes the controller's files when nodes join or leave, so it is not sandboxed."""
    order = {"After": "network-online.target munge.service slurmctld.service", "Wants": "network-online.target"}
    return daemon_unit(
        "Rents nodes when Slurm asks for them, and gives them back",
        f"{install_prefix(spec)}/bin/python -m shoal.elastic",
        3,  # soon: machines bill on while the service is down
        order,
        {"UMask": "0077", "Environment": f"HOME=/root XDG_CACHE_HOME={STATE}/cache"},
    )


def accounts_json(spec: Spec) -> str:
    """The provider accounts for the service, with the paths of their keys."""
    data = {
        name: {
            "kind": account.kind or name,
            "url": account.url or "",
            "settings": dict(account_settings(account)),
            "key": f"{KEYS}/{name}" if account.key else "",
        }
        for name, account in provider_accounts(spec).items()
    }
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def start_program() -> str:
    """The program that slurmctld runs before each job: it waits for the job's nodes."""
    return program_text("job_start.sh", STARTS=STARTS, LOOK=START_CHECK_INTERVAL_S)


def service_removal() -> Document:
    """Removes the service and its keys. The ledger stays: it records rentals and their cost."""
    paths = (SETTINGS, REQUESTS, STATUS, SUPERSEDED, str(PUBLIC_REPORT))
    is_absent = " && ".join(f"! test -e {path}" for path in paths)
    away = f"rm -rf {' '.join(paths)} {INSTALLED}/shoal-* {WHEELS}"
    forget = Command("forget accounts at providers", ("sh", "-c", away), unless=("sh", "-c", is_absent))
    return (Service(SERVICE, enabled=False, running=False), File(UNIT), forget)


def program_removal() -> Document:
    """Removes the programs that slurmctld starts."""
    away = ("rm", "-rf", PROGRAMS, STARTS)
    return (Command("forget programs that wake nodes", away, unless=("test", "!", "-e", PROGRAMS)),)


def _service_files(spec: Spec) -> Document:
    wheel = f"{WHEELS}/{build_wheel().mark}/{build_wheel().name}"
    prefix, restarts = install_prefix(spec), (SERVICE,)
    accounts = [name for name, account in provider_accounts(spec).items() if account.key]
    return (
        Directory("/etc/shoal"),
        Directory(SETTINGS, mode=0o700),
        Directory(KEYS, mode=0o700),
        Directory("/var/lib/shoal"),
        Directory(STATE),
        Command(
            "put its service in charge",
            shell_command(program_text("rental_lead.sh"), LEADER_SINCE, SUPERSEDED),
            unless=shell_command('test -s "$1" && ! test -e "$2"', LEADER_SINCE, SUPERSEDED),
            restarts=restarts,
        ),
        Directory(REQUESTS, owner="slurm", group="slurm", mode=0o700),
        Directory(STARTS, owner="slurm", group="slurm", mode=0o700),
        Directory(PROGRAMS),
        File(f"{PROGRAMS}/start", start_program(), mode=0o755),
        *(File(f"{PROGRAMS}/{verb}", program_text("power_request"), mode=0o755) for verb in VERBS),
        Directory(INSTALLED),
        Directory(f"{WHEELS}/{build_wheel().mark}"),
        File(wheel, SecretRef(WHEEL_SECRET, build_wheel().sha256)),
        # Before the accounts: if this fails, a restarted service must not find accounts without their packages.
        install_venv("install Shoal", spec, prefix, f"{wheel}{_extras(spec)}", *_packages(spec), restarts=restarts),
        *(File(f"{KEYS}/{x}", SecretRef(secret_name(x)), mode=0o600, restarts=restarts) for x in accounts),
        File(ACCOUNTS, accounts_json(spec), mode=0o600, restarts=restarts),
        File(CONTENTS, _contents(spec) if spec.files else None, mode=0o600, restarts=restarts),
        File(SPEC, _spec_json(spec), mode=0o600, restarts=restarts),
        File(PRICES, _catalog_prices(spec) or None, mode=0o600),
        File(UNIT, unit(spec), restarts=restarts),
    )


def _spec_json(spec: Spec) -> str:
    return spec.model_dump_json(exclude_defaults=True, by_alias=True, indent=1) + "\n"


def _contents(spec: Spec) -> str:
    return json.dumps(dump_contents(spec.files), indent=1, sort_keys=True) + "\n"


def _catalog_prices(spec: Spec) -> str:
    """Prices of the types that the file rents, as in the cache of the machine that runs `shoal up`."""
    kinds = {name: account.kind or name for name, account in provider_accounts(spec).items()}
    offers = [offer for nodeset in rented_sets(spec).values() for offer in nodeset.offers]
    return catalog_prices({(kinds[offer.provider], offer.type) for offer in offers if offer.type})


def _extras(spec: Spec) -> str:
    """The parts of Shoal that the clients of these providers need."""
    kinds = {account.kind for account in provider_accounts(spec).values()}
    needed = [extra for extra in EXTRAS if extra in kinds]
    return f"[{','.join(needed)}]" if needed else ""


def _packages(spec: Spec) -> tuple[str, ...]:
    """Third-party provider packages."""
    return tuple(sorted({account.package for account in provider_accounts(spec).values() if account.package}))


def _service_start(spec: Spec) -> Document:
    wheels = f"{WHEELS}/{build_wheel().mark}"
    arguments = (INSTALLED, WHEELS, install_prefix(spec), wheels)
    return (
        Service(SERVICE),
        # After it has started with new keys and settings: the old ones would only block again.
        Command(
            "unblock rentals that waited for `shoal up`",
            python_command("rental_blocks", LEDGER, "remove"),
            unless=python_command("rental_blocks", LEDGER),
        ),
        Command(
            "forget older versions of Shoal",
            shell_command(REMOVE_OLD_VERSIONS, *arguments),
            unless=shell_command('test "$(ls -d "$1"/shoal-* "$2"/* | wc -l)" -le 2', *arguments),
        ),
    )


def _rents(spec: Spec, member: Member) -> bool:
    return "controller" in member.roles and bool(rented_sets(spec))
