"""MLflow as a service: its paths, unit and settings, and the programs that install it and create its accounts. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shoal.agent.document import HEADER, render_unit
from shoal.remote import python_command
from shoal.remote.probes import MLFLOW_ACCOUNT, MLFLOW_ADMIN, MLFLOW_JOBS, MLFLOW_SERVICE

VERSION = "3.17.2"
"""The release that Shoal installs; the training library works with any from 2.0 on."""
USER = SERVICE = MLFLOW_SERVICE
STATE = "/var/lib/shoal-mlflow"
SETTINGS = "/etc/shoal/mlflow"
UNIT = "/etc/systemd/system/shoal-mlflow.service"
ADMIN_PASSWORD, JOBS_PASSWORD, SESSION_KEY = (
    f"{SETTINGS}/{name}" for name in ("admin-password", "jobs-password", "key")
)
AUTH, VARIABLES = f"{SETTINGS}/basic_auth.ini", f"{SETTINGS}/environment"
ADDRESS = "/etc/shoal/tracking.json"
"""On the controller: the server's address, for `shoal run`."""
ADMIN, JOBS = MLFLOW_ADMIN, MLFLOW_JOBS
ACCOUNTS = f"{STATE}/.accounts"


@dataclass(frozen=True)
class MlflowServer:
    """A server that Shoal sets up."""

    name: str
    """The name of its host."""
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
        """Host names that the server accepts: its address, its name, and the local end of a tunnel."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port},{self.name}:{self.port},localhost:*,127.0.0.1:*"


def uri_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def packages(database: str) -> tuple[str, ...]:
    """Packages of the distribution."""
    return ("python3-venv", "postgresql") if database == "postgresql" else ("python3-venv",)


def requirements(database: str) -> tuple[str, ...]:
    return (f"mlflow[auth]=={VERSION}", *(("psycopg2-binary==2.9.10",) if database == "postgresql" else ()))


def unit(server: MlflowServer) -> str:
    """The service. It may write to its own directory and to the artifacts, and sees no home directory."""
    store = (
        "postgresql+psycopg2:///mlflow?host=/var/run/postgresql"
        if server.database == "postgresql"
        else f"sqlite:///{STATE}/mlflow.db"
    )
    after = "network-online.target" + (" postgresql.service" if server.database == "postgresql" else "")
    return render_unit(
        Unit={
            "Description": "MLflow, which keeps what training jobs report",
            "After": after,
            "Wants": "network-online.target",
            "RequiresMountsFor": server.artifacts,
            "StartLimitIntervalSec": 0,
        },
        Service={
            "User": USER,
            "Group": USER,
            "WorkingDirectory": STATE,
            "EnvironmentFile": VARIABLES,
            "ExecStart": f"{server.prefix}/bin/mlflow server --app-name basic-auth "
            f"--host {server.address} --port {server.port} --workers 2 "
            f"--backend-store-uri {store} --artifacts-destination {server.artifacts} "
            f"--allowed-hosts {server.allowed_hosts}",
            "Restart": "on-failure",
            "RestartSec": 3,
            "UMask": "0077",
            "NoNewPrivileges": "yes",
            "PrivateTmp": "yes",
            "ProtectSystem": "strict",
            "ProtectHome": None if server.artifacts.startswith(("/home/", "/root/")) else "yes",
            "ReadWritePaths": f"{STATE} {server.artifacts}",
        },
        Install={"WantedBy": "multi-user.target"},
    )


def auth_settings() -> str:
    """The settings of accounts; the host fills in the password that it generated."""
    return (
        f"{HEADER}"
        "[mlflow]\n"
        "default_permission = EDIT\n"
        f"database_uri = sqlite:///{STATE}/accounts.db\n"
        f"admin_username = {ADMIN}\n"
        "admin_password = @PASSWORD@\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        # Password checks are slow by design, and jobs report often.
        "auth_cache_ttl_seconds = 60\n"
    )


def variables() -> str:
    """The service's environment; the host fills in the key that it generated."""
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": AUTH,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "@KEY@",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # It costs seven processes of 240 MB each, and training jobs do not use it.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    return HEADER + "".join(f"{name}={value}\n" for name, value in settings.items())


def address_file(uri: str, *, ours: bool) -> str:
    """The file that `shoal run` reads on the controller. It holds no secret."""
    return json.dumps({"uri": uri, **({"username": JOBS} if ours else {})}) + "\n"


ADDRESS_COMMAND = ("cat", ADDRESS, JOBS_PASSWORD)
"""On the controller, as root: prints the server's address and the password of jobs."""


def job_variables(output: str) -> dict[str, str]:
    """The variables of MLflow's client and Shoal's tracker, from ADDRESS_COMMAND's output. Empty without a server."""
    address, _, password = output.partition("\n")
    try:
        data = json.loads(address)
    except ValueError:
        return {}
    variables = {"MLFLOW_TRACKING_URI": str(data["uri"])}
    if "username" in data:
        variables |= {"MLFLOW_TRACKING_USERNAME": data["username"], "MLFLOW_TRACKING_PASSWORD": password.strip()}
    return variables


ACCOUNT_CHECK = ("sh", "-c", f'test "$(sha256sum < {JOBS_PASSWORD})" = "$(cat {ACCOUNTS} 2> /dev/null)"')
"""Tests whether the account of jobs has its current password."""


def account_arguments(server: MlflowServer) -> tuple[str, ...]:
    """The arguments of `remote/probes.py` that create the account of jobs on the server's host."""
    return (MLFLOW_ACCOUNT, server.uri, ADMIN_PASSWORD, JOBS_PASSWORD, ACCOUNTS)


def health_command(uri: str, *, ours: bool) -> tuple[str, ...]:
    """A command that prints 200 for a healthy server, or the error. A server of ours is not behind a proxy."""
    return python_command("probes", "tracking", uri, "no-proxies" if ours else "proxies")
