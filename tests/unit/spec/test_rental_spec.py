"""Rented machines in the file: valid values, and every finding about invalid ones."""

import json
import re
from pathlib import Path

import pytest
from tests.support.cases import cases

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


def test_rented_nodes_are_not_members() -> None:
    spec = load_text(GOOD, "s.yaml")
    assert [member.name for member in members(spec)] == ["ctl", "gpu01"]
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
    "no account": (
        HEAD + "nodesets: {l: {provider: lambda, type: a, max: 2}}\n",
        [
            's.yaml:3:26 nodesets.l.provider: no account at this provider, found "lambda", '
            "add `providers: {lambda: {key: env:NAME}}`"
        ],
    ),
    "misspelt account": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lamda, type: a, max: 2}}\n",
        ['s.yaml:4:26 nodesets.l.provider: unknown provider, found "lamda", did you mean `lambda`?'],
    ),
    "neither type nor offers, neither count nor max": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lambda}}\n",
        [
            "s.yaml:4:12 nodesets.l: missing key `max`, say how many nodes it may have: `max: 4`",
            "s.yaml:4:12 nodesets.l: neither `type` nor `offers`, "
            "say what to rent: `provider: lambda` with `type: gpu_1x_a10`",
        ],
    ),
    "count and max": (
        HEAD
        + LAMBDA
        + "nodesets: {l: {provider: lambda, type: a, max: 2, count: 1}, m: {provider: lambda, type: a, count: 1}}\n",
        [
            "s.yaml:4:58 nodesets.l.count: both `count` and `max`, keep `max`: rented nodes come and go",
            "s.yaml:4:100 nodesets.m.count: `count` where nodes are rented, call it `max`: rented nodes come and go",
        ],
    ),
    "max where nothing is rented": (
        HEAD + "nodesets: {l: {hosts: [a], max: 2}, m: {provider: sandbox, count: 1, idle: 5m}}\n",
        [
            "s.yaml:3:33 nodesets.l.max: `max` where nothing is rented, "
            "delete it, or say `max` and a provider in place of hosts that are always there",
            "s.yaml:3:76 nodesets.m.idle: `idle` where nothing is rented, "
            "delete it, or say `max` and a provider in place of hosts that are always there",
        ],
    ),
    "offers and what belongs into them": (
        HEAD
        + LAMBDA
        + "nodesets: {l: {provider: lambda, type: b, max: 2, offers: [{provider: lambda}, {provider: lambda, type: a}, "
        "{provider: lambda, type: a}]}}\n",
        [
            "s.yaml:4:26 nodesets.l.provider: both `provider` and `offers`, write it into the offers",
            "s.yaml:4:40 nodesets.l.type: both `type` and `offers`, write it into the offers",
            "s.yaml:4:60 nodesets.l.offers[0]: missing key `type`, say what to rent there: `type: gpu_1x_a10`",
            "s.yaml:4:109 nodesets.l.offers[2]: the same offer twice, delete one",
        ],
    ),
    "a secret in the file": (
        HEAD
        + "nodesets: {l: {provider: lambda, type: a, max: 2}}\nproviders: {lambda: {key: secret_abc, url: 'http://u:p@x'}}\n",
        [
            's.yaml:4:27 providers.lambda.key: not a reference to a secret, found "(hidden)", '
            "write env:NAME or file:PATH, never the secret itself",
            's.yaml:4:44 providers.lambda.url: an address with a password in it, found "(hidden)", '
            "leave it out, and give `key`",
        ],
    ),
    "accounts without what it takes": (
        HEAD + "nodesets: {l: {max: 1, offers: [{provider: gcp, type: a}, {provider: cheap, type: a}, "
        "{provider: sandbox, type: a}]}}\n"
        + "providers: {gcp: {}, cheap: {key: env:K}, sandbox: {kind: sandbox}, other: {kind: vost, key: env:K}}\n"
        + WIREGUARD,
        [
            "s.yaml:4:13 providers.gcp: missing key `project`, name the project that pays",
            "s.yaml:4:22 providers.cheap: missing key `kind`, "
            "say which provider it is: aws, digitalocean, gcp, lambda, nebius, paperspace, runpod, sandbox, vast",
            "s.yaml:4:43 providers.sandbox: missing key `url`, "
            "give the address of your `shoal simulate sandbox` server",
            "s.yaml:4:69 providers.other: warning: nothing is rented from it, name it in one, or delete it",
            's.yaml:4:83 providers.other.kind: unknown kind of provider, found "vost", '
            "choose one of aws, digitalocean, gcp, lambda, nebius, paperspace, runpod, sandbox, vast",
        ],
    ),
    "times, money and markets": (
        HEAD
        + LAMBDA
        + "nodesets:\n  l: {provider: lambda, type: 'a;b', max: 2000, idle: 10, lifetime: 5s, max_price: dear, "
        "market: auction,\n"
        "    prefer: fast, budget: {per_day: -1}}\nbudget: {per_day: 5, per_month: 2, then: stop}\n",
        [
            's.yaml:5:31 nodesets.l.type: not a type of machine, found "a;b", '
            "write it as the provider does, such as gpu_1x_a10",
            "s.yaml:5:43 nodesets.l.max: out of range, found 2000, give one from 1 to 1000",
            "s.yaml:5:55 nodesets.l.idle: not a span of time, found 10, write a number and s, m, h or d: 10m, 2h",
            's.yaml:5:69 nodesets.l.lifetime: out of range, found "5s", give at least 10s and at most 366d',
            's.yaml:5:84 nodesets.l.max_price: not an amount of money, found "dear", '
            "give US dollars as a number, such as 2.49",
            's.yaml:5:98 nodesets.l.market: unknown market, found "auction", choose one of on-demand, spot',
            's.yaml:6:13 nodesets.l.prefer: unknown order, found "fast", choose one of listed, cheapest',
            "s.yaml:6:37 nodesets.l.budget.per_day: out of range, found -1, give an amount above 0, in US dollars",
            "s.yaml:7:19 budget.per_day: more than `per_month`, found 5, give at most 2",
            's.yaml:7:42 budget.then: unknown end of a budget, found "stop", choose one of refuse, end',
        ],
    ),
    "settings that the provider does not have": (
        HEAD + "providers:\n"
        "  lambda: {key: env:A, project: p, settings: {netwrok: x, timeout: soon}}\n"
        "  gcp: {key: env:B, project: p, settings: {subnetwrk: s, external_address: maybe, image: i}}\n"
        "  runpod: {key: env:C, settings: {cloud: comunity}}\n"
        "nodesets:\n"
        "  l: {provider: lambda, type: a, max: 2}\n"
        "  g: {provider: gcp, type: a, max: 2}\n"
        "  r: {provider: runpod, type: a, max: 2}\n" + WIREGUARD,
        [
            "s.yaml:4:33 providers.lambda.project: `project` for lambda, delete it: only Google and Nebius have them",
            's.yaml:4:56 providers.lambda.settings.netwrok: unknown setting of lambda, found "netwrok", '
            "known: create_interval, filesystems, request_interval, timeout",
            's.yaml:4:68 providers.lambda.settings.timeout: not a number of seconds, found "soon", '
            "write a number, such as 2 or 0.5",
            's.yaml:5:55 providers.gcp.settings.subnetwrk: unknown setting of gcp, found "subnetwrk", '
            "did you mean `subnetwork`?",
            's.yaml:5:76 providers.gcp.settings.external_address: unknown external_address, found "maybe", '
            "choose one of yes, no",
            's.yaml:6:42 providers.runpod.settings.cloud: unknown cloud, found "comunity", '
            "choose one of secure, community",
        ],
    ),
    "a budget without a limit": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2}}\nbudget: {then: end}\n",
        ["s.yaml:5:1 budget: a budget without a limit, give one of per_hour, per_day, per_month"],
    ),
    "when nothing is ended": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2, budget: {per_day: 1, after: 1h}}}\n"
        "budget: {per_day: 9, then: end, after: soon}\n",
        [
            "s.yaml:4:79 nodesets.l.budget.after: `after` where nothing is ended, say `then: end`, or delete it",
            's.yaml:5:40 budget.after: not a span of time, found "soon", write a number and s, m, h or d: 10m, 2h',
        ],
    ),
    "idle for longer than it lives": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2, idle: 2h, lifetime: 1h}}\n",
        ["s.yaml:4:57 nodesets.l.idle: not less than `lifetime`, give less"],
    ),
    "what the provider's type decides": (
        HEAD + LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2, image: sid, cgroups: true, user: me}}\n",
        [
            "s.yaml:4:72 nodesets.l.cgroups: `cgroups` where nodes are rented, delete it: the provider's type decides",
            "s.yaml:4:84 nodesets.l.user: `user` without `hosts`, delete it, or use `hosts`",
        ],
    ),
    "names that are there already": (
        "cluster: reef\ncontroller: {host: l2}\nnetwork: {kind: tailscale, auth_key: env:K}\n"
        + LAMBDA
        + "nodesets: {l: {provider: lambda, type: a, max: 2}}\n",
        [
            's.yaml:5:12 nodesets.l: host is already the controller\'s, found "l2", name it once; '
            "for a controller that also runs jobs use `controller: {compute: true}`",
        ],
    ),
    "more rented nodes than addresses": (
        HEAD
        + "network: {kind: wireguard, subnet: 10.1.0.0/28}\n"
        + LAMBDA
        + "nodesets: {l: {provider: lambda, type: a, max: 20}}\n",
        [
            "s.yaml:3:36 network.subnet: more hosts than the subnet has addresses, found 21 hosts, and room for 14, "
            "give a larger one"
        ],
    ),
}


@cases("name", *CASES)
def test_invalid_file_has_exactly_the_expected_findings(name: str) -> None:
    text, expected = CASES[name]
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    assert str(caught.value).split("\n") == expected


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


def test_job_time_above_the_lifetime_and_unused_accounts_are_warnings() -> None:
    text = (
        HEAD
        + "nodesets: {l: {provider: lambda, type: a, max: 1, lifetime: 2h}, m: {hosts: [x]}}\n"
        + "partitions: {p: {nodesets: [l, m], max_time: 180}, q: {nodesets: [m], max_time: 180}}\n"
        + "providers: {lambda: {key: env:A}, gcp: {key: env:B, project: p}}\n"
        + WIREGUARD
    )
    _, findings = load_text_all(text, "s.yaml")
    assert [(finding.level, str(finding)) for finding in findings] == [
        (
            "warning",
            "s.yaml:4:46 partitions.p.max_time: a job may run for longer than a node of `l` is kept, found 180, "
            "give at most its `lifetime`, or raise that: nodesets.l.lifetime",
        ),
        ("warning", "s.yaml:5:35 providers.gcp: nothing is rented from it, name it in one, or delete it"),
    ]


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


@cases("provider", *PRIVATE_NETWORKS)
def test_rented_machines_in_a_lan_are_a_warning_with_the_line_that_helps(provider: str) -> None:
    text = LAN.replace("PROVIDER", provider).replace(
        "env:KEY", "env:KEY, project: p" if provider == "gcp" else "env:KEY"
    )
    expected = [
        f"s.yaml:3:30 nodesets.cloud.provider: rented machines in a LAN: they reach no controller elsewhere, and cost "
        f'money until they are replaced, found "{provider}", set `network: wireguard`; or, if the controller is in '
        "their private network, give both the same `site`"
    ]
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


def test_first_offer_that_cannot_meet_the_controller_is_named() -> None:
    offers = "{max: 2, offers: [{provider: runpod, type: a}, {provider: lambda, type: a}, {provider: aws, type: a}]}"
    accounts = "{runpod: {key: env:A}, lambda: {key: env:A}, aws: {key: env:A}}"
    text = f"{HEAD}nodesets: {{cloud: {offers}}}\nproviders: {accounts}\n"
    [finding] = lan_findings(text)
    assert finding.startswith("s.yaml:3:77 nodesets.cloud.offers[1].provider: rented machines in a LAN")


def test_every_provider_of_machines_is_behind_addresses_of_its_own() -> None:
    assert {kind for kind in KINDS if kind != "sandbox" and not abilities(kind).container} == {*PRIVATE_NETWORKS}
    assert all({*networks} <= {*SETTINGS[kind]} for kind, networks in PRIVATE_NETWORKS.items())


def test_hourly_limit_with_end_is_a_warning() -> None:
    text = HEAD + LAMBDA + "nodesets: {l: {provider: lambda, type: a, max: 2}}\nbudget: {per_hour: 5, then: end}\n"
    _, findings = load_text_all(text, "s.yaml")
    assert [str(finding) for finding in findings] == [
        "s.yaml:5:29 budget.then: an hour's limit alone ends nothing, "
        "give per_day or per_month too: only what is spent can be used up"
    ]


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


def test_budget_without_rented_nodesets_is_a_warning() -> None:
    _, findings = load_text_all(HEAD + "nodesets: {m: {hosts: [x]}}\nbudget: {per_day: 1}\n", "s.yaml")
    assert [str(finding) for finding in findings] == [
        "s.yaml:4:1 budget: nothing is rented, delete it, or give a nodeset a provider"
    ]


def test_schema_includes_rented_nodesets() -> None:
    text = json.dumps(schema())
    nodeset = schema()["$defs"]["NodeSet"]["properties"]
    assert (nodeset["max"]["type"], nodeset["max"]["minimum"], nodeset["max"]["maximum"]) == ("integer", 1, 1000)
    assert nodeset["max_price"]["exclusiveMinimum"] == 0
    assert "OfferChoice" in text
    assert "ProviderAccount" in text
