"""Rented machines in the file: valid values, and every finding about invalid ones."""

import json
import re
from pathlib import Path

from tests.support.cases import cases, read_cases
from tests.support.errors import error_text

from shoal.cloud import providers
from shoal.cloud.providers import RENTAL_PROVIDERS, abilities
from shoal.errors import SpecError
from shoal.spec.docs import schema
from shoal.spec.loader import load_text, load_text_all
from shoal.spec.members import members, provider_accounts, rented_members, rented_sets
from shoal.spec.rental import (
    INTERVAL_SETTINGS,
    KINDS,
    PRIVATE_NETWORKS,
    SETTINGS,
    Budget,
    OfferChoice,
    account_settings,
)

HEAD = "cluster: reef\ncontroller: {host: ctl}\n"
LAMBDA = "providers: {lambda: {key: env:LAMBDA_API_KEY, url: 'http://10.0.0.1:8080'}}\n"
WIREGUARD = "network: wireguard\n"
GOOD = """\
cluster: reef
controller: {host: ctl}
network: wireguard
nodesets:
  lab: {hosts: [gpu01]}
  cloud:
    provider: lambda
    type: gpu_1x_a10
    max: 3
    idle: 5m
    features: [a10]
    site: cloud
  big:
    max: 2
    offers:
      - {provider: lambda, type: gpu_8x_h100_sxm5, region: us-west-1}
      - {provider: gcp, type: a3-highgpu-8g, zone: us-central1-b, market: spot}
    prefer: cheapest
    lifetime: 2d
    max_price: 40
    budget: {per_day: 500, then: end}
    disk: 200G
providers:
  lambda: {key: env:LAMBDA_API_KEY}
  gcp: {key: "file:~/sa.json", project: reef-1, settings: {network: default}}
budget: {per_hour: 80, per_month: 10000.5}
"""


def test_file_describes_rented_nodesets_and_budgets() -> None:
    spec, findings = load_text_all(GOOD, "s.yaml")
    assert findings == []
    cloud, big = rented_sets(spec).values()
    assert cloud.offers == (OfferChoice(provider="lambda", type="gpu_1x_a10"),)
    assert (cloud.max, cloud.idle, cloud.lifetime, cloud.disk_gb) == (3, 300, 86400, 100)
    assert [(offer.provider, offer.market, offer.zone) for offer in big.offers] == [
        ("lambda", "on-demand", None),
        ("gcp", "spot", "us-central1-b"),
    ]
    assert (big.prefer, big.lifetime, big.max_price, big.disk_gb) == ("cheapest", 2 * 86400, 40.0, 200)
    assert big.budget == Budget(per_day=500, then="end")
    assert big.accounts == ("lambda", "gcp")
    assert spec.budget == Budget(per_hour=80, per_month=10000.5)
    assert [member.name for member in members(spec)] == ["ctl", "gpu01"], "rented nodes are no members"
    rented = rented_members(spec)
    assert [member.name for member in rented] == ["cloud1", "cloud2", "cloud3", "big1", "big2"]
    assert all(member.rented and member.provider is None for member in rented)
    assert (rented[0].features, rented[0].site, rented[0].nodeset) == (("a10",), "cloud", "cloud")


def test_accounts_have_their_kind_and_no_secret() -> None:
    spec = load_text(GOOD.replace("lambda: {key", "lambda: {kind: lambda, key"), "s.yaml")
    found = provider_accounts(spec)
    assert [(name, account.kind, account.key) for name, account in found.items()] == [
        ("lambda", "lambda", "env:LAMBDA_API_KEY"),
        ("gcp", "gcp", "file:~/sa.json"),
    ]
    assert account_settings(found["gcp"]) == {"project": "reef-1", "network": "default"}


def test_sandbox_nodeset_is_rented_with_max_and_permanent_with_count() -> None:
    head = "cluster: reef\ncontroller: {provider: sandbox}\nproviders: {sandbox: {url: 'http://10.0.0.1:8080/'}}\n"
    spec = load_text(
        head + "nodesets: {a: {provider: sandbox, type: cpu, max: 2}, b: {provider: sandbox, count: 1}}\n", ""
    )
    assert [member.name for member in members(spec)] == ["controller", "b1"]
    assert [member.name for member in rented_members(spec)] == ["a1", "a2"]
    assert provider_accounts(spec)["sandbox"].url == "http://10.0.0.1:8080"


CASES: dict[str, tuple[str, list[str]]] = {
    **read_cases(Path(__file__).with_name("rental_findings.txt"), HEAD_LAMBDA=HEAD + LAMBDA, HEAD=HEAD)
}


@cases("name", *CASES)
def test_invalid_file_has_exactly_the_expected_findings(name: str) -> None:
    text, expected = CASES[name]
    assert error_text(SpecError, load_text, text, "s.yaml").split("\n") == expected


def test_settings_of_each_provider_are_those_that_its_client_reads() -> None:
    place = Path(providers.__file__).parent
    read = {kind: set[str]() for kind in KINDS}
    for kind, target in RENTAL_PROVIDERS.items():
        files = [place / f"{target.partition(':')[0].rpartition('.')[2]}.py"]
        more = {"gcp": ["google_auth.py", "google_firewall.py", "google_orders.py"], "aws": ["aws_query.py"]}
        files += [place / name for name in more.get(kind, [])]
        read[kind] |= {name for file in files for name in re.findall(r'settings\.get\("(\w+)"', file.read_text())}
    assert read | {"sandbox": {"project"}} == {kind: set(names) for kind, names in SETTINGS.items()}
    shared = set(re.findall(r'settings\.get\("(\w+)"', (place / "http.py").read_text()))
    assert shared == set(INTERVAL_SETTINGS[:2])


LAN = """\
cluster: reef
controller: {host: desktop}
nodesets: {cloud: {provider: PROVIDER, type: a, max: 2}}
providers: {PROVIDER: {key: env:KEY}}
"""
"""A file that rents and says nothing of the network."""


def lan_findings(text: str) -> list[str]:
    _, findings = load_text_all(text, "s.yaml")
    assert all(finding.level == "warning" for finding in findings)
    return [str(finding) for finding in findings]


FAR = (
    "{}: rented machines in a LAN: they reach no controller elsewhere, and cost money until they are replaced, "
    'found "{}", set `network: wireguard`; or, if the controller is in their private network, give both the same `site`'
)
OFFERS = "{max: 2, offers: [{provider: runpod, type: a}, {provider: lambda, type: a}, {provider: aws, type: a}]}"


@cases(
    "text, expected",
    (
        "nodesets: {l: {provider: lambda, type: a, max: 1, lifetime: 2h}, m: {hosts: [x]}}\n"
        "partitions: {p: {nodesets: [l, m], max_time: 180}, q: {nodesets: [m], max_time: 180}}\n"
        "providers: {lambda: {key: env:A}, gcp: {key: env:B, project: p}}\n" + WIREGUARD,
        [
            "s.yaml:4:46 partitions.p.max_time: a job may run for longer than a node of `l` is kept, found 180, "
            "give at most its `lifetime`, or raise that: nodesets.l.lifetime",
            "s.yaml:5:35 providers.gcp: nothing is rented from it, name it in one, or delete it",
        ],
    ),
    (
        f"nodesets: {{cloud: {OFFERS}}}\n"
        "providers: {runpod: {key: env:A}, lambda: {key: env:A}, aws: {key: env:A}}\n",
        [FAR.format("s.yaml:3:77 nodesets.cloud.offers[1].provider", "lambda")],
    ),
    (
        LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2}}\nbudget: {per_hour: 5, then: end}\n",
        [
            "s.yaml:5:29 budget.then: an hour's limit alone ends nothing, "
            "give per_day or per_month too: only what is spent can be used up"
        ],
    ),
    (
        "nodesets: {m: {hosts: [x]}}\nbudget: {per_day: 1}\n",
        ["s.yaml:4:1 budget: nothing is rented, delete it, or give a nodeset a provider"],
    ),
    ids=["time above the lifetime, and an unused account", "first offer that is far", "an hour's limit", "no rental"],
)
def test_file_has_these_warnings(text: str, expected: list[str]) -> None:
    assert lan_findings(HEAD + text) == expected


@cases("provider", *PRIVATE_NETWORKS)
def test_rented_machines_in_a_lan_are_a_warning_with_the_line_that_helps(provider: str) -> None:
    text = LAN.replace("PROVIDER", provider).replace(
        "env:KEY", "env:KEY, project: p" if provider == "gcp" else "env:KEY"
    )
    expected = [FAR.format("s.yaml:3:30 nodesets.cloud.provider", provider)]
    assert lan_findings(text) == lan_findings(text + "network: lan\n") == expected
    assert lan_findings(text + WIREGUARD) == lan_findings(text + "network: {kind: tailscale, auth_key: env:K}\n") == []


@cases(
    "old, new",
    ("{key: env:KEY}", "{key: env:KEY, url: 'http://10.0.0.1:8080'}"),
    ("{key: env:KEY}", "{key: env:KEY, settings: {subnets: subnet-1}}"),
    ("{key: env:KEY}", "{key: env:KEY, kind: runpod}"),
    ("host: desktop}\nnodesets: {cloud: {", "host: desktop, site: b}\nnodesets: {cloud: {site: b, "),
    ids=["a simulator", "a subnet of ours", "containers", "one site"],
)
def test_rented_machines_that_meet_the_controller_in_a_lan_are_no_warning(old: str, new: str) -> None:
    text = LAN.replace("PROVIDER", "aws")
    assert lan_findings(text) and lan_findings(text.replace(old, new)) == []


def test_every_provider_of_machines_is_behind_addresses_of_its_own() -> None:
    assert {kind for kind in KINDS if kind != "sandbox" and not abilities(kind).container} == {*PRIVATE_NETWORKS}
    assert all({*networks} <= {*SETTINGS[kind]} for kind, networks in PRIVATE_NETWORKS.items())


@cases(
    "budget, seconds",
    ("{per_day: 5}", None),
    ("{per_day: 5, then: refuse}", None),
    ("{per_day: 5, then: end}", 0),
    ("{per_day: 5, then: end, after: 30m}", 1800),
)
def test_budget_sets_the_delay_before_the_end(budget: str, seconds: int | None) -> None:
    text = HEAD + LAMBDA + f"nodesets: {{l: {{provider: lambda, type: a, max: 2}}}}\nbudget: {budget}\n"
    spec, _ = load_text_all(text, "s.yaml")
    assert spec is not None and spec.budget is not None and spec.budget.end_after == seconds


def test_schema_includes_rented_nodesets() -> None:
    text = json.dumps(schema())
    nodeset = schema()["$defs"]["NodeSet"]["properties"]
    assert (nodeset["max"]["type"], nodeset["max"]["minimum"], nodeset["max"]["maximum"]) == ("integer", 1, 1000)
    assert nodeset["max_price"]["exclusiveMinimum"] == 0
    assert "OfferChoice" in text
    assert "ProviderAccount" in text
