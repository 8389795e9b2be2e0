"""Checks of a tracking server on sandbox hosts: MLflow, or the program that replaces it in tests."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.documents import ROOT
from tests.e2e.cluster import IMAGE, Cluster, limited

from shoal.tracking import login, mlflow

STAND_IN = '''\
#!/usr/bin/python3
"""Stands in for MLflow: its options, its accounts, its health, and nothing else."""
import base64, configparser, fnmatch, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
settings = configparser.ConfigParser()
settings.read(os.environ["MLFLOW_AUTH_CONFIG_PATH"])
users = {settings["mlflow"]["admin_username"]: settings["mlflow"]["admin_password"]}
assert os.environ["MLFLOW_FLASK_SERVER_SECRET_KEY"] and options["--app-name"] == "basic-auth"


class Handler(BaseHTTPRequestHandler):
    def answer(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind, _, text = self.headers.get("Authorization", "").partition(" ")
        name, _, password = base64.b64decode(text).decode().partition(":")
        allowed = options["--allowed-hosts"].split(",")
        if self.path == "/health":
            self.send_response(200)
        elif not any(fnmatch.fnmatch(self.headers["Host"], pattern) for pattern in allowed):
            self.send_response(403)
        elif users.get(name, "") != password or not password:
            self.send_response(401)
        else:
            if self.path.endswith(("/users/create", "/users/update-password")) and name == "admin":
                made = json.loads(data)
                users[made["username"]] = made["password"]
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PATCH = answer


ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
'''
WHO = "/api/2.0/mlflow/users/get?username=jobs"
JOB = f"""
import base64, os, urllib.error, urllib.request
uri, user = os.environ["MLFLOW_TRACKING_URI"], os.environ["MLFLOW_TRACKING_USERNAME"]
word = base64.b64encode((user + ":" + os.environ["MLFLOW_TRACKING_PASSWORD"]).encode()).decode()
def ask(**head):
    try:
        return urllib.request.urlopen(urllib.request.Request(uri + "{WHO}", headers=head), timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
print(user, ask(Authorization="Basic " + word), ask(), ask(Authorization="Basic " + word, Host="evil.example"))
"""


def give_mlflow(cluster: Cluster, host: str) -> bool:
    """MLflow itself for a host that does not download it; False where no package index has it: then the stand-in.

    The first call on a machine downloads it, which takes a minute or two; later ones take a second.
    """
    requirements = cluster.file.with_name("mlflow.txt")
    requirements.write_text("\n".join(mlflow.requirements("sqlite")) + "\n")
    line = [sys.executable, ROOT / "scripts/environment", cluster.name, requirements, "mlflow"]
    # The packages are for the Python of Debian 12.
    is_given = not IMAGE and subprocess.run(line, capture_output=True, timeout=1800).returncode == 0
    put_program(cluster, host, SHARED_MLFLOW if is_given else STAND_IN)
    return is_given


SHARED_MLFLOW = '#!/bin/sh\nPYTHONPATH=/shared/mlflow exec /usr/bin/python3 -m mlflow "$@"\n'


def put_stand_in(cluster: Cluster, host: str) -> None:
    put_program(cluster, host, STAND_IN)


def put_program(cluster: Cluster, host: str, text: str) -> None:
    """A program at the place where MLflow would be installed: then it counts as installed."""
    place = mlflow.MlflowServer(host, "", 0, "sqlite", "").prefix
    program = base64.b64encode(text.encode()).decode()
    script = (
        f"mkdir -p {place}/bin && ln -sf /usr/bin/python3 {place}/bin/python && "
        f"echo {program} | base64 -d > {place}/bin/mlflow && chmod 755 {place}/bin/mlflow && touch {place}/.complete"
    )
    cluster.on(host, "sh", "-c", script)


def address(cluster: Cluster) -> str:
    return str(json.loads(cluster.on("controller", "cat", login.ADDRESS))["uri"])


def check_jobs_report(cluster: Cluster, place: Path) -> str:
    """A job knows where and with what password, nobody else gets in; returns the job's number."""
    (place / "reports.py").write_text(JOB)
    done = cluster.json("run", "--wait", "--gpus-per-node", "0", "reports.py")
    assert [line["text"] for line in done["lines"]] == ["jobs 200 401 403"], done
    return str(done["id"])


def check_nobody_outside_reaches_it(cluster: Cluster) -> None:
    """This machine is on the hosts' bridge and no member."""
    uri = re.fullmatch(r"http://([\d.]+):(\d+)", address(cluster))
    assert uri
    where = (uri[1], int(uri[2]))
    try:
        socket.create_connection(where, timeout=5).close()
    except OSError:
        return
    raise AssertionError(f"{where} answers outside of the cluster")


def check_no_password_lies_about(cluster: Cluster, host: str, job: str) -> None:
    """In no plan, log, argument, script or file that others can read."""
    secrets = [cluster.on(host, "cat", path).strip() for path in (login.ADMIN_PASSWORD, login.JOBS_PASSWORD)]
    assert all(re.fullmatch("[0-9a-f]{48}", secret) for secret in secrets) and len(set(secrets)) == 2
    output = [
        cluster.shoal("plan", "--diff", "--json").stdout,
        cluster.shoal("status", "--json").stdout,
        cluster.on("controller", "scontrol", "write", "batch_script", job, "-", status=None),
        cluster.on("controller", "scontrol", "show", "job", job, status=None),
        *(cluster.on(name, "ps", "-eo", "args") for name in (host, "controller")),
        *(cluster.on(name, "journalctl", "--no-pager", "-q") for name in (host, "controller")),
    ]
    for secret in secrets:
        assert not any(secret in text for text in output)
        for name in (host, "controller"):
            # The files that every user may read.
            places = "/etc /run /tmp /var/lib /var/log /shared"
            look = f"find {places} -xdev -type f -perm -o=r -size -200k -exec grep -lFe {secret} {{}} + || true"
            assert cluster.on(name, "sh", "-c", look) == ""


def check_the_page_opens_through_ssh(cluster: Cluster) -> None:
    """The password is told only to who asks, and Ctrl-C ends it."""
    line = ("ui", "mlflow", "--json", "--show-password")
    process = cluster.begin(*line, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout
        report = json.loads(read_object(process))
        assert report["user"] == "admin"
        word = base64.b64encode(f"admin:{report['password']}".encode()).decode()
        request = urllib.request.Request(report["url"] + WHO, headers={"Authorization": f"Basic {word}"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def read_object(process: subprocess.Popen[str]) -> str:
    """One JSON object, over as many lines as it takes."""
    assert process.stdout
    text = ""
    with limited(process):
        while line := process.stdout.readline():
            text += line
            try:
                json.loads(text)
            except ValueError:
                continue
            return text
    raise AssertionError(f"it ended: {text}")
