"""The hosts of the bench, for pyinfra."""

import json
import os
from pathlib import Path

_hosts = json.loads(Path(os.environ["CONVERGE_HOSTS"]).read_text())


def _host(entry):
    data = {
        "ssh_hostname": entry["address"],
        "ssh_user": "root",
        "ssh_key": entry["identity"],
        "ssh_known_hosts_file": entry["known_hosts"],
        "ssh_strict_host_key_checking": "yes",
        "ssh_allow_agent": False,
        "ssh_look_for_keys": False,
    }
    return (entry["name"], data)


controller = [_host(entry) for entry in _hosts if entry["role"] == "controller"]
compute = [_host(entry) for entry in _hosts if entry["role"] == "compute"]
