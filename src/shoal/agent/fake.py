"""An agent that exists only in memory, for tests: it speaks the program's protocol on a FakeHost and changes nothing.

agent = FakeAgent(Facts(hostname="n1"), failing={"service slurmd": "slurmd did not start"})
host = FakeHost("n1", {("python3",): agent.play})
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shoal.agent.facts import Facts
from shoal.hosts.fake import FakeProgram


class FakeAgent:
    """The agent of one host. `items` holds what was applied, by key; it stays from one session to the next."""

    def __init__(
        self,
        facts: Facts,
        *,
        failing: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes] | None = None,
        reach: Mapping[str, str] | None = None,
    ) -> None:
        """`failing` gives items that cannot be brought about, by key, with what they say; `reach` what addresses of
        others answer the host where that is not `open`."""
        self.facts = facts
        self.failing = dict(failing or {})
        self.secrets = dict(secrets or {})
        self.items: dict[str, dict[str, Any]] = {}
        self.reach = dict(reach or {})
        self.requests: list[dict[str, Any]] = []
        self._due: set[str] = set()

    async def play(self, program: FakeProgram) -> int:
        """The program to give to a FakeHost."""
        size = int((await program.readline()).split()[0])
        while size > 0:
            size -= len(await program.readline())
        while line := await program.readline():
            request = json.loads(line)
            self.requests.append({name: value for name, value in request.items() if name != "items"})
            if request["op"] == "exit":
                break
            for event in self._answer(request):
                await program.print(json.dumps(event).encode() + b"\n")
        return 0

    def _answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["op"] == "facts":
            return [{"event": "facts", "facts": {**asdict(self.facts), "clock": time.time()}, "took": 0.0}]
        if request["op"] == "reach":
            answers = [self.reach.get(address, "open") for address, _ in request["targets"]]
            return [{"event": "reach", "answers": answers}]
        if request["op"] == "secret":
            path = request["path"]
            if path not in self.secrets and not request["make"]:
                return [{"event": "error", "text": f"{path}: No such file or directory"}]
            content = self.secrets.setdefault(path, path.encode().ljust(request["make"], b"."))
            return [{"event": "secret", "content_b64": base64.b64encode(content).decode()}]
        return self._converge(
            request["items"], dry=request["op"] == "check", defer=request.get("defer_restarts", False)
        )

    def _converge(self, items: list[dict[str, Any]], *, dry: bool, defer: bool) -> list[dict[str, Any]]:
        due = set(self._due)
        events: list[dict[str, Any]] = []
        stop = ""
        for index, item in enumerate(items):
            event = {"event": "item", "index": index, "key": item["key"], "action": "", "diff": "", "detail": ""}
            if stop:
                event.update(status="skipped", detail=stop)
            elif item["key"] in self.failing:
                event.update(status="failed", detail=self.failing[item["key"]])
                stop = "" if dry else f"after the failure of {item['key']}"
            elif not dry and item["key"] not in self.items and _valueless(item):
                event.update(status="failed", detail=f"the value of the secret for {item['path']} was not given")
                stop = f"after the failure of {item['key']}"
            else:
                event.update(self._one(item, due, dry=dry, defer=defer))
            events.append(event)
        if not dry:
            self._due = due
        changed = sum(event["status"] in ("change", "changed") for event in events)
        failed = sum(event["status"] == "failed" for event in events)
        return [*events, {"event": "done", "changed": changed, "failed": failed}]

    def _one(self, item: dict[str, Any], due: set[str], *, dry: bool, defer: bool) -> dict[str, Any]:
        wanted = _comparable(item)
        before = self.items.get(item["key"])
        if before and "sha256" in before and _valueless(item):
            wanted["sha256"] = before["sha256"]  # nobody knows another value, so the host keeps the one it has
        differs = before != wanted and not item.get("on_change")
        restart = item["key"] in due and not (defer and item["kind"] == "service")
        if not differs and not restart:
            return {"status": "ok"}
        due.update(f"service {name}" for name in item.get("restarts", ()))
        due.update(item.get("reloads", ()))
        due.discard(item["key"])
        if not dry:
            self.items[item["key"]] = wanted
        action = f"make {item['key']}" if differs else f"restart {item['key']}"
        return {
            "status": "change" if dry else "changed",
            "action": action,
            "diff": "(secret)" * bool(item.get("secret")),
        }


def _valueless(item: dict[str, Any]) -> bool:
    """Whether it is a secret of which neither the value nor its digest was sent."""
    return bool(item.get("secret")) and "content_b64" not in item and not item["sha256"]


def _comparable(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what a dry run does not know: a secret counts by its digest."""
    if "content_b64" in item:
        item = {**item, "sha256": hashlib.sha256(base64.b64decode(item["content_b64"])).hexdigest()}
    return {name: value for name, value in item.items() if name not in ("content_b64", "restarts", "reloads")}
