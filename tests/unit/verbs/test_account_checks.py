"""`shoal check` asks every provider account before anything is rented: its key, types and places, and quotas."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, Trial, account, saying, trial
from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import PERMANENT_TOKEN, Offer, ProviderLogin, RentalOrder, RentalProvider
from shoal.verbs.provider_accounts import account_findings

TEXT = """
cluster: reef
controller: {host: c1}
nodesets: {pool: {provider: KIND, max: 4, cpus: 4, memory: 8G, LINE}}
providers: {KIND: {key: env:PATH, url: "http://127.0.0.1:1"MORE}}
"""
NO_QUOTA = "no quota in this provider's API, so it is not checked"
UNUSED = """
cluster: reef
controller: {host: c1}
nodesets: {lab: {hosts: [n1]}}
providers: {gcp: {key: env:PATH, url: "http://127.0.0.1:1", project: p}}
"""
LINES = {
    kind: f"type: {case.offer.type}, region: {case.offer.region}, market: {case.offer.market}"
    for kind, case in CASES.items()
}


def spec(kind: str, line: str = "") -> Any:
    more = ", project: p" if kind == "gcp" else ""
    return spec_of(TEXT.replace("KIND", kind).replace("LINE", line or LINES[kind]).replace("MORE", more))


def opened(kind: str, url: str) -> Callable[[ProviderLogin], RentalProvider]:
    return lambda login: rental_provider(replace(account(CASES[kind], url), name=login.name))


async def findings(it: Trial, line: str = "") -> list[str]:
    kind = it.case.kind
    found = await account_findings(spec(kind, line), opened(kind, it.url))
    return [f"{one.level}: {one}" for one in found if "firewall" not in one.what and one.what != NO_QUOTA]


@pytest.fixture(params=sorted({*CASES} & {"aws", "gcp", "lambda", "paperspace", "runpod"}))
async def it(request: pytest.FixtureRequest) -> AsyncIterator[Trial]:
    async with trial(CASES[request.param]) as made:
        yield made


async def test_account_that_has_all_that_is_named_is_silent_but_for_quotas_not_in_its_api(it: Trial) -> None:
    assert await findings(it) == []
    assert it.made == 0
    found = await account_findings(spec(it.case.kind), opened(it.case.kind, it.url))
    assert [one.what for one in found if one.what == NO_QUOTA] == ([] if it.case.kind in ("aws", "gcp") else [NO_QUOTA])


async def test_account_that_the_file_rents_nothing_from_is_asked_too() -> None:
    async with trial(CASES["gcp"]) as it:
        unused = spec_of(UNUSED)
        assert await account_findings(unused, opened("gcp", it.url)) == []
        it.fault("auth", -1)
        [finding] = await account_findings(unused, opened("gcp", it.url))
        assert (finding.level, finding.what) == ("warning", "it rejects our question; the file rents nothing from it")


async def test_rented_host_that_the_file_does_not_name_is_shown() -> None:
    async with trial(CASES["gcp"]) as it:
        offer = Offer("gcp", "e2-standard-2", "us-central1", "us-central1-a")
        order = RentalOrder("reef", "controller", f"{PERMANENT_TOKEN}1", offer, "ssh-ed25519 AAAA a", permanent=True)
        [outcome] = await it.renter.create([order])
        assert outcome.ok, outcome
        [finding] = await account_findings(spec_of(UNUSED), opened("gcp", it.url))
        assert finding.what == "a rented host of this cluster is there, which the file does not name: controller"
        assert "e2-standard-2 in us-central1-a" in finding.found and "it is paid for" in finding.found


async def test_rejected_key_is_an_error(it: Trial) -> None:
    it.fault("auth", -1)
    [text] = await findings(it)
    assert text.startswith(f"error: providers.{it.case.kind}: it rejects our question, and would reject every order")


async def test_type_that_nobody_lists_is_named(it: Trial) -> None:
    if it.case.kind == "paperspace":
        pytest.skip("Paperspace has no list of types")
    [text] = await findings(it, "type: no-such-type")
    assert text.startswith(f"warning: nodesets.pool: {it.case.kind} lists no no-such-type: there is no such type")


async def test_provider_that_does_not_answer_is_a_warning() -> None:
    async with saying(b"") as url:
        found = await account_findings(spec("lambda"), opened("lambda", url))
    assert [(one.level, one.what) for one in found] == [
        ("warning", "it does not answer, so its key, types and quotas are not checked")
    ]


A2 = "type: a2-highgpu-1g, zone: us-central1-a"
P5 = "type: p5.48xlarge, region: us-east-1"
G4 = "type: g4dn.xlarge, region: us-east-1, market: spot"
ON_DEMAND = "“Running On-Demand P instances” (L-417A185B, vCPUs) in us-east-1 of aws allows 0 more p5.48xlarge"
SPOT = "“All G and VT Spot Instance Requests” (L-3819A6DF, vCPUs) in us-east-1 of aws allows 2 more g4dn.xlarge"


@cases(
    "kind, line, limits, level, quota, counts",
    ("gcp", A2, {"NVIDIA_A100_GPUS": 4}, "", "", ()),
    (
        "gcp",
        A2,
        {"NVIDIA_A100_GPUS": 2},
        "warning",
        "NVIDIA_A100_GPUS in us-central1 of gcp allows 2 more a2-highgpu-1g",
        (2, 1),
    ),
    (
        "gcp",
        A2,
        {"NVIDIA_A100_GPUS": 8, "GPUS_ALL_REGIONS": 0},
        "error",
        "GPUS_ALL_REGIONS in all regions of gcp allows 0 more a2-highgpu-1g",
        (0, 1),
    ),
    ("aws", P5, {"L-417A185B": 768}, "", "", ()),
    ("aws", P5, {}, "error", ON_DEMAND, (0, 192)),  # the default of a new account
    ("aws", G4, {"L-3819A6DF": 9, "L-DB2E81BA": 0}, "warning", SPOT, (9, 4)),
)
async def test_quota_that_does_not_cover_the_nodeset_is_named(
    kind: str, line: str, limits: dict[str, float], level: str, quota: str, counts: tuple[int, ...]
) -> None:
    async with trial(CASES[kind]) as it:
        simulator: Any = it.simulation.simulator
        if kind == "gcp":
            simulator.quota_limits |= limits
        else:
            simulator.quotas = limits
        rest = "one needs {1}, and `max` is 4, ask the provider for a higher quota, or name another type or place"
        said = f"{level}: nodesets.pool: the quota {quota}, found limit {{0}}, in use 0; {rest}"
        assert await findings(it, line) == ([said.format(*counts)] if level else [])


async def test_quotas_that_the_key_may_not_read_are_mentioned() -> None:
    async with trial(CASES["aws"]) as it:
        it.simulation.simulator.quota_rights = False  # type: ignore[attr-defined]
        [text] = await findings(it)
        assert text.startswith("info: nodesets.pool: aws does not tell its quotas, so they are not checked")
        assert "AccessDeniedException" in text


async def test_key_that_is_not_here_is_only_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    text = TEXT.replace("KIND", "lambda").replace("LINE", LINES["lambda"]).replace("MORE", "")
    [finding] = await account_findings(spec_of(text.replace("env:PATH", "env:NO_SUCH_KEY")))
    assert (finding.level, finding.what) == ("info", "its key is not on this machine, so it was not asked")


async def test_type_that_is_not_sold_on_demand_and_missing_firewall_rules_are_named_with_the_fix() -> None:
    async with trial(CASES["gcp"]) as it:
        assert await findings(it, "type: a3-highgpu-1g, zone: us-central1-a") == [
            "error: nodesets.pool: Google does not sell a3-highgpu-1g on demand: use `market: spot`, or for the "
            "account `settings: {provisioning: flex-start}` or `{reservation: NAME}`"
        ]
        found = await account_findings(spec("gcp"), opened("gcp", it.url))
        [finding] = [one for one in found if "firewall" in one.what]
        assert finding.found == ("shoal-reef-ports is missing; shoal-reef-lan is missing; shoal-reef-inside is missing")
        create, tag = "gcloud compute firewall-rules create", "--target-tags=shoal-reef"
        private = "10.0.0.0/8,100.64.0.0/10,172.16.0.0/12,192.168.0.0/16"
        assert finding.fix.splitlines() == [
            f"{create} shoal-reef-ports --project=reefs --network=default "
            f"--source-ranges=0.0.0.0/0 {tag} --allow=tcp:22",
            f"{create} shoal-reef-lan --project=reefs --network=default "
            f"--source-ranges={private} {tag} --allow=tcp:60001-63000,tcp:6817,tcp:6818",
            f"{create} shoal-reef-inside --project=reefs --network=default "
            f"--source-tags=shoal-reef {tag} --allow=icmp,tcp,udp",
        ]
