"""What a program that failed complained of: the line that tells, what to do about it, who is in its way."""

from __future__ import annotations

import os

from shoal.agent.program.disk import read_text
from shoal.agent.program.ports import port_holder
from shoal.agent.program.running import run
from shoal.agent.program.wire import Item


def telling_line(text: str, items: list[Item]) -> str:
    """The line of a log that says best what is wrong: one that names a word we know, else the first fatal one."""
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    words = [word for item in items for word, _ in item.get("advice", ())]
    for signs in (words, ["fatal"], [""]):
        for line in lines:
            if any(sign.lower() in line.lower() for sign in signs):
                return line
    return ""


def advice(items: list[Item], text: str) -> str:
    """What to do, by the words that a complaint names; "" where it names none of ours."""
    line = telling_line(text, items).lower()
    known = [todo for item in items for word, todo in item.get("advice", ()) if word.lower() in line]
    return known[0] if known else ""


def log_size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def text_from(path: str, start: int) -> str:
    """What was added to a log since it had this size."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(1 << 20).decode("utf-8", "replace")


def taken_port(name: str) -> str:
    """Who sits on the port that a daemon could not have; "" when that is not what its log complains of."""
    import re

    log = read_text(f"/var/log/slurm/{name}.log")[-4096:] + run(["journalctl", "-q", "-n", "20", "-u", name])[1]
    if "ddress already in use" not in log:
        return ""
    # Slurm's daemons say which; of others it stands in the unit.
    known = re.findall(r"port \((\d+)\): Address already in use", log)
    known = known or re.findall(r"--port (\d+)", run(["systemctl", "show", "-p", "ExecStart", "--", name])[1])
    holder = port_holder(int(known[-1])) if known else ""
    return f"\nport {known[-1]} is taken by {holder}; stop it and run again" if holder else ""
