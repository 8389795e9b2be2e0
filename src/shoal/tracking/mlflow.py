"""MLflow as a service: where it is, what it reads, and the programs that install it and make its accounts. All pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

VERSION = "3.17.2"
"""The release that is installed; the training library speaks to any from 2.0 on."""
USER = "shoal-mlflow"
SERVICE = "shoal-mlflow"
STATE = "/var/lib/shoal-mlflow"
SETTINGS = "/etc/shoal/mlflow"
UNIT = "/etc/systemd/system/shoal-mlflow.service"
ADMIN_PASSWORD, JOBS_PASSWORD, SESSION_KEY = (
    f"{SETTINGS}/{name}" for name in ("admin-password", "jobs-password", "key")
)
AUTH, VARIABLES = f"{SETTINGS}/basic_auth.ini", f"{SETTINGS}/environment"
ADDRESS = "/etc/shoal/tracking.json"
"""On the controller: where jobs report to, for `shoal run`."""
ADMIN, JOBS = "admin", "jobs"
"""A person logs in as the first; jobs report as the second, who may not change accounts."""
ACCOUNTS = f"{STATE}/.accounts"
_HEAD = "# Written by shoal; changes here are lost.\n"


@dataclass(frozen=True)
class Server:
    """A server that Shoal sets up."""

    name: str
    """Its host's name, by which members know it too."""
    address: str
    port: int
    database: str
    artifacts: str

    @property
    def prefix(self) -> str:
        """Where it is installed."""
        return f"/opt/shoal/mlflow-{VERSION}" + ("-postgresql" if self.database == "postgresql" else "")

    @property
    def uri(self) -> str:
        return uri_of(self.address, self.port)

    @property
    def allowed_hosts(self) -> str:
        """What a browser or a job may call it by: its address, its name, and the near end of a tunnel."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port},{self.name}:{self.port},localhost:*,127.0.0.1:*"


def uri_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def packages(database: str) -> tuple[str, ...]:
    """What the host's package manager brings."""
    return ("python3-venv", "postgresql") if database == "postgresql" else ("python3-venv",)


def requirements(database: str) -> tuple[str, ...]:
    return (f"mlflow[auth]=={VERSION}", *(("psycopg2-binary==2.9.10",) if database == "postgresql" else ()))


INSTALL = r"""
set -eu
place=$1
shift
rm -rf "$place"
mkdir -p "$(dirname "$place")"
python3 -m venv "$place"
"$place/bin/pip" install --disable-pip-version-check --no-input --no-cache-dir --quiet "$@"
touch "$place/.complete"
"""
"""A venv counts once its mark is there: what a killed run left without one is made again."""


def unit(server: Server) -> str:
    """The service. It may write to its own directory and to that of the artifacts, and see no home."""
    store = (
        "postgresql+psycopg2:///mlflow?host=/var/run/postgresql"
        if server.database == "postgresql"
        else f"sqlite:///{STATE}/mlflow.db"
    )
    after = "network-online.target" + (" postgresql.service" if server.database == "postgresql" else "")
    home = "" if server.artifacts.startswith(("/home/", "/root/")) else "ProtectHome=yes\n"
    return (
        f"{_HEAD}"
        "[Unit]\n"
        "Description=MLflow, which keeps what training jobs report\n"
        f"After={after}\n"
        "Wants=network-online.target\n"
        f"RequiresMountsFor={server.artifacts}\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"User={USER}\n"
        f"Group={USER}\n"
        f"WorkingDirectory={STATE}\n"
        f"EnvironmentFile={VARIABLES}\n"
        f"ExecStart={server.prefix}/bin/mlflow server --app-name basic-auth "
        f"--host {server.address} --port {server.port} --workers 2 "
        f"--backend-store-uri {store} --artifacts-destination {server.artifacts} "
        f"--allowed-hosts {server.allowed_hosts}\n"
        "Restart=on-failure\n"
        "RestartSec=3\n"
        "UMask=0077\n"
        "NoNewPrivileges=yes\n"
        "PrivateTmp=yes\n"
        "ProtectSystem=strict\n"
        f"{home}"
        f"ReadWritePaths={STATE} {server.artifacts}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def auth_settings() -> str:
    """The accounts' settings; the host fills in the password that it made."""
    return (
        f"{_HEAD}"
        "[mlflow]\n"
        "default_permission = EDIT\n"
        f"database_uri = sqlite:///{STATE}/accounts.db\n"
        f"admin_username = {ADMIN}\n"
        "admin_password = @PASSWORD@\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        # Checking a password takes long on purpose, and a job reports often.
        "auth_cache_ttl_seconds = 60\n"
    )


def variables() -> str:
    """The service's environment; the host fills in the key that it made."""
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": AUTH,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "@KEY@",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Seven processes of 240 MB each, for work with language models that training jobs do not have.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    return _HEAD + "".join(f"{name}={value}\n" for name, value in settings.items())


def address_file(uri: str, *, ours: bool) -> str:
    """What `shoal run` reads on the controller. No secret is in it."""
    return json.dumps({"uri": uri, **({"username": JOBS} if ours else {})}) + "\n"


TOLD = ("cat", ADDRESS, JOBS_PASSWORD)
"""On the controller, as root: where jobs report to, and the password they do it with."""


def job_variables(told: str) -> dict[str, str]:
    """What MLflow's client and Shoal's tracker read, from the answer to TOLD. Empty where there is no server."""
    address, _, password = told.partition("\n")
    try:
        found = json.loads(address)
    except ValueError:
        return {}
    variables = {"MLFLOW_TRACKING_URI": str(found["uri"])}
    if "username" in found:
        variables |= {"MLFLOW_TRACKING_USERNAME": found["username"], "MLFLOW_TRACKING_PASSWORD": password.strip()}
    return variables


ACCOUNTS_MADE = ("sh", "-c", f'test "$(sha256sum < {JOBS_PASSWORD})" = "$(cat {ACCOUNTS} 2> /dev/null)"')
"""Whether the account of jobs has the password that is kept for it."""


def account_program(server: Server) -> str:
    """Waits for the server and makes the account that jobs use, or gives it the password that is kept for it.

    Passwords are read from files that only root reads.
    """
    return f"""
import base64, hashlib, json, sys, time, urllib.error, urllib.request
admin, jobs = (open(path).read().strip() for path in ({ADMIN_PASSWORD!r}, {JOBS_PASSWORD!r}))
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
def ask(method, path, body=None):
    head = {{"Content-Type": "application/json"}}
    head["Authorization"] = "Basic " + base64.b64encode(({ADMIN!r} + ":" + admin).encode()).decode()
    data = None if body is None else json.dumps(body).encode()
    opener.open(urllib.request.Request({server.uri!r} + path, data, head, method=method), timeout=30).close()
until = time.monotonic() + 240
while True:
    try:
        ask("GET", "/health")
        break
    except OSError as error:
        if time.monotonic() > until:
            sys.exit("the server does not answer: %s; see journalctl -u {SERVICE}" % error)
        time.sleep(1)
account = {{"username": {JOBS!r}, "password": jobs}}
try:
    ask("POST", "/api/2.0/mlflow/users/create", account)
except urllib.error.HTTPError as error:
    if error.code == 401:
        sys.exit("the server does not take the password in {ADMIN_PASSWORD}: its accounts are those of another one")
    try:
        ask("PATCH", "/api/2.0/mlflow/users/update-password", account)  # it was there already
    except urllib.error.HTTPError as error:
        sys.exit("the account {JOBS} cannot be made: %s" % error)
with open({ACCOUNTS!r}, "w") as mark, open({JOBS_PASSWORD!r}, "rb") as password:
    mark.write(hashlib.sha256(password.read()).hexdigest() + "  -")
"""


_HEALTH = """
import sys, urllib.request
try:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({})) if sys.argv[2] == "ours" else urllib.request
    with (opener.open if sys.argv[2] == "ours" else opener.urlopen)(sys.argv[1] + "/health", timeout=5) as answer:
        print(answer.status)
except Exception as error:
    reason = getattr(error, "reason", error)
    print(getattr(reason, "strerror", None) or reason)
"""


def health_command(uri: str, *, ours: bool) -> tuple[str, ...]:
    """Asks a server whether it is well; prints 200, or what is wrong."""
    return ("python3", "-I", "-c", _HEALTH, uri, "ours" if ours else "other")
