"""Runs a step of `srun --container=BUNDLE` or `sbatch --container`: Slurm calls it as `oci.conf` says.

Slurm writes the step's command and variables into a copy of the bundle's `config.json`. A bundle of `shoal image
bundle` names an image there, and the command runs in it as under `shoal run`. crun runs any other bundle.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd

from .image import fail, run_in_image
from .unpacked_image import CRUN_STATE, Problem, own_store
from .variables import IMAGE, script_variables, step_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ANNOTATION = "shoal.image"
"""What the bundle's commands run in: the JSON of $SHOAL_IMAGE."""
SLURM_SCRIPT = "/tmp/slurm/startup"  # nosec B108
"""Where Slurm wants the batch script to be. /tmp is the node's, which users share."""
SCRIPT = "/run/slurm/startup"
CRUN_WORDS = {"state": ["state"], "kill": ["kill", "-a"], "delete": ["delete", "--force"]}


def run_bundle(bundle: str, container: str) -> int:
    """Become the command of the bundle; the status where that is not possible."""
    try:
        config = read_config(bundle)
        if ANNOTATION not in (config.get("annotations") or {}):
            return run_with_crun(bundle, container)
    except (OSError, ValueError) as error:
        return fail("cannot read bundle %s: %s" % (bundle, error))
    settings, command = json.loads(config["annotations"][ANNOTATION]), list(config["process"]["args"])
    os.environ.clear()
    os.environ.update(entry.partition("=")[::2] for entry in config["process"]["env"])
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("PWD", "/"))
    scripts = [place["source"] for place in config.get("mounts") or () if place.get("destination") == SLURM_SCRIPT]
    if not scripts:
        return run_task(settings, command, container)
    settings["mounts"].append([scripts[0], SCRIPT, True])
    script_variables()
    os.environ[IMAGE] = json.dumps(settings)
    return run_in_image([SCRIPT if word == SLURM_SCRIPT else word for word in command])


def run_step(bundle: str, command: list[str]) -> int:
    """The same for a command of plain `srun`. Slurm 22.05 runs only one task of a container on a node."""
    try:
        return run_task(json.loads(read_config(bundle)["annotations"][ANNOTATION]), command)
    except (OSError, ValueError) as error:
        return fail("cannot read bundle %s: %s" % (bundle, error))


def read_config(bundle: str) -> dict[str, Any]:
    with open(os.path.join(bundle, "config.json")) as file:
        config: dict[str, Any] = json.load(file)
    return config


def run_task(settings: dict[str, Any], command: list[str], container: str = "") -> int:
    if container or "SLURM_STEP_ID" in os.environ:
        step_variables(container)
    else:
        script_variables()
    os.environ[IMAGE] = json.dumps(settings)
    return run_in_image(command)


def run_with_crun(bundle: str, container: str) -> int:
    # Some hosts, containers themselves, allow no new keyrings.
    return become_crun("run", "--no-new-keyring", "--bundle", bundle, container)


def ask_crun(action: str, user: str, container: str) -> int:
    """Become crun's `state`, `kill` or `delete`, as the user: Slurm calls it as root at times."""
    if os.getuid() == 0:
        account = pwd.getpwnam(user)
        os.initgroups(user, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    return become_crun(*CRUN_WORDS[action], container)


def become_crun(*words: str) -> int:
    """Its state is in the user's own directory, which nobody else can make."""
    try:
        root = os.path.join(own_store(), CRUN_STATE)
        os.execvp("crun", ["crun", "--rootless=true", "--root=" + root, *words])  # nosec B606 B607
    except OSError as error:
        return fail("cannot run crun: %s" % error.strerror)
    except Problem as error:
        return fail(str(error))
