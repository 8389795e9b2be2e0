"""How a job and a person log in to the cluster's MLflow: where the address and the passwords are, and their commands.

Apart from `mlflow.py`, which sets the server up: `shoal run` needs this alone.
"""

from __future__ import annotations

import configparser
import json

from shoal.remote import shell_command

SETTINGS = "/etc/shoal/mlflow"
ADMIN_PASSWORD, JOBS_PASSWORD = (f"{SETTINGS}/{name}" for name in ("admin-password", "jobs-password"))
ADDRESS = "/etc/shoal/tracking.json"
"""Where jobs are submitted: the server's address, for `shoal run`."""
USER_LOGINS = "/etc/shoal/mlflow-logins"
"""A directory of files that MLflow's client reads, one for each user, which only that user can read."""


def _secret_or_login(secret: str) -> str:
    """Shell text that prints a secret of root's for root, and a user's login for that user."""
    return f'if [ -r {secret} ]; then cat {secret}; else cat "{USER_LOGINS}/$(id -un)"; fi'


ADDRESS_COMMAND = shell_command(f"cat {ADDRESS} && {_secret_or_login(JOBS_PASSWORD)}")
"""Where jobs are submitted: prints the server's address, then the password of jobs or a user's login."""
LOGIN_COMMAND = shell_command(_secret_or_login(ADMIN_PASSWORD))
"""On the server's host: prints the administrator's password or a user's login."""


def job_variables(output: str) -> dict[str, str]:
    """The variables of MLflow's client and Shoal's tracker, from ADDRESS_COMMAND's output. Empty without a server."""
    address, _, secret = output.partition("\n")
    try:
        data = json.loads(address)
    except ValueError:
        return {}
    variables = {"MLFLOW_TRACKING_URI": str(data["uri"])}
    if "username" not in data:
        return variables
    name, password = read_user_login(secret) or (data["username"], secret.strip())
    variables |= {"MLFLOW_TRACKING_USERNAME": name, "MLFLOW_TRACKING_PASSWORD": password}
    return variables if name == data["username"] else {**variables, "MLFLOW_EXPERIMENT_NAME": name}


def read_user_login(text: str) -> tuple[str, str] | None:
    """The name and the password in such a file; None in another text."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        return parser["mlflow"]["mlflow_tracking_username"], parser["mlflow"]["mlflow_tracking_password"]
    except (configparser.Error, KeyError):
        return None
