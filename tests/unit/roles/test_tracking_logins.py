"""The logins of jobs and users to the tracking server: who can read them, and what the accounts' program does."""

import io
import json
import os
import pwd
import re
import subprocess
import sys
import threading
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import items_of
from tests.support.specs import ONE_NODE

from shoal.agent.document import Block, File, Secret, SecretRef
from shoal.agent.facts import FileFact
from shoal.remote import program_text
from shoal.remote.probes import create_experiment
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, SharedSecret, Stage
from shoal.roles.tracking import TrackingComponent
from shoal.roles.user_ids import RECORD
from shoal.roles.users import PAM
from shoal.tracking import login, mlflow

REEF = ONE_NODE + "tracking: mlflow\n"
USERS = "users: {ann: {}, bob: {}}\n"
EXPERIMENT = {"experiment": {"experiment_id": "7", "lifecycle_stage": "active"}}
PASSWORD, LOGIN = f"{mlflow.USER_PASSWORDS}/ann", f"{login.USER_LOGINS}/ann"


def cluster_of(text: str = REEF + USERS, **changes: dict[str, Any]) -> Cluster:
    addresses = {"c1": "10.0.0.1", "n1": "10.0.0.11"}
    facts = {name: replace(host_facts(name, at), **changes.get(name, {})) for name, at in addresses.items()}
    return assemble(spec_of(text), facts, addresses)


def items(cluster: Cluster, name: str) -> dict[str, Any]:
    return items_of(cluster, name, TrackingComponent(), Stage.SERVICES)


def test_login_is_readable_by_its_user_only_and_its_password_is_in_no_document() -> None:
    for host in ("c1", "n1"):
        file = items(cluster_of(), host)[f"file {LOGIN}"]
        assert (file.owner, file.group, file.mode) == ("ann", "ann", 0o400)
        assert file.fills == (("@PASSWORD@", PASSWORD),)
        assert file.content == ("[mlflow]\nmlflow_tracking_username = ann\nmlflow_tracking_password = @PASSWORD@\n"), (
            "as MLflow's client reads it"
        )


def test_controller_makes_the_password_and_others_get_a_copy() -> None:
    cluster = cluster_of(c1={"files": {PASSWORD: FileFact(sha256="ab")}})
    assert items(cluster, "c1")[f"secret {PASSWORD}"] == Secret(PASSWORD, digits=48)
    copy = File(PASSWORD, SecretRef("mlflow-user-ann", "ab"), mode=0o400)
    assert items(cluster, "n1")[f"file {PASSWORD}"] == copy
    shared = TrackingComponent().shared_secrets(spec_of(REEF.replace("mlflow", "{host: n1}") + USERS))
    assert shared["mlflow-user-ann"] == SharedSecret("c1", PASSWORD, 48) and shared["mlflow-jobs"].host == "n1"


def test_passwords_precede_the_program_that_makes_the_accounts() -> None:
    keys = list(items(cluster_of(), "c1"))
    assert keys.index(f"secret {PASSWORD}") < keys.index("command make the accounts that jobs and users report with")


def test_link_in_the_home_is_made_with_the_rights_of_the_user_where_homes_are() -> None:
    shared = {"filesystems": ("nfs4", "nfsd")}
    homes = cluster_of(REEF + USERS + "storage: {/home: {kind: nfs}}\n", c1=shared, n1=shared)
    link = items(homes, "c1")["command link /home/ann/.mlflow/credentials"]
    assert link.argv[:4] == link.unless[:4] == ("runuser", "-u", "ann", "--")
    assert link.argv[-2:] == ("/home/ann/.mlflow/credentials", LOGIN)
    assert "command link /home/ann/.mlflow/credentials" not in items(homes, "n1")
    assert "command link /home/ann/.mlflow/credentials" in items(cluster_of(), "n1")


def test_users_have_the_address_and_their_experiment_after_a_login() -> None:
    there = items(cluster_of(), "n1")
    variables, rules = there[f"file {mlflow.USER_VARIABLES}"], there[f"block tracking in {PAM}"]
    assert variables.mode == 0o644
    assert str(variables.content).splitlines()[1:] == [
        "MLFLOW_TRACKING_URI DEFAULT=http://10.0.0.1:5000",
        "MLFLOW_EXPERIMENT_NAME DEFAULT=@{PAM_USER}",
    ]
    assert rules.content.splitlines()[:2] == [
        "session [success=1 default=ignore] pam_succeed_if.so quiet user notingroup shoal-users",
        f"session optional pam_env.so conffile={mlflow.USER_VARIABLES} readenv=0",
    ]


def test_user_who_leaves_loses_the_login_and_all_do_without_a_server() -> None:
    before = {RECORD: FileFact(text="ann 2000\nbob 2001\n"), mlflow.USER_VARIABLES: FileFact(there=True)}
    left = items(cluster_of(REEF + "users: {bob: {}}\n", n1={"files": before}), "n1")
    assert left[f"file {LOGIN}"] == File(LOGIN) and left[f"file {PASSWORD}"] == File(PASSWORD)
    none = items(cluster_of(REEF.replace("tracking: mlflow\n", "") + USERS, n1={"files": before}), "n1")
    assert none[f"file {LOGIN}"] == File(LOGIN) and none[f"block tracking in {PAM}"] == Block(PAM, "tracking", "")
    assert items(cluster_of(REEF), "n1") == {}


def test_job_gets_address_and_password_only_with_a_server() -> None:
    address = '{"uri": "http://10.0.0.1:5000", "username": "jobs"}\n'
    uri = {"MLFLOW_TRACKING_URI": "http://10.0.0.1:5000"}
    assert login.job_variables(address + "secret\n") == {
        **uri,
        "MLFLOW_TRACKING_USERNAME": "jobs",
        "MLFLOW_TRACKING_PASSWORD": "secret",
    }
    assert login.job_variables(address + mlflow.user_login("ann").replace("@PASSWORD@", "50%x")) == {
        **uri,
        "MLFLOW_TRACKING_USERNAME": "ann",
        "MLFLOW_TRACKING_PASSWORD": "50%x",
        "MLFLOW_EXPERIMENT_NAME": "ann",
    }
    assert login.job_variables('{"uri": "https://t.example.org"}\n') == {"MLFLOW_TRACKING_URI": "https://t.example.org"}
    assert login.job_variables("secret\n") == login.job_variables("") == {}


def test_the_program_that_makes_accounts_gets_files_and_no_password() -> None:
    server = mlflow.MlflowServer("c1", "fd00::1", 5000, "sqlite", "/a")
    assert mlflow.account_arguments(server, ["ann", "admin"])[1:] == (
        *("http://[fd00::1]:5000", login.ADMIN_PASSWORD, mlflow.ACCOUNTS, f"jobs:{login.JOBS_PASSWORD}"),
        *(f"user-admin:{mlflow.USER_PASSWORDS}/admin", f"ann:{PASSWORD}"),
    )


@cases(
    "create, status, said",
    (200, 0, ""),
    (400, 0, ""),  # they were there already, and get the password
    (401, 1, "its accounts are those of another one"),
)
def test_accounts_are_created_or_get_their_passwords(tmp_path: Path, create: int, status: int, said: str) -> None:
    requests: list[tuple[str, str, dict[str, str]]] = []
    experiments: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            if "/experiments/" in self.path or "/permissions/get" in self.path:
                if body:
                    experiments.append((self.headers["Authorization"], body))
            else:
                requests.append((self.command, self.path.rpartition("/")[2], json.loads(body or "{}")))
            code = create if self.path.endswith(("/create", "/grant")) else 200
            answer = b'{"error_code": "RESOURCE_ALREADY_EXISTS"}' if code == 400 else b""
            if "/get" in self.path:
                answer = json.dumps(EXPERIMENT | {"permission": "MANAGE"}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PATCH = answer

        def log_message(self, *words: object) -> None:
            pass

    places = {login.SETTINGS: tmp_path, mlflow.STATE: tmp_path, mlflow.USER_PASSWORDS: tmp_path / "users"}

    def here(word: str) -> str:
        for place in sorted(places, key=len, reverse=True):
            word = word.replace(place, str(places[place]))
        return word

    (tmp_path / "users").mkdir()
    for name, password in {"admin-password": "boss", "jobs-password": "crew", "users/ann": "hers"}.items():
        (tmp_path / name).write_text(f"{password}\n")
    (tmp_path / ".accounts").write_text("00  -\njobs bob\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = mlflow.account_arguments(
            mlflow.MlflowServer("c1", "127.0.0.1", server.server_port, "sqlite", "/a"), ["ann"]
        )
        line = [sys.executable, "-I", "-", *map(here, arguments)]
        # Here the server is a program of who runs the test, not of the account of MLflow.
        text = program_text("probes").replace(f'= "{mlflow.USER}"', f'= "{pwd.getpwuid(os.getuid()).pw_name}"')
        done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert done.returncode == status and said in done.stderr
    accounts = [{"username": "jobs", "password": "crew"}, {"username": "ann", "password": "hers"}]
    renewed = [("PATCH", "update-password", account) for account in accounts] if create == 400 else []
    created = [("POST", "create", account) for account in accounts]
    assert [call for call in requests if call[2].get("username") != "bob" and call[1] != "grant"] == [
        ("GET", "health", {}),
        *(sorted(created + renewed, key=lambda call: accounts.index(call[2])) if status == 0 else created[:1]),
    ]
    check = [here(word) for word in mlflow.account_check(["ann"])]
    assert subprocess.run(check).returncode == status, "the check agrees with what the program has left"
    if status == 0:
        assert experiments == [("Basic YW5uOmhlcnM=", '{"name": "ann"}')], "her own, by her own account"
        [locked] = [call for call in requests if call[2].get("username") == "bob"]
        assert locked[1] == "update-password" and len(locked[2]["password"]) == 48
        grant = {"username": "jobs", "resource_type": "experiment", "resource_id": "*", "permission": "EDIT"}
        assert requests[-1] == ("POST", "grant", grant)
    assert not any(word in done.stdout + done.stderr for word in ("crew", "boss", "hers"))


@cases("granted", "MANAGE", "READ")
@cases("stage", "active", "deleted")
def test_experiment_of_others_with_the_name_of_a_user_is_renamed(stage: str, granted: str) -> None:
    calls: list[tuple[str, Any, str]] = []

    def call(method: str, path: str, body: object = None, user: str = "admin") -> bytes:
        step = path.rpartition("/mlflow/")[2].removeprefix("experiments/")
        calls.append((step, body, user))
        if step == "create" and len(calls) == 1:
            raise refusal(400, b'{"error_code": "RESOURCE_ALREADY_EXISTS"}')
        experiment = EXPERIMENT["experiment"] | {"lifecycle_stage": stage}
        return json.dumps({"experiment": experiment, "permission": granted}).encode()

    create_experiment(call, "ann")
    assert [step for step, _, _ in calls[:3]] == [
        "create",
        "get-by-name?experiment_name=ann",
        "users/permissions/get?username=ann&resource_type=experiment&resource_id=7",
    ]
    changes = ["update", "create"] if stage == "active" else ["restore", "update", "delete", "create"]
    assert [step for step, _, _ in calls[3:]] == ([] if granted == "MANAGE" else changes)
    assert calls[0] == ("create", {"name": "ann"}, "ann")
    if granted != "MANAGE":
        assert calls[-1] == calls[0], "so that it is hers"
        [renamed] = [body["new_name"] for step, body, _ in calls if step == "update"]
        assert re.fullmatch(r"ann, before the user \([0-9a-f]{8}\)", renamed), "nobody can take it first"


def test_experiment_that_cannot_be_made_ends_with_the_reason() -> None:
    def call(method: str, path: str, body: object = None, user: str = "admin") -> bytes:
        raise refusal(500, b"no space left")

    with pytest.raises(SystemExit, match="the experiment of ann cannot be made: HTTP Error 500"):
        create_experiment(call, "ann")


def refusal(code: int, body: bytes) -> HTTPError:
    return HTTPError("http://mlflow", code, "refused", Message(), io.BytesIO(body))
