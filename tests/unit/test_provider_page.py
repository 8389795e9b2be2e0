"""The provider of docs/adding-a-provider.md works: its code is installed, registered and passes the contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documents import ROOT

PAGE = ROOT / "docs" / "adding-a-provider.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's code as an installed package would have it: two modules, and entry points."""
    place = tmp_path_factory.mktemp("tidepool")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [points] = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in zip(("tidepool.py", "tidepool_simulator.py", "test_tidepool.py"), blocks, strict=True):
        (place / name).write_text(text)
    about = place / "tidepool-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tidepool\nVersion: 1.0\n")
    plain = re.sub(r'\[project\.entry-points\."([a-z.]+)"\]', r"[\1]", points)
    (about / "entry_points.txt").write_text(plain.replace('"', ""))
    return place


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(installed), str(ROOT)))
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=installed,
    )


@pytest.mark.timeout(400)
def test_documented_provider_passes_every_contract_test(installed: Path) -> None:
    done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
               "--rootdir", str(installed), "test_tidepool.py")  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) > 50


def test_documented_provider_is_loaded_by_its_entry_points(installed: Path) -> None:
    code = (
        "from shoal.cloud.providers import rental_provider; from shoal.cloud.providers.api import ProviderLogin;"
        "from shoal_simulators import find_simulator;"
        "print(type(rental_provider(ProviderLogin('x', 'tidepool'))).__name__, find_simulator('tidepool').__name__)"
    )
    done = run(installed, "-c", code)
    assert done.stdout.split() == ["Tidepool", "SimulatedTidepool"], done.stderr


SPEC = """
cluster: reef
controller: {host: desktop}
nodesets: {pool: {provider: tidepool, type: one, region: north, max: 4, cpus: 16, memory: 120G, gpus: 1}}
"""


def test_documented_account_installs_its_package_on_the_controller(installed: Path) -> None:
    [account] = re.findall(r"^    (providers: .*)$", PAGE.read_text(), re.MULTILINE)
    code = (
        "import sys; from shoal.spec.loader import load_text; from shoal.roles.elastic import _service_files;"
        "made = _service_files(load_text(sys.argv[1], 's.yaml'));"
        "commands = [item.argv for item in made if getattr(item, 'name', '') == 'install Shoal'];"
        "print([(argv[-2].endswith('.whl'), argv[-1]) for argv in commands])"
    )
    done = run(installed, "-c", code, f"{SPEC}{account}\n")
    assert done.stdout.strip() == "[(True, 'shoal-tidepool>=1')]", done.stderr
    done = run(installed, "-c", code, f"{SPEC}{account}\n".replace('package: "shoal-tidepool>=1", ', ""))
    assert (
        "s.yaml:5:13 providers.tidepool: missing key `package`, "
        "name the package that has this kind, for the controller: `package: shoal-mine>=1`"
    ) in done.stderr


def test_unknown_simulator_is_reported_with_the_existing_names(installed: Path) -> None:
    done = run(installed, "-m", "shoal", "simulate", "tidepol")
    assert done.returncode == 2
    assert "there is no simulator of 'tidepol'" in done.stderr
    assert "sandbox, tidepool" in done.stderr


def test_documented_provider_is_as_short_as_claimed(installed: Path) -> None:
    assert len((installed / "tidepool.py").read_text().splitlines()) < 250
