"""Which ids the accounts get."""

from shoal.agent.facts import Facts, UnixIds
from shoal.roles.component import AccountIds, ServiceIds, choose_ids


def host(users: dict[str, int], groups: dict[str, int]) -> Facts:
    return Facts(
        users={name: UnixIds(number) for name, number in users.items()},
        groups={name: UnixIds(number) for name, number in groups.items()},
    )


EMPTY = host({}, {})


def test_fresh_hosts_get_the_debian_slurm_id_and_a_free_munge_id() -> None:
    assert choose_ids("c", {"c": EMPTY, "n": EMPTY}) == ServiceIds(
        slurm=AccountIds(64030, 64030), munge=AccountIds(980, 980)
    )


def test_id_used_on_any_host_is_skipped() -> None:
    taken = host({"backup": 980}, {"printers": 979})
    assert choose_ids("c", {"c": EMPTY, "n": taken}).munge == AccountIds(978, 978)


def test_ids_of_the_controller_are_kept() -> None:
    controller = host({"munge": 104, "slurm": 999}, {"munge": 110, "slurm": 998})
    other = host({"munge": 117}, {"munge": 120})
    ids = choose_ids("c", {"n": other, "c": controller})
    assert ids == ServiceIds(slurm=AccountIds(999, 998), munge=AccountIds(104, 110))


def test_ids_of_the_controller_are_not_kept_on_a_conflict() -> None:
    controller, other = host({"munge": 104}, {"munge": 110}), host({"sshd": 104}, {})
    assert choose_ids("c", {"c": controller, "n": other}).munge == AccountIds(980, 980)


def test_ids_of_another_host_are_used_when_the_controller_has_none() -> None:
    other = host({"munge": 104}, {"munge": 110})
    assert choose_ids("c", {"c": EMPTY, "n": other}).munge == AccountIds(104, 110)
