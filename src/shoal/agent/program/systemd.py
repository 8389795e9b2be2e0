"""What systemd says about its units."""

from __future__ import annotations

import os

from shoal.agent.program.running import run


def has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")


def show_units(names: list[str]) -> dict[str, dict[str, str]]:
    if not names or not has_systemd():
        return {name: {} for name in names}
    wanted = "Id,Type,LoadState,ActiveState,UnitFileState,NeedDaemonReload,ConditionResult,Result,MainPID"
    _, text = run(["systemctl", "show", "-p", wanted, "--", *names], timeout=30.0)
    # In the order asked: an alias answers with another Id.
    answers = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {name: answers[i] if i < len(answers) else {} for i, name in enumerate(names)}
