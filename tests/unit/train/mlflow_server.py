"""A small server on loopback that answers like MLflow's REST API, and fails on request.

`test_tracking_mlflow.py` runs the same scenarios against a real MLflow server where one is installed.
"""

import json
import random
import re
import threading
import urllib.parse
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class FakeMlflow:
    """The store outlives the listening socket: `stop` and `start` are a restart."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Json] = {}
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[str] = []
        """What happens to the next requests: ok, 500, drop (after storing), refuse (before storing), hang."""
        self.fault_on = ""
        """Only requests whose path has this in it meet a fault."""
        self.release = threading.Event()
        """Lets requests go that hang."""
        self.artifact_root = "mlflow-artifacts:"
        self._lock = threading.Lock()
        self._port = 0
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                fake.handle(self)

            do_GET = do_POST = do_PUT = handle_one

            def log_message(self, *args: object) -> None:
                pass

        while self._http is None:
            # Below those that the kernel gives to outgoing connections: it stays free while the server is down.
            port = self._port or random.SystemRandom().randrange(8_100, 12_000)
            try:
                self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
            except OSError:
                if self._port:
                    raise
        self._http.daemon_threads = True
        self._port = port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.release.set()
        if self._http:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self._lock:
            self.requests.append(request.path)
            self.headers.append(dict(request.headers))
            fault = self.faults.pop(0) if self.faults and self.fault_on in request.path else "ok"
        if fault == "500":
            return self._reply(request, 500, {"error_code": "INTERNAL_ERROR", "message": "database is locked"})
        if fault == "refuse":
            return request.connection.close()
        try:
            with self._lock:
                status, answer = 200, self._answer(request.path, body)
        except Refusal as refusal:
            status, answer = refusal.status, {"error_code": refusal.code, "message": str(refusal)}
        if fault == "hang":
            self.release.wait(20)
        if fault in ("drop", "hang"):
            request.close_connection = True
            return None
        return self._reply(request, status, answer)

    def _reply(self, request: BaseHTTPRequestHandler, status: int, answer: Json) -> None:
        data = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _answer(self, target: str, body: bytes) -> Json:
        path, _, query = target.partition("?")
        if path.startswith("/api/2.0/mlflow-artifacts/artifacts/"):
            self.files[urllib.parse.unquote(path.removeprefix("/api/2.0/mlflow-artifacts/artifacts/"))] = body
            return {}
        given = json.loads(body) if body else {k: v[0] for k, v in urllib.parse.parse_qs(query).items()}
        name = path.removeprefix("/api/2.0/mlflow/").replace("/", "_").replace("-", "_")
        return getattr(self, "_" + name)(given)

    def _experiments_get_by_name(self, given: Json) -> Json:
        name = given["experiment_name"]
        if name not in self.experiments:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Could not find experiment with name '{name}'")
        return {"experiment": {"experiment_id": self.experiments[name], "lifecycle_stage": "active"}}

    def _experiments_create(self, given: Json) -> Json:
        if given["name"] in self.experiments:
            raise Refusal(400, "RESOURCE_ALREADY_EXISTS", f"Experiment(name={given['name']}) already exists")
        self.experiments[given["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[given["name"]]}

    def _runs_create(self, given: Json) -> Json:
        id = uuid.uuid4().hex
        info = {
            "run_id": id,
            "experiment_id": given["experiment_id"],
            "run_name": given.get("run_name"),
            "start_time": given["start_time"],
            "status": "RUNNING",
            "lifecycle_stage": "active",
            "artifact_uri": f"{self.artifact_root}/{given['experiment_id']}/{id}/artifacts",
        }
        tags = {tag["key"]: tag["value"] for tag in given.get("tags", [])}
        self.runs[id] = {"info": info, "tags": tags, "params": {}, "metrics": {}}
        return {"run": self._shown(self.runs[id])}

    def _runs_get(self, given: Json) -> Json:
        return {"run": self._shown(self._run(given))}

    def _runs_search(self, given: Json) -> Json:
        wanted = re.findall(r"tags\.`([^`]+)` = '([^']*)'", given["filter"])
        assert wanted
        found = [
            self._shown(run)
            for run in self.runs.values()
            if run["info"]["experiment_id"] in given["experiment_ids"]
            and run["info"]["lifecycle_stage"] == "active"
            and all(run["tags"].get(key) == value for key, value in wanted)
        ]
        return {"runs": found} if found else {}

    def _runs_update(self, given: Json) -> Json:
        run = self._active(given)
        run["info"].update({key: given[key] for key in ("status", "end_time") if key in given})
        return {"run_info": run["info"]}

    def _runs_delete(self, given: Json) -> Json:
        self._run(given)["info"]["lifecycle_stage"] = "deleted"
        return {}

    def _runs_set_tag(self, given: Json) -> Json:
        self._active(given)["tags"][given["key"]] = given["value"]
        return {}

    def _runs_log_batch(self, given: Json) -> Json:
        run = self._active(given)
        metrics, params, tags = (given.get(kind, []) for kind in ("metrics", "params", "tags"))
        if len(metrics) > 1000 or len(params) > 100 or len(tags) > 100 or len(json.dumps(given)) > 1_000_000:
            raise Refusal(400, "INVALID_PARAMETER_VALUE", "A batch logging request can contain at most 1000 metrics")
        if len({param["key"] for param in params}) != len(params):
            raise Refusal(400, "INVALID_PARAMETER_VALUE", "Duplicate parameter keys have been submitted")
        for metric in metrics:
            if not re.fullmatch(r"[\w.\- /:]+", metric["key"]):
                raise Refusal(400, "INVALID_PARAMETER_VALUE", f"Invalid value {metric['key']!r} for parameter")
        for param in params:
            if run["params"].get(param["key"], param["value"]) != param["value"]:
                raise Refusal(400, "INVALID_PARAMETER_VALUE", "Changing param values is not allowed")
        run["params"].update({param["key"]: param["value"] for param in params})
        for metric in metrics:
            # The whole row is the primary key of MLflow's table.
            run["metrics"][metric["key"], metric["timestamp"], metric["step"], metric["value"]] = True
        run["tags"].update({tag["key"]: tag["value"] for tag in tags})
        return {}

    def _run(self, given: Json) -> Json:
        if given["run_id"] not in self.runs:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Run with id={given['run_id']} not found")
        return self.runs[given["run_id"]]

    def _active(self, given: Json) -> Json:
        run = self._run(given)
        if run["info"]["lifecycle_stage"] == "deleted":
            raise Refusal(400, "INVALID_PARAMETER_VALUE", "The run must be in the 'active' state")
        return run

    @staticmethod
    def _shown(run: Json) -> Json:
        return {"info": run["info"], "data": {"tags": [{"key": k, "value": v} for k, v in run["tags"].items()]}}

    def active_runs(self) -> list[Json]:
        return [run for run in self.runs.values() if run["info"]["lifecycle_stage"] == "active"]

    def the_run(self) -> Json:
        """The one run there is."""
        (run,) = self.active_runs()
        return run

    def rows(self, key: str = "loss") -> Counter[tuple[int, Any]]:
        """How often each (step, value) of a metric is stored."""
        return Counter((row[2], row[3]) for row in self.the_run()["metrics"] if row[0] == key)
