"""The service reads what `shoal up` writes to the controller."""

from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of

from shoal.agent.document import File, SecretRef
from shoal.cloud.providers.api import FailureKind, Offer, ProviderLogin, RentalOrder
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import UnavailableProvider
from shoal.cloud.service.settings import read_settings
from shoal.elastic import make_service
from shoal.errors import ProviderError, UsageError
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.elastic import SETTINGS, ElasticComponent

REEF = spec_of("""
cluster: reef
controller: {host: c1}
nodesets:
  cloud: {max: 2, offers: [{provider: cheap, type: gpu_1x_a10}, {provider: gcp, type: a2-highgpu-1g}]}
providers:
  cheap: {kind: lambda, key: env:K, url: "http://10.0.0.1:8080"}
  gcp: {key: "file:~/sa.json", project: reef-1}
budget: {per_day: 20}
users: {ada: {uid: 2000}}
""")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The controller's directory as a document makes it."""
    cluster = assemble(REEF, {"c1": host_facts("c1", "10.0.0.1")}, {"c1": "10.0.0.1"})
    for item in ElasticComponent().documents(cluster, cluster.controller)[Stage.SERVICES]:
        if isinstance(item, File) and item.path.startswith(SETTINGS):
            path = tmp_path / Path(item.path).relative_to(SETTINGS)
            path.parent.mkdir(exist_ok=True)
            secret = isinstance(item.content, SecretRef)
            path.write_text(f"secret-of-{path.name}\n" if secret else str(item.content))
    (tmp_path / "id_ed25519.pub").write_text("ssh-ed25519 AAAA shoal reef\n")
    return tmp_path


def test_service_reads_the_written_settings(directory: Path) -> None:
    found = read_settings(directory)
    assert found.spec == REEF
    assert found.accounts == {
        "cheap": ProviderLogin("cheap", "lambda", "secret-of-cheap", "http://10.0.0.1:8080"),
        "gcp": ProviderLogin("gcp", "gcp", "secret-of-gcp", "", {"project": "reef-1"}),
    }
    assert (found.public_key, found.identity) == ("ssh-ed25519 AAAA shoal reef", directory / "id_ed25519")
    assert "secret-of" not in repr(found)


@cases(
    "file, text, cause",
    ("spec.json", None, "No such file or directory"),
    ("spec.json", "{", "it is not JSON"),
    ("spec.json", '{"cluster": "reef", "new": 1}', "it was written by another version of Shoal"),
    ("accounts.json", '{"cheap": {"kind": "x"}}', "account cheap is incomplete"),
    ("keys/cheap", None, "No such file or directory"),
    ("id_ed25519.pub", None, "No such file or directory"),
)
def test_missing_or_invalid_settings_are_reported_with_the_fix(
    directory: Path, file: str, text: str | None, cause: str
) -> None:
    (directory / file).unlink() if text is None else (directory / file).write_text(text)
    with pytest.raises(UsageError) as caught:
        read_settings(directory)
    assert str(caught.value) == f"cannot read {directory}/{file}: {cause}\n  fix: run `shoal up`, which writes it"


async def test_account_with_an_invalid_key_does_not_affect_the_others(directory: Path, tmp_path: Path) -> None:
    """The key for Google is no service account: that account fails, the other one works."""
    settings = read_settings(directory)
    ledger = Ledger.open(tmp_path / "ledger.db")
    accounts = make_service(settings, ledger).context.accounts
    cheap, gcp = accounts["cheap"].provider, accounts["gcp"].provider
    assert not isinstance(cheap, UnavailableProvider) and isinstance(gcp, UnavailableProvider)
    with pytest.raises(ProviderError) as raised:
        await gcp.instances("reef")
    [outcome] = await gcp.create(
        [RentalOrder("reef", "cloud1", "t", Offer("gcp", "a2-highgpu-1g", "r"), "ssh-ed25519 A")]
    )
    assert (outcome.failure, outcome.scope, outcome.message) == (FailureKind.AUTH, "provider", raised.value.message)
    assert "secret-of-gcp" not in outcome.message
    for one in accounts.values():
        await one.provider.close()
    ledger.close()
