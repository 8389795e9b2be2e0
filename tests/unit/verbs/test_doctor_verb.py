"""`shoal doctor` over a cluster in memory: what it asks, what it fixes, and what it leaves alone."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.fake_clusters import raised
from tests.support.fake_world import World, lab

from shoal.contract import VERSION
from shoal.errors import Unreachable, UsageError
from shoal.hosts.api import Result, Target
from shoal.remote import python_command
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordMember
from shoal.verbs import doctor_fixes
from shoal.verbs.context import Context
from shoal.verbs.doctor import DoctorResult, doctor
from shoal.verbs.doctor_fixes import choose_fixes, fix, history
from shoal.verbs.joined_cluster import JoinedCluster, Login
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram

SH = ("sh", "-c")


class Lab:
    """The world of LAB with the programs that the doctor runs."""

    def __init__(self) -> None:
        self.world: World = lab()
        self.reports: dict[str, dict[str, Any]] = {name: {} for name in self.world.hosts}
        """What the hosts report beside what is well."""
        self.starts: list[tuple[str, ...]] = []
        self.record = b""

    async def up(self) -> Context:
        context = await raised(self.world)
        for name, host in self.world.hosts.items():
            host.answers |= {
                python_command("health_probe"): self._probe(name),
                python_command("health_probe", "decode"): self._decode,
                (*SH, doctor_fixes.START_SCRIPT): self._start(name),
                (*SH, doctor_fixes.APPEND_SCRIPT): self._append,
                (*SH, doctor_fixes.READ_SCRIPT): lambda call: self.record,
            }
        return context

    def _probe(self, name: str) -> Callable[[Call], bytes]:
        def answer(call: Call) -> bytes:
            request = json.loads(call.stdin)
            services = dict.fromkeys(request.get("services", ()), "active")
            well = {"services": services, "munge": {"credential": f"of-{name}"}}
            return json.dumps({**well, **self.reports[name]}).encode()

        return answer

    def _decode(self, call: Call) -> bytes:
        return json.dumps(dict.fromkeys(json.loads(call.stdin), "Success")).encode()

    def _start(self, name: str) -> Callable[[Call], bytes]:
        def answer(call: Call) -> bytes:
            self.starts.append((name, *call.argv[4:]))
            self.reports[name].pop("services", None)
            return b""

        return answer

    def _append(self, call: Call) -> bytes:
        self.record += call.stdin
        return b""

    def drain(self, name: str, reason: str, *flags: str) -> None:
        self.world.slurm.states[name] = "+".join(("IDLE", "DRAIN", *flags))
        self.world.slurm.reasons[name] = reason

    @property
    def resumes(self) -> list[tuple[str, ...]]:
        return [words for words in self.world.slurm.updates if "state=resume" in words]


@pytest.fixture
def reef() -> Lab:
    return Lab()


@pytest.fixture
async def context(reef: Lab) -> Context:
    """The cluster is up."""
    return await reef.up()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_fixes, "VERIFY_TIMEOUT_S", 0.0)
    monkeypatch.setattr("shoal.verbs.doctor.KEY_CHECK_INTERVAL_S", 0.0)


def ids(result: DoctorResult) -> list[tuple[str, str]]:
    return [(one.id, one.host) for one in result.findings]


async def test_each_host_is_asked_once(reef: Lab, context: Context) -> None:
    for host in reef.world.hosts.values():
        host.calls.clear()
    result = await doctor(context)
    assert (result.findings, result.checked, result.unchecked) == ((), ("c1", "n1", "n2"), ())
    probe, decode = python_command("health_probe"), python_command("health_probe", "decode")
    assert [call.argv for call in reef.world.hosts["n1"].calls] == [probe]
    asked = [call.argv for call in reef.world.hosts["c1"].calls]
    assert asked[0] == probe and asked[-1] == decode and len(asked) == 4
    assert json.loads(reef.world.hosts["n1"].calls[0].stdin)["services"] == ["munge", "slurmd"]
    credentials = json.loads(reef.world.hosts["c1"].calls[-1].stdin)
    assert credentials == {"c1": "of-c1", "n1": "of-n1", "n2": "of-n2"}
    assert "of-n1" not in str(asked), "a credential is not in a command line"


async def test_hosts_that_do_not_answer_are_findings(
    reef: Lab, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    reef.world.hosts["n1"].unreachable = Unreachable("n1", "does not answer within 10 s")

    async def hang(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    reef.world.hosts["n2"].answers = {python_command("health_probe"): hang}
    monkeypatch.setattr("shoal.verbs.doctor.PROBE_TIMEOUT_S", 0.05)
    result = await doctor(context)
    assert ids(result) == [("unreachable", "n1"), ("unreachable", "n2")]
    assert (result.checked, result.unchecked) == (("c1",), ("n1", "n2"))


@cases("output", b"no JSON", b"[]", b'{"unfinished": 3}')
async def test_answer_that_cannot_be_read_is_a_finding_of_its_host(reef: Lab, context: Context, output: bytes) -> None:
    reef.world.hosts["n1"].answers = {python_command("health_probe"): output}
    result = await doctor(context)
    assert ids(result) == [("unreachable", "n1")] and result.unchecked == ("n1",)


async def test_stopped_slurmctld_is_found_without_asking_slurm(reef: Lab, context: Context) -> None:
    reef.reports["c1"]["services"] = {"munge": "active", "slurmctld": "failed"}
    reef.world.hosts["c1"].calls.clear()
    assert ids(await doctor(context)) == [("slurmctld-stopped", "c1")]
    assert not [call for call in reef.world.hosts["c1"].calls if call.argv[0] in ("scontrol", "squeue")]


async def test_slurm_that_fails_changes_nothing(reef: Lab, context: Context) -> None:
    reef.drain("n1", "Kill task failed")
    reef.world.slurm.broken = "slurm_load_node error: Unable to contact slurm controller\n"
    result = await doctor(context)
    assert ids(result) == [("slurmctld-silent", "c1")]
    assert choose_fixes(result, ()) == []


async def test_only_named_nodes_are_asked_and_shown(reef: Lab, context: Context) -> None:
    for name in ("n1", "n2"):
        reef.reports[name]["services"] = {"slurmd": "failed"}
    reef.world.hosts["n1"].calls.clear()
    assert ids(await doctor(context, "n2")) == [("slurmd-stopped", "n2")]
    assert reef.world.hosts["n1"].calls == []
    with pytest.raises(UsageError, match="has no node n7"):
        await doctor(context, "n7")
    with pytest.raises(UsageError, match="is not a hostlist"):
        await doctor(context, "n[")


async def test_findings_of_a_job(reef: Lab, context: Context) -> None:
    reef.world.slurm.jobs["7"] = "n1"
    for name in ("n1", "n2"):
        reef.drain(name, "Epilog error")
    assert ids(await doctor(context, job="7")) == [("epilog-error", "n1")]
    with pytest.raises(UsageError, match="is not a job"):
        await doctor(context, job="train")


async def test_fix_starts_a_service_then_resumes_and_records(reef: Lab, context: Context) -> None:
    reef.reports["n1"]["services"] = {"munge": "active", "slurmd": "failed"}
    reef.drain("n1", "Kill task failed")
    assert (await history(context)).history == ()
    result = await doctor(context)
    assert [(one.id, one.blocked) for one in result.findings] == [
        ("slurmd-stopped", ""),
        ("kill-task-failed", "first: slurmd does not run (slurmd-stopped)"),
    ]
    after = await fix(context, choose_fixes(result, ()))
    assert reef.starts == [("n1", "slurmd")]
    both = ("slurmd-stopped", "kill-task-failed")
    assert [(one.id, one.fixed, one.detail) for one in after.fixes] == [(id, True, "") for id in both]
    assert after.findings == () and reef.resumes == [("nodename=n1", "state=resume")]
    told = (await history(context)).history
    assert [(one.id, one.host, one.action, one.fixed) for one in told] == [
        ("slurmd-stopped", "n1", "start slurmd", True),
        ("kill-task-failed", "n1", "resume", True),
    ]
    assert "@" in told[0].by and told[0].time > 0
    reef.starts.clear()
    reef.reports["n1"]["services"] = {"munge": "failed", "slurmd": "failed"}
    after = await fix(context, choose_fixes(await doctor(context), ()))
    assert sorted(reef.starts) == [("n1", "munge"), ("n1", "slurmd")] and after.findings == ()


async def test_slurmd_is_started_after_its_host_has_the_right_key(reef: Lab, context: Context) -> None:
    decode = python_command("health_probe", "decode")

    def reject(call: Call) -> bytes:
        answers = {host: "Invalid credential" if host == "n1" else "Success" for host in json.loads(call.stdin)}
        return json.dumps(answers).encode()

    for host in reef.world.hosts.values():
        host.answers |= {decode: reject}
    reef.reports["n1"]["services"] = {"munge": "active", "slurmd": "failed"}
    both = choose_fixes(await doctor(context), ["slurmd-stopped", "munge-key"])
    after = await fix(context, both)
    assert [(one.id, one.fixed) for one in after.fixes] == [("munge-key", False), ("slurmd-stopped", False)]
    assert reef.starts == [], "it would not help"
    for host in reef.world.hosts.values():  # as after `shoal up`
        host.answers |= {decode: reef._decode}
    after = await fix(context, both)
    assert [(one.id, one.fixed) for one in after.fixes] == [("munge-key", True), ("slurmd-stopped", True)]
    assert reef.starts == [("n1", "slurmd")]


async def test_key_that_differs_for_a_moment_is_no_finding(reef: Lab, context: Context) -> None:
    """As while `shoal keys rotate munge` runs."""
    asked: list[set[str]] = []

    def reject_once(call: Call) -> bytes:
        asked.append({*json.loads(call.stdin)})
        return json.dumps(dict.fromkeys(asked[-1], "Success" if len(asked) > 1 else "Invalid credential")).encode()

    reef.world.hosts["c1"].answers |= {python_command("health_probe", "decode"): reject_once}
    assert (await doctor(context)).findings == ()
    assert asked == [{"c1", "n1", "n2"}] * 2


async def test_fix_that_does_not_help_says_so(reef: Lab, context: Context) -> None:
    reef.reports["n1"]["services"] = {"slurmd": "failed"}
    result = await doctor(context)

    fails = Result(1, stderr=b"Job for slurmd.service failed.\n")
    reef.world.hosts["n1"].answers |= {(*SH, doctor_fixes.START_SCRIPT): fails}
    after = await fix(context, choose_fixes(result, ["slurmd-stopped"]))
    [outcome] = after.fixes
    assert (outcome.fixed, outcome.detail) == (False, "slurmd does not start: Job for slurmd.service failed.")
    assert ids(after) == [("slurmd-stopped", "n1")]


async def test_drain_of_a_person_stays_and_one_of_a_hidden_cause_is_fixed_by_name(reef: Lab, context: Context) -> None:
    reef.drain("n1", "fan broken")
    result = await doctor(context)
    assert ids(result) == [("person-drain", "n1")]
    assert choose_fixes(result, ()) == []
    with pytest.raises(UsageError, match=r"cannot fix person-drain: a person must\n  fix: .* `shoal node resume n1`"):
        choose_fixes(result, ["person-drain"])
    with pytest.raises(UsageError, match=r"cannot fix disk-full: .*\n  fix: `shoal doctor` does not find it now; free"):
        choose_fixes(result, ["disk-full"])
    reef.drain("n1", "Prolog error")  # Shoal cannot see its cause
    result = await doctor(context)
    assert choose_fixes(result, ()) == []
    assert (await fix(context, choose_fixes(result, ["prolog-error"]))).findings == ()
    assert reef.resumes == [("nodename=n1", "state=resume")]


@cases("state", "IDLE+DRAIN", "DOWN")
async def test_reason_that_changes_meanwhile_keeps_the_node(reef: Lab, context: Context, state: str) -> None:
    reef.drain("n1", "Kill task failed")
    chosen = choose_fixes(await doctor(context), ())
    reef.drain("n1", "Anna looks at it")
    reef.world.slurm.states["n1"] = state
    [outcome] = (await fix(context, chosen)).fixes
    assert (outcome.fixed, outcome.detail) == (False, "its reason has changed meanwhile: Anna looks at it")
    assert reef.resumes == []


async def test_unknown_finding_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        choose_fixes(DoctorResult("reef"), ["low-memry"])
    assert str(caught.value) == "there is no finding 'low-memry'\n  fix: did you mean `low-memory`?"
    assert choose_fixes(DoctorResult("reef"), ["low-memory"]) == []


async def test_rejected_registration_is_fixed_in_three_steps_if_slurm_accepts_it(reef: Lab, context: Context) -> None:
    reef.drain("n1", "Low CPUs", "INVALID_REG")
    [outcome] = (await fix(context, choose_fixes(await doctor(context), ["low-cpus"]))).fixes
    assert (outcome.fixed, outcome.detail) == (False, "Slurm still rejects its registration: Low CPUs")
    assert reef.resumes == []
    reef.starts.clear()
    reef.drain("n1", "Low socket*core*thread count, Low CPUs", "INVALID_REG")
    register = reef._start("n1")

    def restart(call: Call) -> bytes:
        reef.drain("n1", reef.world.slurm.reasons["n1"])
        return register(call)

    reef.world.hosts["n1"].answers |= {(*SH, doctor_fixes.START_SCRIPT): restart}
    result = await doctor(context)
    assert ids(result) == [("low-cores", "n1"), ("low-cpus", "n1")]
    after = await fix(context, choose_fixes(result, ["low-cores", "low-cpus"]))
    assert [one.fixed for one in after.fixes] == [True, True] and after.findings == ()
    assert reef.starts == [("n1", "slurmd")] and reef.resumes == [("nodename=n1", "state=resume")]


# ---- ordinary users


async def test_user_sees_what_concerns_own_jobs_without_root(reef: Lab) -> None:
    await reef.up()
    record = ClusterRecord("reef", VERSION, "c1", (RecordMember("c1", "10.0.0.1", ("controller",)),))
    slurm = reef.world.slurm
    answers = {
        ("cat", RECORD_PATH): record.as_json().encode(),
        ("id",): b"alice\n",
        ("scontrol",): slurm.scontrol,
        ("squeue",): slurm.squeue,
    }
    host = FakeHost(Target("desktop"), answers)
    context = Context(JoinedCluster(record, Login("desktop", "alice")), connector=FakeConnector(host))
    for name in ("n1", "n2"):
        reef.drain(name, "Epilog error")
    slurm.jobs["7"] = "n1"
    result = await doctor(context)
    [one] = result.findings
    assert (one.id, one.host, one.action) == ("epilog-error", "n1", "")
    assert one.fix == "tell the operator, who can run `shoal doctor`"
    assert any("--me" in call.argv for call in host.calls)
    assert (await doctor(context, "n2")).findings == ()
    slurm.jobs.clear()
    assert (await doctor(context)) == replace(result, findings=())
