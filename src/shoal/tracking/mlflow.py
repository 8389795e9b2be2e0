"""MLflow as a service: its paths, unit and settings, and the programs that install it and create its accounts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.agent.document import HEADER, render_unit
from shoal.remote import python_command, shell_command
from shoal.remote.probes import MLFLOW_ACCOUNTS, MLFLOW_ADMIN, MLFLOW_JOBS, MLFLOW_SERVICE
from shoal.tracking.login import ADMIN_PASSWORD, JOBS_PASSWORD, SETTINGS

VERSION = "3.17.2"
"""The release that Shoal installs; the training library works with any from 2.0 on."""
USER = SERVICE = MLFLOW_SERVICE
STATE = "/var/lib/shoal-mlflow"
UNIT = "/etc/systemd/system/shoal-mlflow.service"
SESSION_KEY = f"{SETTINGS}/key"
AUTH, VARIABLES = f"{SETTINGS}/basic_auth.ini", f"{SETTINGS}/environment"
ADMIN, JOBS = MLFLOW_ADMIN, MLFLOW_JOBS
ACCOUNTS = f"{STATE}/.accounts"
USER_PASSWORDS = "/etc/shoal/mlflow-passwords"
"""A directory for root: the password of each user of the cluster."""
USER_VARIABLES = "/etc/shoal/mlflow.env"
"""What users have in their environment after a login: no secrets."""


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
        # Who creates an experiment may change it; all others read it.
        "default_permission = READ\n"
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


def login_name(user: str) -> str:
    """The name of a user's account. Two names are those of accounts that the server has anyway."""
    return f"user-{user}" if user in (ADMIN, JOBS) else user


def user_login(user: str) -> str:
    """A file as MLflow's client reads it from `~/.mlflow/credentials`; the host fills in the password."""
    return f"[mlflow]\nmlflow_tracking_username = {login_name(user)}\nmlflow_tracking_password = @PASSWORD@\n"


def user_variables(uri: str) -> str:
    """The file of `pam_env`. Each user has an experiment: in MLflow's `Default`, none of them may write."""
    return f"{HEADER}MLFLOW_TRACKING_URI DEFAULT={uri}\nMLFLOW_EXPERIMENT_NAME DEFAULT=@{{PAM_USER}}\n"


def accounts(users: Iterable[str]) -> dict[str, str]:
    """The accounts beside the administrator's, each with the file of its password."""
    return {JOBS: JOBS_PASSWORD, **{login_name(user): f"{USER_PASSWORDS}/{user}" for user in sorted(users)}}


def account_check(users: Iterable[str]) -> tuple[str, ...]:
    """A command that tests whether all accounts have their current passwords."""
    known = accounts(users)
    expected = f"$(cat {' '.join(known.values())} | sha256sum; echo {' '.join(known)})"
    return shell_command(f'test "{expected}" = "$(cat {ACCOUNTS} 2> /dev/null)"')


def account_arguments(server: MlflowServer, users: Iterable[str] = ()) -> tuple[str, ...]:
    """The arguments of `remote/probes.py` that create the accounts on the server's host."""
    known = (f"{name}:{path}" for name, path in accounts(users).items())
    return (MLFLOW_ACCOUNTS, server.uri, ADMIN_PASSWORD, ACCOUNTS, *known)


def health_command(uri: str, *, ours: bool) -> tuple[str, ...]:
    """A command that prints 200 for a healthy server, or the error. A server of ours is not behind a proxy."""
    return python_command("probes", "tracking", uri, "no-proxies" if ours else "proxies")
