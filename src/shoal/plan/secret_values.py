"""The values of secrets, fetched at the last moment from the host that keeps one, or from the user."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from shoal.agent.document import Command, Document, File, Item, SecretRef
from shoal.errors import UsageError
from shoal.plan.connections import Fleet
from shoal.plan.model import HostPlan
from shoal.roles import slurm_tree
from shoal.roles.component import SharedSecret
from shoal.roles.runtime_archive import RUNTIME_ARCHIVE, runtime_archive
from shoal.roles.wheel import SHOAL_WHEEL, build_wheel
from shoal.spec.finding import Finding
from shoal.spec.local_files import resolve_secret

OWN_FILES: Mapping[str, Callable[[], bytes]] = {
    SHOAL_WHEEL: lambda: build_wheel().content,
    RUNTIME_ARCHIVE: runtime_archive,
    **{f"{slurm_tree.REFERENCE}{arch}": partial(slurm_tree.read_archive, arch) for arch in slurm_tree.ARCHITECTURES},
}
"""What Shoal makes of itself, by its reference among secrets."""


def add_digests(document: Document, given: Mapping[str, str]) -> Document:
    """The document with the digests of the user's secrets, so that the agent sees when one was replaced.

    A secret that is not available now gets no digest: a host that has a value keeps it.
    """

    def add_digest(item: Item) -> Item:
        if not isinstance(item, File) or not isinstance(item.content, SecretRef) or item.content.sha256:
            return item
        if item.content.name not in given:
            return item
        try:
            value = _read_value(given, item.content.name)
        except UsageError:
            return item
        return replace(item, content=replace(item.content, sha256=hashlib.sha256(value).hexdigest()))

    return tuple(add_digest(item) for item in document)


def unavailable_secrets(given: Mapping[str, str]) -> dict[str, UsageError]:
    """The user's secrets that are not available here, by name, each with its error."""
    errors = {}
    for name in given:
        try:
            _read_value(given, name)
        except UsageError as error:
            errors[name] = error
    return errors


def missing_secrets(hosts: Iterable[HostPlan], given: Mapping[str, str]) -> dict[str, UsageError]:
    """The unavailable secrets that a host needs and does not have: without them the plan cannot be applied."""
    needed_names = set()
    for host in hosts:
        changed_keys = {change.what for change in host.changes}
        needed_names |= {
            name for _, document in host.stages for key, name in _secret_files(document) if key in changed_keys
        }
    return {name: error for name, error in unavailable_secrets(given).items() if name in needed_names}


def missing_secret_findings(hosts: Iterable[HostPlan], given: Mapping[str, str]) -> list[Finding]:
    missing = missing_secrets(hosts, given).values()
    return [Finding("error", f"{error.message}; no host has it yet", fix=error.hint) for error in missing]


def require_secrets(missing: Mapping[str, UsageError]) -> None:
    """Raises one error for all missing secrets, with the fix for each."""
    if missing:
        messages = "\n".join(error.message for error in missing.values())
        raise UsageError(
            f"{messages}\nno host has it yet; nothing was changed",
            hint=", ".join(dict.fromkeys(error.hint for error in missing.values())),
        )


async def fetch_secrets(
    documents: Iterable[Document],
    shared: Mapping[str, SharedSecret],
    given: Mapping[str, str],
    fleet: Fleet,
    *,
    hosts_have_theirs: bool = False,
) -> dict[str, bytes]:
    """Every secret that the documents name. A shared secret is made on its host if there is none yet.

    `hosts_have_theirs`: a secret that is not available here is on its host already, and stays.
    """
    secret_names = {name for document in documents for _, name in _secret_files(document)}
    unavailable = unavailable_secrets(given) if hosts_have_theirs else {}
    values = {name: _read_value(given, name) for name in sorted(secret_names & given.keys() - unavailable.keys())}

    async def fetch(host: str) -> dict[str, bytes]:
        agent = await fleet.agent(host)
        return {
            name: await agent.secret(shared[name].path, make=shared[name].length, text=shared[name].text)
            for name in sorted(secret_names & shared.keys())
            if shared[name].host == host
        }

    hosts = sorted({shared[name].host for name in secret_names & shared.keys()})
    for secrets in (await fleet.each(hosts, fetch)).values():
        values.update(secrets)
    return values


def _read_value(references: Mapping[str, str], name: str) -> bytes:
    own = OWN_FILES.get(references[name])
    return own() if own else resolve_secret(references[name], name)


def _secret_files(document: Document) -> Iterator[tuple[str, str]]:
    """The files of a document whose content is a secret, and the commands that read one: (key, name of the secret)."""
    for item in document:
        content = item.content if isinstance(item, File) else item.stdin if isinstance(item, Command) else None
        if isinstance(content, SecretRef):
            yield item.key, content.name
