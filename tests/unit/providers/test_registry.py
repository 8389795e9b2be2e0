"""The table of providers."""

from importlib.metadata import EntryPoint

import pytest

import shoal.providers
from shoal.errors import ProviderError
from shoal.providers import PROVIDERS, names, provider, table
from shoal.providers.fake import FakeProvider


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_name_in_the_table_gives_a_provider(name: str) -> None:
    assert type(provider(name)).__name__ == PROVIDERS[name].partition(":")[2]


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ProviderError, match="no provider is called 'cloud'\n  fix: use one of: fake, sandbox"):
        provider("cloud")


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:NoSuchProvider", "shoal.providers")
    monkeypatch.setattr(table, "entry_points", lambda group: [entry])
    with pytest.raises(ProviderError) as caught:
        provider("mine")
    assert str(caught.value) == (
        "provider mine cannot be loaded: module 'shoal.providers.fake' has no attribute 'NoSuchProvider'\n"
        "  fix: mend or remove shoal.providers.fake:NoSuchProvider"
    )


def test_whoever_may_have_made_hosts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:FakeProvider", "shoal.providers")
    monkeypatch.setattr(shoal.providers, "entry_points", lambda group: [entry])
    assert names() == ("mine", "sandbox")


def test_an_installed_package_can_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "shoal.providers.fake:FakeProvider", "shoal.providers")
    monkeypatch.setattr(table, "entry_points", lambda group: [entry])
    assert isinstance(provider("mine"), FakeProvider)
