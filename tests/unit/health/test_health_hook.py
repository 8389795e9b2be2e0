"""Slurm's HealthCheckProgram, with stand-ins for Slurm's commands: it changes only what is its own."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal.remote import program_text

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
WANTED = "shoal: health: gpu-lost: GPU-1 is gone"
SINFO = """\
echo "sinfo $*" >> "$0.calls"
cd "${0%/*}/.."
case $* in *"|"*) sed "s/^/$(cat state)|/" reason ;; *) cat reason ;; esac
[ -s reason ]"""


class Hook:
    """The program with a node whose reason is `reason`; empty where Slurm does not answer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reason, self.state = folder, "none", ""
        for name, text in (
            ("sinfo", SINFO),
            ("squeue", 'cat "${0%/*}/../steps"'),
            ("scancel", 'printf "cancel %s\\n" "$*" >> "${0%/*}/../updates"'),
            ("scontrol", 'printf "%s\\n" "$*" >> "${0%/*}/../updates"; [ ! -e "${0%/*}/../rejects" ]'),
        ):
            stand_in(folder / "bin" / name, text)
        self.started = folder / "started"
        self.started.touch()

    def run(self, wanted: str = "", program: str = "") -> list[str]:
        """What it asks Slurm to change."""
        (self.folder / "drain").write_text(f"{wanted}\n" if wanted else "")
        (self.folder / "reason").write_text(f"{self.reason}\n{self.reason}\n" if self.reason else "")
        (self.folder / "state").write_text(self.state or ("idle" if self.reason == "none" else "drained"))
        (self.folder / "updates").unlink(missing_ok=True)
        text = program_text("health_hook.sh", STATE=self.folder, PROGRAM=program)
        text = text.replace("PATH=/usr/local/sbin", f"PATH={self.folder}/bin:/usr/local/sbin", 1)
        text = text.replace("/run/shoal-host-started", str(self.started))
        done = subprocess.run(
            ["sh", "-c", text], env={"SLURMD_NODENAME": "n1"}, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, "")
        self.output = done.stdout
        updates = self.folder / "updates"
        changes = updates.read_text().splitlines() if updates.exists() else []
        for change in changes if not (self.folder / "rejects").exists() else ():
            if "state=resume" in change:
                self.reason = "none"
            elif "reason=" in change:
                self.reason = change.partition("reason=")[2]
        return changes

    @property
    def asked(self) -> bool:
        return (self.folder / "bin/sinfo.calls").exists()


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    return Hook(tmp_path)


def test_node_that_is_well_is_not_asked_about(hook: Hook) -> None:
    assert hook.run() == [] and not hook.asked


def test_drain_and_resume(hook: Hook) -> None:
    assert hook.run(WANTED) == [f"update nodename=n1 state=drain reason={WANTED}"]
    (hook.folder / "bin/sinfo.calls").unlink()
    assert hook.run(WANTED) == [] and not hook.asked, "it is drained already"
    assert hook.run() == ["update nodename=n1 state=resume"]
    assert hook.run() == [] and hook.reason == "none"


def order(hook: Hook, text: str) -> None:
    (hook.folder / "orders").write_text(f"{text}\n")
    for name in ("systemctl", "setsid"):
        stand_in(hook.folder / "bin" / name, f'printf "{name} %s\\n" "$*" >> "${{0%/*}}/../updates"')


@cases(
    "wanted, state, reason, boot, reboots",
    (WANTED, "drained", WANTED, BOOT, True),
    (WANTED, "draining", WANTED, BOOT, False),
    (WANTED, "drained*", WANTED, BOOT, False),
    (WANTED, "drained", "kernel update by anna", BOOT, False),
    (WANTED, "", "", BOOT, False),
    (WANTED, "drained", WANTED, "00000000-0000-0000-0000-000000000000", False),  # ordered in an earlier boot
    ("", "drained ", "", BOOT, False),  # not drained by the program
)
def test_reboot_waits_until_its_own_drain_is_over(
    hook: Hook, wanted: str, state: str, reason: str, boot: str, reboots: bool
) -> None:
    hook.run(wanted)
    order(hook, f"reboot {boot}")
    hook.reason = f"{state} {reason}".strip()
    assert hook.run(wanted) == (["systemctl reboot"] if reboots else [])
    assert not (hook.folder / "orders").exists()


def test_job_that_hangs_is_looked_at_beside_the_hook(hook: Hook) -> None:
    order(hook, "hung 12 2001")
    [line] = hook.run()
    assert line.startswith("setsid -f timeout 300 python3 -I -S -B -c import sys; ") and line.endswith(" 12 2001")


def test_new_finding_changes_the_reason_of_its_own_drain(hook: Hook) -> None:
    hook.run(WANTED)
    assert hook.run(f"{WANTED} too") == [f"update nodename=n1 reason={WANTED} too"]
    assert hook.run() == ["update nodename=n1 state=resume"]


@cases("before", "none", WANTED)
@cases("reason", "fan broken", "Kill task failed", f"{WANTED}; Anna looks at it")
def test_drain_of_others_is_never_changed(hook: Hook, before: str, reason: str) -> None:
    """Nor a reason that others wrote over its own."""
    if before == WANTED:
        hook.run(WANTED)
    hook.reason = reason
    assert hook.run(WANTED) == [] and hook.run() == [] and hook.run() == [] and hook.reason == reason


def test_node_that_a_person_resumed_is_not_drained_for_the_same_again(hook: Hook) -> None:
    hook.run(WANTED)
    hook.reason = "none"
    assert hook.run(f"{WANTED} still") == hook.run(f"{WANTED} yet") == []
    assert hook.run() == []
    assert hook.run(WANTED) != [], "when it was well in between"


@cases("state", "idle", "idle*", "mixed", "allocated", "completing")
def test_reason_that_slurm_kept_after_a_resume_does_not_prevent_a_drain(hook: Hook, state: str) -> None:
    hook.reason, hook.state = "shoal: health: disk-full: /tmp", state
    assert hook.run(WANTED) == [f"update nodename=n1 state=drain reason={WANTED}"]


def test_reason_that_cannot_be_read_changes_nothing(hook: Hook) -> None:
    hook.reason = ""
    assert hook.run(WANTED) == []
    hook.reason = "none"
    hook.run(WANTED)
    hook.reason = ""
    assert hook.run() == []
    hook.reason = WANTED
    assert hook.run() == ["update nodename=n1 state=resume"], "it tries again"


def test_drain_that_slurm_rejects_is_tried_again(hook: Hook) -> None:
    (hook.folder / "rejects").touch()
    assert hook.run(WANTED) == hook.run(WANTED) != []
    (hook.folder / "rejects").unlink()
    assert hook.run(WANTED) != [] and hook.run(WANTED) == []


def test_steps_from_before_the_start_of_the_host_are_ended_once(hook: Hook) -> None:
    """Those on this node that began in another boot. Slurm ends those of its own itself."""
    hook.started.unlink()
    steps = ("17.0", "17.batch", "17.extern", "12_3.1")
    rows = [f"{step} 2001-01-01T00:00:00" for step in steps] + ["18.0 2999-01-01T00:00:00"]
    (hook.folder / "steps").write_text("\n".join(rows) + "\n")
    assert hook.run() == [
        "notify 17 n1 was started again: its ranks of step 17.0 are gone",
        "cancel 17.0",
        "notify 12_3 n1 was started again: its ranks of step 12_3.1 are gone",
        "cancel 12_3.1",
    ]
    assert hook.run() == []


def test_program_of_the_operator_runs_after_it(hook: Hook) -> None:
    own = stand_in(hook.folder / "nhc", 'echo "checked $SLURMD_NODENAME"')
    for _ in range(2):
        hook.run(WANTED, str(own))
        assert hook.output == "checked n1\n"


def test_programs_of_shoals_own_slurm_are_found() -> None:
    """They are linked from /usr/local, which most paths of daemons leave out."""
    [path] = re.findall(r"^PATH=(\S+)", program_text("health_hook.sh"), re.MULTILINE)
    assert "/usr/local/bin" in path.split(":")
