"""Runs every check once and writes the result. Begin here."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, Callable, Iterator

from .gpu_checks import GPU_CHECKS
from .gpu_driver import DRIVER_CHECKS
from .gpu_test import TEST_CHECKS
from .host_checks import HOST_CHECKS
from .leftovers import LEFTOVER_CHECKS
from .node import (
    BASELINE,
    CONFIG,
    CONFIRMED,
    DRAIN,
    DRAINING,
    ORDERS,
    PREFIX,
    REQUESTED,
    RESULT,
    STATE,
    WARN_ONLY_S,
    Baseline,
    Evidence,
    Node,
    read_text,
)
from .training import TRAINING_CHECKS

MAX_EVIDENCE, MAX_TEXT, MAX_REASON = 3, 200, 120
CHECKS: dict[str, Callable[[Node], Iterator[str]]] = {
    **HOST_CHECKS,
    **TEST_CHECKS,
    **DRIVER_CHECKS,
    **GPU_CHECKS,
    **LEFTOVER_CHECKS,
    **TRAINING_CHECKS,
}


def main(config_path: str = CONFIG, state: str = STATE, *, forget: bool = False) -> None:
    """Check once. With `forget` the node learns its baseline again: what it has now is right."""
    os.makedirs(state, 0o755, exist_ok=True)
    config = load(config_path)
    earlier, kept = load(f"{state}/{RESULT}"), load(f"{state}/{BASELINE}")
    now = time.time()
    since = float(kept.get("since") or now)
    baseline = Baseline({} if forget else kept.get("values") or {})
    node = Node(baseline, earlier.get("memory") or {}, config, now)
    findings = run_checks(node, set(config.get("skip", ())), earlier.get("findings") or [])
    drains = config.get("mode") == "drain" and now - since >= WARN_ONLY_S
    reason = drain_reason([finding for finding in findings if drains or finding["id"] in REQUESTED], now)
    save(f"{state}/{BASELINE}", json.dumps({"since": since, "values": baseline.values}))
    save(f"{state}/{DRAIN}", reason + "\n" if reason else "")
    if node.orders:
        save(f"{state}/{ORDERS}", "".join(f"{order}\n" for order in node.orders))
    usage = os.times()
    result = {
        "time": now,
        "since": since,
        "mode": config.get("mode", ""),
        "warns_until": since + WARN_ONLY_S,
        "findings": findings,
        "cpu_s": round(usage.user + usage.system + usage.children_user + usage.children_system, 3),
        "memory": node.memory,
    }
    save(f"{state}/{RESULT}", json.dumps(result))


def run_checks(node: Node, skip: set[str], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What every check found, with when it was first found."""
    first_times = {finding["id"]: finding["since"] for finding in earlier}
    findings = []
    for id, check in CHECKS.items():
        if id in skip:
            continue
        try:
            evidence: Evidence = list(check(node))
        except Exception as error:  # a check that fails must not hide the others
            node.memory.setdefault("failures", {})[id] = repr(error)
            continue
        node.memory.get("failures", {}).pop(id, None)
        if evidence:
            shown = [text[:MAX_TEXT] for text in evidence[:MAX_EVIDENCE]]
            findings.append({"id": id, "since": first_times.get(id, node.now), "evidence": shown})
    return findings


def drain_reason(findings: list[dict[str, Any]], now: float) -> str:
    """The reason that the node's drain gets; empty where nothing is wrong that needs one."""
    serious = [
        finding
        for finding in findings
        if finding["id"] in DRAINING and (finding["id"] not in CONFIRMED or finding["since"] < now)
    ]
    texts = [f"{finding['id']}: {finding['evidence'][0]}" for finding in serious]
    # Slurm's commands and the hook read it as one line without quotes.
    words = re.sub(r"[^A-Za-z0-9 .,:;_/()+%-]+", " ", "; ".join(texts)).split()
    return (PREFIX + " ".join(words))[:MAX_REASON].strip() if texts else ""


def load(path: str) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        values = json.loads(read_text(path) or "{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def save(path: str, text: str) -> None:
    """Write a file so that a reader sees the old or the new one. A disk that is full keeps the old one."""
    new = f"{path}.new"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(new, path)
    except OSError:
        return
