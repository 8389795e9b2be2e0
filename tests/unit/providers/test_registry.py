"""The table of providers."""

from importlib.metadata import EntryPoint

import pytest
from tests.support.cases import cases

from shoal import registry as table
from shoal.cloud.providers import abilities
from shoal.errors import ProviderError
from shoal.hosts.provider import PROVIDERS, names, provider
from shoal_simulators.fake_provider import FakeProvider


@cases("name", *sorted(PROVIDERS))
def test_every_name_in_the_table_gives_a_provider(name: str) -> None:
    assert type(provider(name)).__name__ == PROVIDERS[name].partition(":")[2]


def test_unknown_name_is_reported_with_the_existing_names() -> None:
    with pytest.raises(ProviderError, match="no provider is called 'cloud'\n  fix: use one of: sandbox"):
        provider("cloud")


def test_installed_package_can_add_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal_simulators.fake_provider:FakeProvider", "shoal.providers")
    monkeypatch.setattr(table, "_list_entry_points", lambda group: [entry])
    assert names() == ("mine", "sandbox") and isinstance(provider("mine"), FakeProvider)


def test_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal_simulators.fake_provider:NoSuchProvider", "shoal.providers")
    monkeypatch.setattr(table, "_list_entry_points", lambda group: [entry])
    with pytest.raises(ProviderError) as caught:
        provider("mine")
    assert str(caught.value) == (
        "cannot load provider mine: module 'shoal_simulators.fake_provider' has no attribute 'NoSuchProvider'\n"
        "  fix: correct or remove shoal_simulators.fake_provider:NoSuchProvider"
    )


class Choosy:
    """A third-party provider."""

    def __init__(self) -> None:
        raise WHY


WHY: Exception = ValueError("no luck")


@cases(
    "why, told",
    (ValueError("no luck"), f"cannot load provider mine: no luck\n  fix: correct or remove {__name__}:Choosy"),
    (ProviderError("no key", hint="give one"), "no key\n  fix: give one"),
)
def test_shoal_error_of_a_package_is_kept_and_other_errors_name_the_package(
    monkeypatch: pytest.MonkeyPatch, why: Exception, told: str
) -> None:
    monkeypatch.setattr(table, "_list_entry_points", lambda group: [EntryPoint("mine", f"{__name__}:Choosy", group)])
    monkeypatch.setitem(globals(), "WHY", why)
    with pytest.raises(ProviderError) as caught:
        provider("mine")
    assert str(caught.value) == told


def test_abilities_are_readable_without_access_and_unknown_kinds_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abilities("runpod").container
    with pytest.raises(LookupError, match="no provider is called 'moon'"):
        abilities("moon")
    entry = EntryPoint("moon", "no.such.module:Moon", "shoal.renters")
    monkeypatch.setattr(table, "_list_entry_points", lambda group: [entry])
    with pytest.raises(LookupError, match="cannot load provider moon: No module named 'no'"):
        abilities("moon")
