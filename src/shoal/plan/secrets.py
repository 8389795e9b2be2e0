"""The values of secrets, fetched at the last moment: from the host that keeps one, or from where the user has it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shoal.agent.document import Document, File, Item, SecretRef
from shoal.errors import UsageError
from shoal.plan.fleet import Fleet
from shoal.plan.model import HostPlan
from shoal.roles.own_wheel import OWN_WHEEL, own_wheel
from shoal.roles.part import Kept
from shoal.spec.finding import Finding
from shoal.spec.secret import resolve_secret


def with_digests(document: Document, given: Mapping[str, str]) -> Document:
    """The document with the digests of secrets that the user has, so that a host tells when one was replaced.

    One that cannot be looked up now stays as it is: a host that has some value keeps it until it is sent another.
    """

    def known(item: Item) -> Item:
        if not isinstance(item, File) or not isinstance(item.content, SecretRef):
            return item
        if item.content.sha256 or item.content.name not in given:
            return item
        try:
            value = _value(given, item.content.name)
        except UsageError:
            return item
        return replace(item, content=replace(item.content, sha256=hashlib.sha256(value).hexdigest()))

    return tuple(known(item) for item in document)


def not_at_hand(given: Mapping[str, str]) -> dict[str, UsageError]:
    """The secrets that cannot be looked up here and now, by name, each with the reason and what to do."""
    found = {}
    for name in given:
        try:
            _value(given, name)
        except UsageError as error:
            found[name] = error
    return found


def wanting(hosts: Iterable[HostPlan], given: Mapping[str, str]) -> dict[str, UsageError]:
    """Those of them that a host is to have and has not: without these the plan cannot be carried out."""
    lacking = {
        name
        for host in hosts
        for _, document in host.stages
        for key, name in _secret_files(document)
        if key in {change.what for change in host.changes}
    }
    return {name: error for name, error in not_at_hand(given).items() if name in lacking}


def wanting_findings(hosts: Iterable[HostPlan], given: Mapping[str, str]) -> list[Finding]:
    missing = wanting(hosts, given).values()
    return [Finding("error", f"{error.message}; no host has it yet", fix=error.hint) for error in missing]


def refuse(wanted: Mapping[str, UsageError]) -> None:
    """Raises for secrets that are wanting: all of them, with what to do about each."""
    if wanted:
        told = "\n".join(error.message for error in wanted.values())
        raise UsageError(
            f"{told}\nno host has it yet; nothing was changed",
            hint=", ".join(dict.fromkeys(error.hint for error in wanted.values())),
        )


async def secrets_for(
    documents: Iterable[Document],
    kept: Mapping[str, Kept],
    given: Mapping[str, str],
    fleet: Fleet,
    *,
    hosts_have_theirs: bool = False,
) -> dict[str, bytes]:
    """Every secret that the documents name. One that a host keeps is made there first if there is none yet.

    `hosts_have_theirs`: one that cannot be looked up here is on its host already, and stays as it is.
    """
    named = {name for document in documents for _, name in _secret_files(document)}
    absent = not_at_hand(given) if hosts_have_theirs else {}
    values = {name: _value(given, name) for name in sorted(named & given.keys() - absent.keys())}

    async def ask(host: str) -> dict[str, bytes]:
        agent = await fleet.agent(host)
        return {
            name: await agent.secret(kept[name].path, make=kept[name].length, text=kept[name].text)
            for name in sorted(named & kept.keys())
            if kept[name].host == host
        }

    homes = sorted({kept[name].host for name in named & kept.keys()})
    for found in (await fleet.each(homes, ask)).values():
        values.update(found)
    return values


def _value(given: Mapping[str, str], name: str) -> bytes:
    return own_wheel().content if given[name] == OWN_WHEEL else resolve_secret(given[name], name)


def _secret_files(document: Document) -> Iterator[tuple[str, str]]:
    """The files of a document whose content is a secret, as (key, name of the secret)."""
    for item in document:
        if isinstance(item, File) and isinstance(item.content, SecretRef):
            yield item.key, item.content.name
