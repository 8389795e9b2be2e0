"""What a rented host is ordered as: the offer, and the operator's key."""

from __future__ import annotations

from pathlib import Path

from shoal.cloud.providers.api import Offer, ProviderLogin, Query, RentalProvider
from shoal.cloud.providers.capabilities import KeepsMachines
from shoal.errors import ProviderError
from shoal.spec.finding import Finding
from shoal.spec.member import RentedMachine

DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")


def keeper(client: RentalProvider, login: ProviderLogin) -> KeepsMachines:
    if not isinstance(client, KeepsMachines):
        raise ProviderError(
            f"{login.name} rents out no host that stays: its client cannot reserve addresses or start machines",
            hint="rent the controller and login hosts elsewhere, such as from gcp or aws",
        )
    return client


async def find_offers(
    client: RentalProvider, account: str, machine: RentedMachine, near: tuple[str, str]
) -> list[Offer]:
    """The offers of a machine: near the others first, then the cheapest, those without a price last."""
    query = Query(
        types=(machine.type,),
        regions=(machine.region,) if machine.region else (),
        zones=(machine.zone,) if machine.zone else (),
        market="on-demand",
    )
    listed = await client.offers(query)
    sold = [offer for offer in listed if offer.available != "no" and not offer.note]
    if not sold:
        where = machine.zone or machine.region or "any place"
        why = next((offer.note for offer in listed if offer.note), f"{account} has no {machine.type} in {where} now")
        raise ProviderError(why, hint=f"`shoal offers --provider {account}` lists its types; name another")

    def order(offer: Offer) -> tuple[bool, bool, bool, float, str]:
        far = bool(near[0]) and offer.region != near[0], bool(near[1]) and offer.zone != near[1]
        return (*far, offer.usd_hour is None, offer.usd_hour or 0.0, offer.place)

    return sorted(sold, key=order)


def default_identity() -> Path | None:
    """The operator's own key, as ssh would use it."""
    paths = [Path.home() / ".ssh" / name for name in DEFAULT_IDENTITIES]
    return next((path for path in paths if path.with_name(f"{path.name}.pub").is_file()), None)


def identity_problem(identity: Path | None) -> Finding | None:
    """Why the operator could not log in to a machine that is ordered."""
    path = identity or default_identity()
    if path is None:
        what = "no SSH key to log in to rented hosts with"
        return Finding("error", what, "~/.ssh has none", "make one: `ssh-keygen -t ed25519`; or name one: `identity`")
    public = path.with_name(f"{path.name}.pub")
    if public.is_file():
        return None
    fix = f"write it: `ssh-keygen -y -f {path} > {public}`"
    return Finding("error", "the public half of the SSH key is not there", str(public), fix)
