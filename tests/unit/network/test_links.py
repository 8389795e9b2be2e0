"""The rounds in which links are measured, and the groups of hosts that follow from the results."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases

from shoal.network.links import (
    PARALLEL_CONNECTIONS,
    LinkSpeed,
    groups,
    links_text,
    merge_measurements,
    nccl_settings,
    read_links,
    rounds,
    sockets,
    switches,
)


def mesh(speeds: dict[str, float]) -> list[LinkSpeed]:
    """Links in both directions; `ab` is the pair of a and b."""
    return [
        LinkSpeed(one, other, 1.0, speed)
        for pair, speed in speeds.items()
        for one, other in ((pair[0], pair[1]), (pair[1], pair[0]))
    ]


@given(st.integers(0, 20))
def test_every_pair_is_measured_once_and_each_host_once_a_round(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    plan = rounds(names)
    met = [tuple(sorted(pair)) for pairs in plan for pair in pairs]
    assert sorted(met) == sorted(tuple(sorted(pair)) for pair in combinations(names, 2))
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in plan)
    assert len(plan) <= count


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_pairs_sharing_a_site_uplink_are_in_different_rounds(places: list[str]) -> None:
    sites = {f"n{number}": place for number, place in enumerate(places)}
    plan = rounds(list(sites), sites)
    assert sum(map(len, plan)) == len(sites) * (len(sites) - 1) // 2
    for pairs in plan:
        across = [{sites[one], sites[other]} for one, other in pairs if sites[one] != sites[other]]
        assert all(not first & second for first, second in combinations(across, 2))


def test_fast_links_form_groups_separated_by_slow_links() -> None:
    links = mesh({"ab": 9400, "cd": 9100, "ac": 90, "ad": 80, "bc": 95, "bd": 100})
    assert groups(links, "abcd") == (("a", "b"), ("c", "d"))
    assert switches(links_text(links), "abcd") == {"a": "near-a", "b": "near-a", "c": "near-c", "d": "near-c"}


@cases(
    "speeds",
    {"ab": 900, "ac": 700, "bc": 300},  # noise
    {"ab": 40000, "ac": 9000, "bc": 9000},  # all of them are fast
    {"ab": 1000, "bc": 1000, "ac": 10},  # b is near both, and they are far from each other
)
def test_similar_links_form_a_single_group(speeds: dict[str, float]) -> None:
    links = mesh(speeds)
    assert groups(links, "abc") == (("a", "b", "c"),) and switches(links_text(links), "abc") == {}


def test_slower_direction_counts() -> None:
    links = [*mesh({"ab": 1000, "ac": 1000}), LinkSpeed("b", "c", 1.0, 1000), LinkSpeed("c", "b", 1.0, 5)]
    assert groups(links, "abc") == (("a", "b", "c"),)
    links += [LinkSpeed("a", "c", 1.0, 5)]
    assert groups(links, "abc") == (("a", "b"), ("c",))


def test_failed_link_counts_as_the_slowest() -> None:
    links = [*mesh({"ab": 1000}), *(LinkSpeed(one, "c", problem="refused") for one in "ab")]
    assert groups(links, "abc") == (("a", "b"), ("c",))


def test_unmeasured_host_is_its_own_group_when_groups_exist() -> None:
    assert groups(mesh({"ab": 1000, "ac": 10, "bc": 10}), "abcd") == (("a", "b"), ("c",), ("d",))
    assert groups(mesh({"ab": 1000}), "abd") == (("a", "b", "d"),) and groups([], "ab") == (("a", "b"),)
    assert groups([], "") == ()


def test_new_measurement_replaces_old_values_and_drops_departed_hosts() -> None:
    before = mesh({"ab": 10, "ac": 10, "bc": 10})
    after = merge_measurements(before, mesh({"ab": 500}), ["a", "b"])
    assert after == tuple(mesh({"ab": 500})) and read_links(links_text(after)) == after


@cases("text", "", "[]", "{}", '{"links": [{"from": "a"}]}', '{"links": 3}', "no json")
def test_invalid_file_gives_no_links(text: str) -> None:
    assert read_links(text) == () and switches(text, "ab") == {}


@cases(
    "speeds, connections",
    ({"b": (900.0, 905.0)}, 1),
    ({"b": (90.0, 700.0)}, PARALLEL_CONNECTIONS),
    ({"b": (9000.0, 9000.0), "c": (50.0, 400.0)}, PARALLEL_CONNECTIONS),  # the others wait for the slowest
    ({"b": (50.0, 51.0), "c": (9000.0, 20000.0)}, 1),
    ({"elsewhere": (50.0, 400.0)}, None),
)
def test_slowest_link_sets_the_number_of_nccl_sockets(
    speeds: dict[str, tuple[float, float]], connections: int | None
) -> None:
    links = [LinkSpeed("a", other, 1.0, one, many) for other, (one, many) in speeds.items()]
    assert sockets(links_text(links), "a", "abc") == connections


def test_single_connection_measurements_set_no_sockets() -> None:
    assert sockets(links_text(mesh({"ab": 100})), "a", "ab") is None


def test_sixteen_sockets_are_four_threads_of_four() -> None:
    assert nccl_settings(PARALLEL_CONNECTIONS) == "NCCL_SOCKET_NTHREADS=4\nNCCL_NSOCKS_PERTHREAD=4\n"
    assert nccl_settings(1) == "NCCL_SOCKET_NTHREADS=1\nNCCL_NSOCKS_PERTHREAD=1\n"
