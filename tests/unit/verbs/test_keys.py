"""New keys for a running cluster: all hosts get the same, the next run finishes an interrupted rotation."""

import asyncio
import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import context_of
from tests.support.fake_world import LAB, World, lab

from shoal.agent.facts import FileFact
from shoal.errors import ShoalError, UsageError
from shoal.hosts.api import Result
from shoal.network.wireguard import PEERS, PUBLIC_KEY
from shoal.plan import rotation, rotation_slurm
from shoal.plan import slurm_downtime as probe
from shoal.plan.rotation_wireguard import INSTALL_NEXT, MAKE_NEXT, MARK
from shoal.plan.slurm_downtime import Probe, Probes, failed_seconds, parse_probe
from shoal.roles.auth import KEY, NEXT_KEY
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_NEXT
from shoal.roles.elastic import HOLD
from shoal.slurm.conf import JWKS
from shoal.slurm.state import NODES_COMMAND
from shoal.verbs.keys import rotate
from shoal.verbs.rentals import TOUCH
from shoal.verbs.slurmctld import NO_CONFIGURATION
from shoal_simulators.fake_host import Call, FakeAgent, FakeProgram


class KeyAgent(FakeAgent):
    """An agent whose host has the secret files that were written to it."""

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["op"] == "facts":
            digests = {path: FileFact(hashlib.sha256(data).hexdigest()) for path, data in self.secrets.items()}
            self.facts = replace(self.facts, files=digests)
        if request["op"] == "apply":
            for item in request["items"]:
                if "content_b64" in item:
                    self.secrets[item["path"]] = base64.b64decode(item["content_b64"])
                elif item["kind"] == "file" and item["content"] is None:
                    self.secrets.pop(item["path"], None)
        return super()._answer(request)


async def _paused(program: FakeProgram) -> int:
    await program.print(b"paused\n")
    await program.readline()
    await program.print(b"resumed\n")
    return 0


async def _probed(program: FakeProgram) -> int:
    for number in range(1000):
        await program.print(f"{number}.0 {number}.5 {int(number in (3, 4))}\n".encode())
        await asyncio.sleep(0.01)
    return 0


def cluster(old: bytes = b"old", text: str = LAB, **keys: bytes) -> World:
    """A lab whose hosts have a munge key: `old`, or what `keys` gives them."""
    world = lab(text)
    for name, host in world.hosts.items():
        agent = KeyAgent(world.agents[name].facts, secrets={MUNGE_KEY: keys.get(name, old)})
        world.agents[name] = agent
        host.answers |= {
            ("python3",): agent.play,
            rotation.PAUSE_COMMAND: _paused,
            probe.PROBE_COMMAND: _probed,
            ("munge", "-n"): b"MUNGE:credential:\n",
            ("unmunge",): b"",
        }
    return world


def keys_of(world: World) -> set[bytes]:
    return {agent.secrets[MUNGE_KEY] for agent in world.agents.values()}


@cases("name", "munge", "all")
async def test_all_hosts_get_the_same_new_key_and_the_failure_time_of_slurm_is_reported(name: str) -> None:
    world = cluster()
    [key] = (await rotate(context_of(world), name)).rotated
    assert (key.key, key.hosts, key.finished) == ("munge", ("c1", "n1", "n2"), False)
    assert len(keys_of(world)) == 1 and keys_of(world) != {b"old"}
    assert not any(MUNGE_KEY_NEXT in agent.secrets for agent in world.agents.values())
    assert rotation.PAUSE_COMMAND in world.hosts["c1"].argvs, "no job starts meanwhile"
    assert (key.failed_seconds, key.slowest_answer) == (1.5, 0.5) and key.asked >= 6
    assert key.failed_by_host == {"c1": 1.5, "n1": 1.5, "n2": 1.5}


@cases("done, noted", ((), True), (("n1",), True), (("n1", "c1"), True), (("n1", "c1"), False))
async def test_killed_rotation_continues_with_its_key(done: tuple[str, ...], noted: bool) -> None:
    """A host with an old key gets the controller's, also where no rotation was noted."""
    world = cluster(**dict.fromkeys(done, b"begun"))
    if noted:
        world.agents["c1"].secrets[MUNGE_KEY_NEXT] = b"begun"
    [key] = (await rotate(context_of(world), "munge")).rotated
    assert key.finished
    assert keys_of(world) == {b"begun"}
    assert MUNGE_KEY_NEXT not in world.agents["c1"].secrets


async def test_nothing_changes_while_a_host_is_unreachable_unless_it_is_skipped() -> None:
    world = cluster()
    world.hosts["n2"].unreachable = True
    assert await error_of(ShoalError, rotate(context_of(world), "munge")) == (
        "n2 would keep the old key and be cut off; nothing was changed\n  n2: does not answer within 10 s\n"
        "  fix: bring it back, or use --leave-unreachable: `shoal up` gives it the new key when it answers"
    )
    assert keys_of(world) == {b"old"}
    result = await rotate(context_of(world), "munge", leave_unreachable=True)
    assert list(result.left) == ["n2"]
    assert result.rotated[0].hosts == ("c1", "n1")
    assert world.agents["n1"].secrets == world.agents["c1"].secrets != world.agents["n2"].secrets


async def test_host_that_rejects_the_controller_credential_is_reported() -> None:
    world = cluster()
    refused = Result(15, stderr=b"unmunge: Error: Invalid credential\n")
    world.hosts["n1"].answers |= {("unmunge",): refused}
    with pytest.raises(ShoalError) as caught:
        await rotate(context_of(world), "munge")
    assert "the rotation is not finished: n1: munged rejects a credential of the controller" in str(caught.value)
    assert MUNGE_KEY_NEXT in world.agents["c1"].secrets


async def test_host_that_cannot_write_the_key_stops_the_rotation_for_the_next_run() -> None:
    world = cluster()
    world.agents["n1"].failing[f"file {MUNGE_KEY}"] = "no space left"
    with pytest.raises(ShoalError, match=r"the rotation is not finished: n1: file /etc/munge/munge.key: no space left"):
        await rotate(context_of(world), "munge")
    begun = world.agents["c1"].secrets[MUNGE_KEY_NEXT]
    world.agents["n1"].failing.clear()
    [key] = (await rotate(context_of(world), "munge")).rotated
    assert key.finished
    assert keys_of(world) == {begun}


@cases(
    "key, words",
    ("kerberos", "there is no key 'kerberos'\n  fix: use one of munge, "),
    ("slurm", "cluster reef has no key of auth/slurm\n  fix: write `auth: slurm` into the file"),
    ("wireguard", "cluster reef has no WireGuard keys\n  fix: it needs `network: wireguard` in the file"),
)
async def test_key_that_the_cluster_has_not_is_rejected_with_the_fix(key: str, words: str) -> None:
    assert (await error_of(UsageError, rotate(context_of(cluster()), key))).startswith(words)


# ---- rented nodes

CLOUD = "  cloud: {provider: lambda, type: gpu_1x_a10, max: 3, image: debian-12}\n"
RENTING = LAB.replace("partitions:", CLOUD + "partitions:") + "providers: {lambda: {key: env:LAMBDA_API_KEY}}\n"


HELD, RELEASED = ("sh", "-c", TOUCH, "sh", HOLD), ("rm", "-f", HOLD)


def renting(*states: str, text: str = RENTING) -> World:
    """A lab with nodes cloud1, cloud2 … which Slurm has in these states."""
    world = cluster(text=text)
    lines = [f"NodeName=cloud{number} CPUTot=1 State={state}\n" for number, state in enumerate(states, 1)]
    answer = "".join(("NodeName=n1 CPUTot=4 State=ALLOCATED\n", *lines)).encode()
    held = {HELD: b"", RELEASED: b""}
    world.hosts["c1"].answers |= {NODES_COMMAND: answer, **held}
    return world


@cases("key", "munge", "all")
async def test_nothing_changes_while_a_rented_node_is_up_or_starting(key: str) -> None:
    world = renting("IDLE+CLOUD", "IDLE+CLOUD+POWERED_DOWN", "ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP")
    assert await error_of(ShoalError, rotate(context_of(world), key, leave_unreachable=True)) == (
        "cloud[1,3] (rented) would keep the old key and be cut off; nothing was changed\n"
        "  fix: run on c1: `scontrol update nodename=cloud[1,3] state=power_down_asap`; "
        "then wait until their jobs have ended and they are gone"
    )
    assert keys_of(world) == {b"old"} and world.applied() == []
    assert not any(MUNGE_KEY_NEXT in agent.secrets for agent in world.agents.values())


@cases(
    "state, text",
    *((state, RENTING) for state in ("IDLE+CLOUD", "MIXED+CLOUD+POWERED_DOWN", "DOWN+CLOUD+NOT_RESPONDING")),
    ("IDLE+CLOUD+POWER_DOWN", RENTING),
    ("IDLE+CLOUD", LAB),  # the file names it no more
)
async def test_rented_node_counts_as_up_unless_released_and_without_jobs(state: str, text: str) -> None:
    world = renting(state, text=text)
    with pytest.raises(ShoalError, match=r"cloud1 \(rented\) would keep"):
        await rotate(context_of(world), "munge")
    assert text == LAB or world.hosts["c1"].argvs[-1] == RELEASED, "joins go on"


async def test_rented_nodes_without_a_machine_block_no_rotation_and_joins_are_paused_until_it_ends() -> None:
    """Before the nodes that are up are listed, so that none joins in between."""
    world = renting("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD+POWERING_DOWN", "DOWN+CLOUD+POWERED_DOWN")
    [key] = (await rotate(context_of(world), "munge")).rotated
    assert key.hosts == ("c1", "n1", "n2")
    assert len(keys_of(world)) == 1 and keys_of(world) != {b"old"}
    did = [argv for argv in world.hosts["c1"].argvs if argv in (HELD, NODES_COMMAND, RELEASED)]
    assert (did[:2], did[-1], did.count(RELEASED)) == ([HELD, NODES_COMMAND], RELEASED, 1)


@cases(
    "command, complaint, words",
    (
        HELD,
        "touch: cannot touch: No space left on device",
        "c1: cannot keep new rented nodes from joining: touch: cannot touch: No space left on device\n"
        "  fix: solve that first; nothing was changed",
    ),
    (
        NODES_COMMAND,
        "slurm_load_node error: Unable to contact slurm controller (connect failure)",
        "cannot list the rented nodes that are up; nothing was changed: slurm_load_node error: Unable to "
        "contact slurm controller (connect failure)\n  fix: run `shoal up`, then this command again",
    ),
    (
        NODES_COMMAND,
        f"scontrol: fatal: {NO_CONFIGURATION}",
        "Slurm on c1 is not set up: it has no configuration\n  fix: run `shoal up`",
    ),
    ids=["joins are not paused", "slurmctld is silent", "Slurm is not set up"],
)
async def test_nothing_changes_where_the_controller_fails(command: tuple[str, ...], complaint: str, words: str) -> None:
    world = renting("IDLE+CLOUD+POWERED_DOWN")
    world.hosts["c1"].answers |= {command: Result(1, stderr=f"{complaint}\n".encode())}
    assert await error_of(ShoalError, rotate(context_of(world), "munge")) == words
    assert keys_of(world) == {b"old"}


# ---- probes


def probes(*answered: int) -> list[Probe]:
    return [Probe(float(at), at + 0.5, bool(good)) for at, good in enumerate(answered)]


@cases(
    "answered, seconds",
    ((1, 1, 1), 0.0),
    ((1, 0, 1), 0.5),
    ((1, 0, 0, 1), 1.5),
    ((0, 1, 0, 0), 2.0),
    ((), 0.0),
    ((0,), 0.5),
)
def test_failure_time_counts_between_probes(answered: tuple[int, ...], seconds: float) -> None:
    assert failed_seconds(probes(*answered)) == seconds
    assert Probes({"a": probes(1, 0, 1), "b": probes(0, 0, 0)}).failed_seconds == 2.5
    assert Probes().failed_seconds == 0.0


@cases(
    "line, probe",
    *((line, None) for line in ("", "Welcome to n1", "1.0 2.0", "a b c")),
    ("1,5 2,5 0", Probe(1.5, 2.5, True)),
)
def test_probe_may_have_a_decimal_comma_and_output_of_login_scripts_is_none(line: str, probe: Probe | None) -> None:
    assert parse_probe(line) == probe


# ---- auth/slurm


def slurm_cluster(text: str = LAB, **keys: bytes) -> tuple[World, list[list[str]]]:
    """A cluster with `auth: slurm`, and, for the node n1, the keys of every slurm.jwks it was given, signer first."""
    world = cluster(text=text)
    world.spec = world.spec.model_copy(update={"auth": "slurm"})
    given: list[list[str]] = []
    starts = {"count": 0}

    def nodes(call: Call) -> bytes:
        line = "NodeName={} CPUTot=4 State=IDLE SlurmdStartTime={}\n"
        return "".join(line.format(name, starts["count"]) for name in ("n1", "n2")).encode()

    def reconfigure(call: Call) -> bytes:
        starts["count"] += 1
        return b""

    class Noting(KeyAgent):
        def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
            for item in request.get("items", ()) if request["op"] == "apply" else ():
                if item.get("path") == JWKS:
                    entries = json.loads(item["content"])["keys"]
                    given.append([entry["k"] for entry in sorted(entries, key=lambda entry: "use" not in entry)])
            return super()._answer(request)

    for name, host in world.hosts.items():
        kind = Noting if name == "n1" else KeyAgent
        agent = kind(world.agents[name].facts, secrets={KEY: keys.get(name, b"old\n")})
        world.agents[name] = agent
        host.answers |= {
            ("python3",): agent.play,
            NODES_COMMAND: nodes,
            ("scontrol", "reconfigure"): reconfigure,
            ("timeout", "20", "sinfo"): b"",
        }
    return world, given


async def test_new_slurm_key_verifies_first_then_signs_then_replaces() -> None:
    world, given = slurm_cluster()
    [key] = (await rotate(context_of(world), "slurm")).rotated
    assert (key.hosts, key.finished) == (("c1", "n1", "n2"), False)
    assert given == [["@KEY@", "@NEXT@"], ["@NEXT@", "@KEY@"], ["@KEY@"]]
    assert len({agent.secrets[KEY] for agent in world.agents.values()}) == 1
    assert world.agents["c1"].secrets[KEY] != b"old\n"
    assert not any(NEXT_KEY in agent.secrets for agent in world.agents.values())


@cases("committed", False, True)
async def test_killed_slurm_key_rotation_continues_with_its_key(committed: bool) -> None:
    world, given = slurm_cluster(**({"c1": b"begun\n"} if committed else {}))
    world.agents["c1"].secrets[NEXT_KEY] = b"begun\n"
    [key] = (await rotate(context_of(world), "slurm")).rotated
    assert key.finished
    assert {agent.secrets[KEY] for agent in world.agents.values()} == {b"begun\n"}
    assert given[-1] == ["@KEY@"]


async def test_slurmd_without_the_new_key_keeps_the_old_key_signing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_slurm, "RECONFIGURE_TIMEOUT_S", 0.0)
    world, given = slurm_cluster()
    world.hosts["c1"].answers |= {("scontrol", "reconfigure"): b""}
    with pytest.raises(ShoalError) as caught:
        await rotate(context_of(world), "slurm")
    assert "the rotation is not finished: slurmd on n[1-2] has not read the new keys" in str(caught.value)
    assert given == [["@KEY@", "@NEXT@"]]  # no host signs with it yet


BOOKS_AT_THE_DOOR = LAB + "login: {hosts: [{name: door, address: 10.0.0.2}]}\naccounting: {host: door}\n"


async def test_login_host_with_the_database_restarts_both_daemons() -> None:
    world, given = slurm_cluster(BOOKS_AT_THE_DOOR)
    door, restart = world.hosts["door"], ("systemctl", "restart", "sackd", "slurmdbd")
    door.answers |= {restart: Result(1, stderr=b"Job for slurmdbd.service failed.\n")}
    assert await error_of(ShoalError, rotate(context_of(world), "slurm")) == (
        "the rotation is not finished: door: sackd and slurmdbd did not restart: Job for slurmdbd.service failed.\n"
        "  fix: run the same command again"
    )
    assert given == [["@KEY@", "@NEXT@"]]
    world, _ = slurm_cluster(BOOKS_AT_THE_DOOR)
    door = world.hosts["door"]
    door.answers |= {restart: b""}
    await rotate(context_of(world), "slurm")
    assert door.argvs.count(restart) == 3


# ---- WireGuard


def mesh(*, begun: bool = False) -> tuple[World, list[tuple[str, str]]]:
    """A cluster over WireGuard, and the calls on each host, in order; shell commands by their script."""
    world = lab(LAB + "network: wireguard\n")
    done: list[tuple[str, str]] = []
    for number, (name, host) in enumerate(world.hosts.items(), 1):
        key = {PUBLIC_KEY: FileFact(text=base64.b64encode(bytes([number] * 32)).decode() + "\n")}
        files = {**world.agents[name].facts.files, **key}
        agent = FakeAgent(replace(world.agents[name].facts, files=files, tun=True, modules=("wireguard",)))
        world.agents[name] = agent

        def shell(call: Call, name: str = name) -> bytes:
            done.append((name, call.argv[2]))
            return b"7: shoal0    inet 10.77.0.1/16 scope global shoal0\n"

        host.answers |= {
            ("python3",): agent.play,
            rotation.PAUSE_COMMAND: _paused,
            probe.PROBE_COMMAND: _probed,
            ("test", "-e", MARK): b"" if begun else Result(1),
            ("sh", "-c"): shell,
        }
    return world, done


async def test_all_hosts_generate_wireguard_keys_before_any_installs_a_key() -> None:
    world, done = mesh()
    [key] = (await rotate(context_of(world), "wireguard")).rotated
    assert (key.key, key.hosts, key.finished) == ("wireguard", ("c1", "n1", "n2"), False)
    scripts = [script for _, script in done]
    assert scripts[:3] == [MAKE_NEXT] * 3
    assert scripts[3] == f"touch {MARK}"
    assert scripts[4:7] == [INSTALL_NEXT] * 3
    assert done[-1] == ("c1", f"rm -f {MARK}")
    for agent in world.agents.values():
        assert f"file {PEERS}" in agent.items


async def test_container_behind_a_tunnel_is_skipped() -> None:
    world, done = mesh()
    world.agents["n2"].facts = replace(world.agents["n2"].facts, tun=False, init="")
    [key] = (await rotate(context_of(world), "wireguard")).rotated
    assert key.hosts == ("c1", "n1")
    assert "n2" not in [name for name, _ in done]
    assert "n2" not in world.applied()


async def test_killed_wireguard_rotation_generates_no_further_keys() -> None:
    world, done = mesh(begun=True)
    [key] = (await rotate(context_of(world), "wireguard")).rotated
    assert key.finished
    assert MAKE_NEXT not in [script for _, script in done]
    assert [script for _, script in done][:3] == [INSTALL_NEXT] * 3


async def test_private_key_is_never_an_argument_and_never_leaves_its_host() -> None:
    world, _ = mesh()
    await rotate(context_of(world), "wireguard")
    asked = [request for agent in world.agents.values() for request in agent.requests if request["op"] == "secret"]
    assert asked == []
    printed = [call for host in world.hosts.values() for call in host.argvs if "cat" in " ".join(call).split()]
    assert all("wireguard.key" not in " ".join(call).split("cat ")[-1] for call in printed)
