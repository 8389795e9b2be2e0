"""`shoal bench links` over a cluster in memory, and how its result is shown."""

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from tests.support.cases import cases
from tests.support.fake_clusters import context_of
from tests.support.fake_world import World, lab

from shoal.cli.bench_commands import HEAT, heat, show_links, speed_text
from shoal.errors import ShoalError, Unreachable, UsageError
from shoal.network.links import LINKS, LinkSpeed, links_text, read_links
from shoal.remote import python_command
from shoal.roles.current_conf import HOSTS
from shoal.verbs.context import Context
from shoal.verbs.links import LinksResult, bench_links
from shoal_simulators.fake_host import FakeProgram

ADDRESSES = {"c1": "10.0.0.1", "n1": "10.0.0.11", "n2": "10.0.0.12"}
NAMES = "".join(f"{address}  {name}\n" for name, address in ADDRESSES.items())
BLOCK = f"127.0.0.1 localhost\n# BEGIN shoal members\n{NAMES}# END shoal members\n"

PROBE = python_command("link_probe")
Speed = Callable[[str, str], Mapping[str, Any]]


def measuring(world: World, speed: Speed, known: str = BLOCK) -> Context:
    """A world whose hosts run the measuring program: `speed` answers for a source and a target."""
    at = {address: name for name, address in ADDRESSES.items()}

    async def play(name: str, program: FakeProgram) -> int:
        while line := await program.readline():
            request = json.loads(line)
            listens = request["op"] == "listen"
            answer = {"port": 62999} if listens else speed(name, at[request["address"]])
            await program.print(json.dumps(answer).encode() + b"\n")
        return 0

    for name, host in world.hosts.items():
        host.answers |= {PROBE: partial(play, name), ("cat", HOSTS): known.encode()}
    return context_of(world)


def near_and_far(one: str, other: str) -> dict[str, float]:
    return {"rtt_ms": 0.1, "mbit": 20.0 if "n2" in (one, other) else 9000.0}


async def test_every_pair_is_measured_both_ways_and_stored_on_the_controller() -> None:
    world = lab()
    result = await bench_links(measuring(world, near_and_far))
    assert result.whole and result.hosts == ("c1", "n1", "n2")
    assert [(link.source, link.target, link.mbit) for link in result.links] == [
        *(("c1", "n1", 9000.0), ("c1", "n2", 20.0), ("n1", "c1", 9000.0)),
        *(("n1", "n2", 20.0), ("n2", "c1", 20.0), ("n2", "n1", 20.0)),
    ]
    assert result.groups == (("n1", "n2"),), "of the two that run jobs none is nearer"
    kept = world.agents["c1"].items[f"file {LINKS}"]["content"]
    assert read_links(kept) == result.links
    assert "n1" not in world.applied(), "nothing is changed on the others"
    calls = [call for host in world.hosts.values() for call in host.calls if call.argv == PROBE]
    assert len(calls) == 3 and all(call.killed and not call.root for call in calls)


async def test_earlier_measurements_stay_when_some_hosts_are_measured_again() -> None:
    world = lab()
    context = measuring(world, near_and_far)
    before = links_text(
        [LinkSpeed("c1", "n2", 0.1, 5.0), LinkSpeed("n1", "n2", 0.1, 5.0), LinkSpeed("gone", "n2", 0.1, 5.0)]
    )
    world.hosts["c1"].answers |= {("cat", LINKS): before.encode()}
    await bench_links(context, "n1,n2")
    kept = read_links(world.agents["c1"].items[f"file {LINKS}"]["content"])
    found = {(link.source, link.target): link.mbit for link in kept}
    assert found == {("c1", "n2"): 5.0, ("n1", "n2"): 20.0, ("n2", "n1"): 20.0}


async def test_failed_link_is_reported_and_stops_no_other() -> None:
    def speed(one: str, other: str) -> Mapping[str, Any]:
        return {"problem": "no answer within 5 s"} if (one, other) == ("n1", "n2") else near_and_far(one, other)

    result = await bench_links(measuring(lab(), speed))
    assert not result.whole
    assert [(x.source, x.target, x.problem) for x in result.links if x.problem] == [
        ("n1", "n2", "no answer within 5 s")
    ]


async def test_single_host_or_cluster_without_addresses_is_rejected() -> None:
    with pytest.raises(UsageError, match="n1 alone has no link to measure"):
        await bench_links(measuring(lab(), near_and_far), "n1")
    with pytest.raises(ShoalError, match="c1, n1, n2 has no address in the cluster yet") as refused:
        await bench_links(measuring(lab(), near_and_far, known="127.0.0.1 localhost\n"))
    assert refused.value.hint == "run `shoal up` first"


async def test_unreachable_host_or_one_without_python_drops_out() -> None:
    world = lab()
    context = measuring(world, near_and_far)
    world.hosts["n2"].unreachable = True
    result = await bench_links(context)
    assert result.hosts == ("c1", "n1") and list(result.failures) == ["n2"] and not result.whole

    async def ends(program: FakeProgram) -> int:
        program.complain(b"SyntaxError: invalid syntax\n")
        return 1

    world.hosts["n1"].answers |= {PROBE: ends}
    error = (await bench_links(context)).failures["n1"]
    assert error.cause == "the measuring program ended: SyntaxError: invalid syntax"
    assert error.hint == "Shoal needs python3, 3.8 or newer, on the host"


# ---- the screen


def shown(result: LinksResult, *, colours: bool = False, width: int = 120) -> str:
    out = io.StringIO()
    show_links(Console(file=out, width=width, force_terminal=colours), result)
    return out.getvalue()


LINKED = (
    *(LinkSpeed("a", "b", 0.2, 9412.0), LinkSpeed("b", "a", 0.25, 9300.0), LinkSpeed("a", "c", 31.0, 48.06)),
    *(LinkSpeed("c", "a", 30.0, 51.0), LinkSpeed("c", "b", 30.5, 50.0)),
    LinkSpeed("b", "c", problem="Connection refused"),
)


def test_matrices_show_every_direction_and_the_groups() -> None:
    result = LinksResult("reef", ("a", "b", "c"), LINKED, (("a", "b"), ("c",)), {"d": Unreachable("d", "no route")})
    assert [line.split() for line in shown(result).splitlines()][:10] == [
        ["bandwidth", "from", "row", "to", "column,", "bits", "per", "second"],
        ["a", "b", "c"],
        ["a", "·", "9.41G", "48.1M"],
        ["b", "9.30G", "·", "none"],
        ["c", "51.0M", "50.0M", "·"],
        [],
        ["round", "trip", "from", "row", "to", "column,", "milliseconds"],
        ["a", "b", "c"],
        ["a", "·", "0.20", "31.00"],
        ["b", "0.25", "·", "none"],
    ]
    assert "no link from b to c: Connection refused" in shown(result)
    assert "d: no route" in shown(result)
    assert "near each other: a,b | c" in shown(result)


def test_wide_matrix_is_split_and_complete() -> None:
    hosts = tuple(f"node{number:02}" for number in range(1, 17))
    links = tuple(LinkSpeed(one, other, 0.25, 94.25) for one in hosts for other in hosts if one != other)
    text = shown(LinksResult("reef", hosts, links, (hosts,)), width=80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count("94.2M") == text.count("0.25") == 16 * 15
    heads = [line.split() for line in text.splitlines() if line.startswith("       node")]
    assert [name for head in heads for name in head] == [*hosts, *hosts]
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("node")]
    assert rows == list(hosts) * len(heads)


def test_slowest_speed_and_longest_round_trip_are_red_on_a_terminal() -> None:
    links = (LinkSpeed("a", "b", 0.2, 9000.0), LinkSpeed("b", "a", 30.0, 50.0))
    result = LinksResult("reef", ("a", "b"), links, (("a", "b"),))
    text, white_on_red = shown(result, colours=True), "\x1b[37;41m"
    assert f"{white_on_red}50.0M" in text and f"{white_on_red}30.00" in text
    assert f"{white_on_red}9.00G" not in text and f"{white_on_red} 0.20" not in text
    assert "\x1b[" not in shown(result) and "no host is far from the others" in shown(result)


def test_slowest_link_is_hottest_and_similar_links_are_all_good() -> None:
    assert heat(10, 10, 10000) == 0 and heat(10000, 10, 10000) == len(HEAT) - 1
    assert 0 < heat(300, 10, 10000) < len(HEAT) - 1
    assert heat(100, 100, 190) == len(HEAT) - 1
    assert heat(30, 30, 0.1) == 0, "of round trips the longest is the worst"


@cases("mbit, text", (0.5, "0.50M"), (9.412, "9.41M"), (94.2, "94.2M"), (941, "941M"), (9412, "9.41G"), (1e5, "100G"))
def test_speeds_have_short_units(mbit: float, text: str) -> None:
    assert speed_text(mbit) == text
