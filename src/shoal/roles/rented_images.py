"""The systems of rented machines, by the names of their images: which offers cannot join, before one is rented. Pure.

A provider states the system of its default images in its `Abilities`. An image that the spec names usually has its
system in its name. Without one the machine shows it when it joins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shoal.cloud.providers import abilities
from shoal.cloud.providers.api import Abilities, System
from shoal.cloud.providers.prices import shape_of
from shoal.roles.slurm_tree import tree_fix
from shoal.slurm.versions import ONE_SLURM, Version, compatible_releases, is_compatible, packaged_version
from shoal.spec.finding import Finding, Level
from shoal.spec.members import provider_accounts, rented_sets
from shoal.spec.model import Spec
from shoal.spec.rental import OfferChoice, account_settings

IMAGE_SETTINGS = ("image", "template")
"""The settings of an account that name another image than the default."""
CODENAMES: dict[str, System] = {
    "bullseye": System("debian", "11"),
    "bookworm": System("debian", "12"),
    "trixie": System("debian", "13"),
    "focal": System("ubuntu", "20.04"),
    "jammy": System("ubuntu", "22.04"),
    "noble": System("ubuntu", "24.04"),
}
_UBUNTU = re.compile(r"(?:ubuntu|lambda-stack|gpu-base)(?:/server/|[-_: ])?(2\d)[.-]?(04|10)(?!\d)")
"""`ubuntu-2404-lts-amd64`, `pytorch:2.4-ubuntu22.04`, Amazon's `.../ubuntu/server/24.04/...`, and Lambda's families,
which are Ubuntu (its OpenAPI 1.8.3)."""
_DEBIAN = re.compile(r"debian[-_: ]?(\d\d)(?!\d)")


@dataclass(frozen=True)
class UnfitOffer:
    """An offer of a nodeset whose machines cannot join this cluster."""

    nodeset: str
    choice: OfferChoice
    why: str
    fix: str = f"{ONE_SLURM}; or name another `image` there, or take a controller with another Slurm"


def image_system(name: str) -> System | None:
    """The system that an image's name tells; None where it does not."""
    text = name.lower()
    if match := _UBUNTU.search(text):
        return System("ubuntu", f"{match[1]}.{match[2]}")
    if match := _DEBIAN.search(text):
        return System("debian", match[1])
    return next((system for word, system in CODENAMES.items() if re.search(rf"\b{word}\b", text)), None)


def machine_system(able: Abilities, settings: Mapping[str, str], image: str) -> System | None:
    """The system of a machine: of the named image, of the account's, or the provider's default. None if unknown."""
    named = image or next((settings[name] for name in IMAGE_SETTINGS if settings.get(name)), "")
    return image_system(named) if named else able.system


def unfit_offers(spec: Spec, controller: Version, tree_archs: Collection[str] = ()) -> Iterator[UnfitOffer]:
    """The offers whose machines would install a Slurm that the controller's cannot talk to, or find none to install.

    `tree_archs` are the kinds of CPU that Shoal's own Slurm is at hand for.
    """
    if spec.slurm.source == "shoal":
        yield from _offers_without_tree(spec, tree_archs)
        return
    accounts = provider_accounts(spec)
    for nodeset in rented_sets(spec).values():
        for choice in nodeset.offers:
            account = accounts[choice.provider]
            try:
                able = abilities(account.kind or choice.provider)
            except (LookupError, ImportError):
                continue  # a third-party provider that is not installed here
            system = machine_system(able, account_settings(account), choice.image or "")
            version = packaged_version(system.id, system.version) if system else None
            if version is None or (version.supports("supported") and is_compatible(controller, version)):
                continue
            why = f"{choice.provider} rents {system} with Slurm {version}, and the controller's {controller} takes "
            yield UnfitOffer(nodeset.name, choice, why + compatible_releases(controller.release))


def _offers_without_tree(spec: Spec, tree_archs: Collection[str]) -> Iterator[UnfitOffer]:
    """Offers of types with a CPU that no tree is for. Without any tree the whole file is rejected elsewhere."""
    accounts = provider_accounts(spec)
    for nodeset in rented_sets(spec).values():
        for choice in nodeset.offers if tree_archs else ():
            shape = shape_of(accounts[choice.provider].kind or choice.provider, choice.type or "")
            arch = "aarch64" if shape and shape.arch == "arm64" else "x86_64"
            if shape and arch not in tree_archs:
                has = ", ".join(sorted(tree_archs))
                why = f"{choice.type} of {choice.provider} needs a Slurm for {arch}, and there is one for {has} only"
                yield UnfitOffer(nodeset.name, choice, why, f"{tree_fix(arch)}; or rent another type")


def offer_findings(spec: Spec, controller: Version, tree_archs: Collection[str] = ()) -> list[Finding]:
    """Nodesets with offers that cannot join: an error where none of its offers can."""
    by_nodeset: dict[str, list[UnfitOffer]] = {}
    for unfit in unfit_offers(spec, controller, tree_archs):
        by_nodeset.setdefault(unfit.nodeset, []).append(unfit)
    sets, findings = rented_sets(spec), []
    for name, unfits in by_nodeset.items():
        none_fits = len(unfits) == len(sets[name].offers)
        what = "its machines cannot join" if none_fits else "some of its offers cannot join, and are not rented"
        evidence = "; ".join(dict.fromkeys(unfit.why for unfit in unfits))
        fix = "; ".join(dict.fromkeys(unfit.fix for unfit in unfits))
        level: Level = "error" if none_fits else "warning"
        findings.append(Finding(level, f"nodeset `{name}`: {what}", evidence, fix, path=f"nodesets.{name}"))
    return findings
