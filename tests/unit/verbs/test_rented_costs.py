"""What rented hosts cost, and that nothing is rented which nobody has agreed to."""

from dataclasses import replace

import pytest
from tests.support.cases import cases

from shoal.errors import UsageError
from shoal.hosts.api import Target
from shoal.hosts.provider import HostQuote, Instance
from shoal.spec.loader import load_text
from shoal.spec.members import members
from shoal.verbs.rented_costs import change_findings, price_findings, quotes_text, rented_versions, require_consent

TEXT = """\
cluster: reef
network: wireguard
providers: {gcp: {project: p}}
controller: {provider: gcp, type: e2-standard-2, compute: true}
login: {provider: gcp, type: e2-small, image: debian-cloud/debian-12}
"""
SPEC = load_text(TEXT, "s.yaml")
QUOTE = HostQuote("controller", "gcp", "e2-standard-2", "us-central1-b", 50, True, 0.067)
QUOTES = (QUOTE, replace(QUOTE, name="login1", type="e2-small", keep_address=False, usd_hour=0.0168))
TOLD = (
    "rents controller from gcp (e2-standard-2 in us-central1-b with a disk of 50 GB and a reserved address: $0.067 an "
    "hour); login1 from gcp (e2-small in us-central1-b with a disk of 50 GB: $0.0168 an hour); together $0.0838 an "
    "hour; disks, addresses and traffic are billed too"
)


def test_plan_tells_each_price_and_the_sum() -> None:
    assert quotes_text(QUOTES) == TOLD
    assert [str(finding) for finding in price_findings(QUOTES)] == [f"`shoal up` {TOLD}"]
    assert price_findings(()) == []
    unknown = quotes_text((QUOTE, replace(QUOTE, name="login1", usd_hour=None)))
    assert "price unknown" in unknown and "together" not in unknown


def test_nothing_is_rented_without_consent() -> None:
    with pytest.raises(UsageError, match="this rents controller from gcp") as caught:
        require_consent(SPEC, QUOTES, False)
    assert caught.value.hint == "use --yes"
    require_consent(SPEC, QUOTES, True)
    require_consent(SPEC, (), False)


@cases(
    "quotes, what, hint",
    ((replace(QUOTE, usd_hour=None),), "the price of e2-standard-2 in us-central1-b is unknown", "controller: {usd_"),
    ((replace(QUOTE, usd_hour=0.2),), "these hosts cost $0.2 an hour, and `budget.per_hour` is 0.1", "raise the"),
)
def test_budget_holds_for_rented_hosts(quotes: tuple[HostQuote, ...], what: str, hint: str) -> None:
    spec = load_text(TEXT + "budget: {per_hour: 0.1}\n", "s.yaml")
    with pytest.raises(UsageError) as caught:
        require_consent(spec, quotes, True)
    assert what in caught.value.message
    assert hint in str(caught.value.hint)
    require_consent(spec, QUOTES, True)


def test_machine_of_another_type_or_zone_is_reported() -> None:
    spec = load_text(TEXT.replace("compute: true", "compute: true, zone: us-central1-c"), "s.yaml")
    made = Instance("controller", "running", Target("controller"), type="e2-standard-2", place="us-central1-c")
    assert change_findings(members(spec), {"controller": made}) == []
    other = replace(made, type="e2-small", place="us-central1-b")
    then = ", `shoal down` and `shoal up` rent it anew"
    assert [str(finding) for finding in change_findings(members(spec), {"controller": other})] == [
        f"controller: was rented as e2-small; the file now says e2-standard-2{then}",
        f"controller: was rented in us-central1-b; the file now says us-central1-c{then}",
    ]
    assert len(change_findings(members(SPEC), {"controller": other})) == 1, "any zone will do"


def test_slurm_of_rented_hosts_comes_from_their_images() -> None:
    versions = rented_versions(SPEC, members(SPEC))
    assert {name: str(version) for name, version in versions.items()}["login1"].startswith("22.05")
