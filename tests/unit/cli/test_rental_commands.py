"""`shoal offers`, `cost` and `reap` as a person types them, against simulated clouds and a real SSH server."""

import asyncio
import contextlib
import getpass
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.documents import ROOT, commands
from tests.support.sshd_server import needs_sshd, running_sshd
from tests.unit.cloud.rentals import rental
from typer.testing import CliRunner

from shoal.cli.app import make_app
from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import Offer, ProviderLogin, RentalOrder
from shoal.cloud.service.ledger import Ledger
from shoal.verbs import cost, reap, rentals
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

KEY = "sk-0123456789abcdef"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFyC2Ek5rVqbJ4s0JDmUI7jH9pO7Vt5vYb0Kqk4m8zqF controller"
BUDGETS = ROOT / "docs/budgets.md"


@contextlib.contextmanager
def simulated(kind: str) -> Iterator[str]:
    """A simulated cloud, served by a thread, in which machines start and stop at once; its URL."""
    ready: queue.SimpleQueue[tuple[str, Callable[[], object]] | BaseException] = queue.SimpleQueue()

    async def simulate() -> None:
        made, over, loop = find_simulator(kind), asyncio.Event(), asyncio.get_running_loop()
        profile = replace(made.profile, boot_s=0.0, address_s=0.0, stop_s=0.0)
        simulation = SimulatorApp(made(Market(profile, made.types, NoHosts())), limited=False)
        async with serve(simulation) as url:
            ready.put((url.removesuffix(made.base), partial(loop.call_soon_threadsafe, over.set)))
            await over.wait()

    def run() -> None:
        try:
            asyncio.run(simulate())
        except BaseException as error:
            ready.put(error)
            raise

    thread = threading.Thread(target=run, name=f"simulated {kind}")
    thread.start()
    told = ready.get()
    if isinstance(told, BaseException):
        raise told
    url, stop = told
    try:
        yield url
    finally:
        stop()
        thread.join()


async def at_once(seconds: float) -> None:
    """As long as it takes others to do something, and no longer."""
    await asyncio.sleep(0.01)


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Two clouds, and a shoal.yaml that has accounts there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CLOUD_KEY", KEY)
    monkeypatch.setattr(reap, "POLLING", reap.Polling(sleep=at_once))
    monkeypatch.setattr(rentals, "LEDGER", tmp_path / "ledger.db")
    monkeypatch.setattr(rentals, "STATUS", tmp_path / "status.json")
    for name in ("SHOAL_CLUSTER", "SHOAL_FILE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with simulated("lambda") as first, simulated("runpod") as second:
        found = {"lambda": first, "runpod": second}
        write_file(tmp_path, found)
        yield found


def write_file(place: Path, clouds: dict[str, str], controller: str = "{name: c1, address: 127.0.0.1}") -> None:
    settings = {"lambda": "request_interval: '0', create_interval: '0'", "runpod": "request_interval: '0'"}
    accounts = "".join(
        f"  {name}: {{key: 'env:CLOUD_KEY', url: '{url}', settings: {{{settings[name]}}}}}\n"
        for name, url in clouds.items()
    )
    (place / "shoal.yaml").write_text(
        f"cluster: reef\ncontroller: {{host: {controller}}}\nnodesets:\n  burst:\n    max: 4\n    cpus: 4\n"
        "    memory: 8G\n    gpus: 1\n    offers:\n      - {provider: lambda, type: gpu_1x_h100_sxm5}\n"
        "      - {provider: runpod, type: NVIDIA H100 80GB HBM3}\n"
        "partitions:\n  burst: {nodesets: [burst], default: true}\n"
        f"providers:\n{accounts}budget: {{per_hour: 20}}\n"
    )


@contextlib.contextmanager
def controller(clouds: dict[str, str], place: Path) -> Iterator[None]:
    """This machine's own sshd is the controller."""
    with running_sshd(place / "sshd") as server:
        login = f"port: {server.port}, user: {getpass.getuser()}, identity: {server.identity}"
        write_file(place, clouds, f"{{name: c1, address: 127.0.0.1, {login}}}")
        yield


def order(clouds: dict[str, str], cluster: str = "reef") -> None:
    """Rent a machine in each cloud."""

    async def rent() -> None:
        for name, offer in (
            ("lambda", Offer("lambda", "gpu_1x_h100_sxm5", "us-west-1")),
            ("runpod", Offer("runpod", "NVIDIA H100 80GB HBM3", "US-TX-3")),
        ):
            at_once = {"request_interval": "0", "create_interval": "0"}
            one = rental_provider(ProviderLogin(name, name, KEY, clouds[name], at_once))
            key = await one.ensure_key(cluster, PUBLIC_KEY)
            wanted = RentalOrder(
                cluster, "burst1", f"t-{cluster}-{name}", offer, PUBLIC_KEY, key, user_data="#!/bin/sh\n"
            )
            assert [outcome.ok for outcome in await one.create([wanted])] == [True]
            await one.close()

    asyncio.run(rent())


def still_there(clouds: dict[str, str]) -> list[str]:
    """The names of machines that are billed."""
    found: list[str] = []
    for url in clouds.values():
        bill: dict[str, Any] = httpx.get(f"{url}/_simulator/bill").json()
        found += [one["name"] for one in bill["machines"] if one["ended"] is None]
    return found


def shoal(*words: str) -> Any:
    return CliRunner().invoke(make_app(words[0]), list(words))


def test_offers_lists_every_cloud_and_exits_3_if_a_cloud_is_down(clouds: dict[str, str], tmp_path: Path) -> None:
    done = shoal("offers", "--gpu", "H100", "--count", "8")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["runpod", "lambda"]
    found = json.loads(shoal("offers", "--gpu", "h100", "--provider", "lambda", "--json").stdout)["offers"]
    assert {one["provider"] for one in found} == {"lambda"}
    assert [one["usd_hour"] for one in found] == sorted(one["usd_hour"] for one in found)
    assert shoal("offers", "--market", "spot").stdout == "no such offers\n"
    wrong = shoal("offers", "--market", "bazaar")
    assert (wrong.exit_code, "there is no market 'bazaar'" in wrong.stderr) == (2, True)
    write_file(tmp_path, {**clouds, "runpod": "http://127.0.0.1:9"})
    partly = shoal("offers", "--gpu", "H100")
    assert partly.exit_code == 3
    assert partly.stdout.startswith("✗ runpod: ") and "\nlambda " in partly.stdout
    assert KEY not in partly.output


def test_reap_confirms_deletes_and_verifies_only_machines_of_the_cluster(
    clouds: dict[str, str], tmp_path: Path
) -> None:
    order(clouds)
    order(clouds, "other")
    asked = shoal("reap")
    assert asked.exit_code == 2
    assert "this deletes 2 rented machines of cluster reef" in asked.stderr and "use --yes" in asked.stderr
    assert len(still_there(clouds)) == 4
    write_file(tmp_path, {**clouds, "runpod": "http://127.0.0.1:9"})
    partly = shoal("reap", "--yes")
    assert partly.exit_code == 3
    assert partly.stdout.splitlines()[-1] == "! reef: 1 machine released; run `shoal reap` again"
    write_file(tmp_path, clouds)
    whole = shoal("reap", "--yes", "--json")
    assert whole.exit_code == 0, whole.output
    told = json.loads(whole.stdout)
    assert [(one["account"], one["node"]) for one in told["gone"]] == [("runpod", "burst1")]
    assert (told["remaining"], told["failures"]) == ([], {})
    assert len(still_there(clouds)) == 2  # the other cluster's
    clean = shoal("reap", "--yes")
    assert (clean.exit_code, clean.stdout) == (0, "reef: no provider lists a machine of this cluster\n")


@needs_sshd
def test_documented_budget_commands_run(
    clouds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(clouds)
    ledger, unit = tmp_path / "ledger.db", tmp_path / "unit"
    with Ledger.open(ledger) as kept:
        kept.intend(rental("t-reef-lambda", "burst1", usd_hour=4.29, intended_at=time.time() - 60))
        kept.record_machine("t-reef-lambda", "i", None, time.time() - 60)
    unit.write_text(f"[Service]\nExecStart={sys.executable} -m shoal.elastic\n")
    monkeypatch.setattr(cost, "COMMAND", (*cost.COMMAND[:-1], str(unit), "--ledger", str(ledger)))
    with controller(clouds, tmp_path):
        shown = {}
        for line in (line for block in commands(BUDGETS) for line in block):
            done = shoal(*shlex.split(line)[1:])
            assert done.exit_code == 0, done.output
            shown[line] = done.stdout
    assert "reef: 1 machine\n" in shown["shoal cost"]
    lines = [" ".join(line.split()) for line in shown["shoal cost"].splitlines()]
    assert "now, an hour $4.29 $20.00" in lines
    assert any(line.startswith("burst $0.0") for line in lines)
    assert shown["shoal reap --yes"].endswith("✓ reef: 2 machines released; no provider lists any more\n")
    with Ledger.read(ledger) as kept:
        assert kept.live() == [], "what is proved gone costs nothing more"


@needs_sshd
def test_reap_keeps_ledger_rows_missing_from_lists_unless_forced(clouds: dict[str, str], tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    with Ledger.open(ledger) as kept:
        kept.intend(rental("t1", "burst1", intended_at=time.time() - 60))
        kept.record_machine("t1", "i-1", None, time.time() - 60)
    with controller(clouds, tmp_path):
        doubted = shoal("reap", "--yes", "--json")
        assert doubted.exit_code == 3, doubted.output
        told = json.loads(doubted.stdout)
        assert [(one["account"], one["id"]) for one in told["remaining"]] == [("lambda", "i-1")]
        assert "is it the right key or project?" in str(told["failures"])
        asked = shoal("reap", "--force")
        assert (asked.exit_code, "this removes 1 machines of cluster reef from its ledger" in asked.stderr) == (2, True)
        with Ledger.read(ledger) as kept:
            assert [one.token for one in kept.live()] == ["t1"]
        forced = shoal("reap", "--force", "--yes")
        assert forced.exit_code == 0, forced.output
        assert "though no list ever showed it, found lambda i-1" in forced.stdout
    with Ledger.read(ledger) as kept:
        assert kept.live() == []


def test_cost_command_exits_127_on_a_controller_without_the_service(tmp_path: Path) -> None:
    command = (*cost.COMMAND[:-1], str(tmp_path / "no-unit"))
    assert subprocess.run(command, capture_output=True, check=False).returncode == 127
