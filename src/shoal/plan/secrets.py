"""The values of secrets, fetched at the last moment: from the host that keeps one, or from where the user has it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.agent.document import Document, File, Item, SecretRef
from shoal.errors import UsageError
from shoal.plan.fleet import Fleet
from shoal.roles.part import Kept
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
            value = resolve_secret(given[item.content.name], item.content.name)
        except UsageError:
            return item
        return replace(item, content=replace(item.content, sha256=hashlib.sha256(value).hexdigest()))

    return tuple(known(item) for item in document)


async def secrets_for(
    documents: Iterable[Document], kept: Mapping[str, Kept], given: Mapping[str, str], fleet: Fleet
) -> dict[str, bytes]:
    """Every secret that the documents name. One that a host keeps is made there first if there is none yet."""
    named = {
        item.content.name
        for document in documents
        for item in document
        if isinstance(item, File) and isinstance(item.content, SecretRef)
    }
    values = {name: resolve_secret(given[name], name) for name in sorted(named & given.keys())}

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
