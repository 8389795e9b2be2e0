"""The table of providers."""

from importlib.metadata import EntryPoint

import pytest

from shoal.errors import ProviderError
from shoal.providers import PROVIDERS, names, provider, table
from shoal.providers.fake import FakeProvider
from shoal.providers.rented import abilities


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_name_in_the_table_gives_a_provider(name: str) -> None:
    assert type(provider(name)).__name__ == PROVIDERS[name].partition(":")[2]


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ProviderError, match="no provider is called 'cloud'\n  fix: use one of: fake, sandbox"):
        provider("cloud")


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:NoSuchProvider", "shoal.providers")
    monkeypatch.setattr(table, "_installed", lambda group: [entry])
    with pytest.raises(ProviderError) as caught:
        provider("mine")
    assert str(caught.value) == (
        "provider mine cannot be loaded: module 'shoal.providers.fake' has no attribute 'NoSuchProvider'\n"
        "  fix: correct or remove shoal.providers.fake:NoSuchProvider"
    )


def test_whoever_may_have_made_hosts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:FakeProvider", "shoal.providers")
    monkeypatch.setattr(table, "_installed", lambda group: [entry])
    assert names() == ("mine", "sandbox")


def test_an_installed_package_can_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:FakeProvider", "shoal.providers")
    monkeypatch.setattr(table, "_installed", lambda group: [entry])
    assert isinstance(provider("mine"), FakeProvider)


class Choosy:
    """A provider of somebody else's."""

    def __init__(self) -> None:
        raise WHY


WHY: Exception = ValueError("no luck")


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (ValueError("no luck"), f"provider mine cannot be loaded: no luck\n  fix: correct or remove {__name__}:Choosy"),
        (ProviderError("no key", hint="give one"), "no key\n  fix: give one"),
    ],
)
def test_what_a_package_says_itself_is_told_and_any_other_error_is_named_as_its_own(
    monkeypatch: pytest.MonkeyPatch, why: Exception, told: str
) -> None:
    monkeypatch.setattr(table, "_installed", lambda group: [EntryPoint("mine", f"{__name__}:Choosy", group)])
    monkeypatch.setitem(globals(), "WHY", why)
    with pytest.raises(ProviderError) as caught:
        provider("mine")
    assert str(caught.value) == told


def test_what_a_kind_can_do_is_known_without_access_and_not_for_one_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert abilities("runpod").container
    with pytest.raises(LookupError, match="no provider is called 'moon'"):
        abilities("moon")
    entry = EntryPoint("moon", "no.such.module:Moon", "shoal.renters")
    monkeypatch.setattr(table, "_installed", lambda group: [entry])
    with pytest.raises(LookupError, match="provider moon cannot be loaded: No module named 'no'"):
        abilities("moon")
