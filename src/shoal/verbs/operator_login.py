"""Who the operator is on the controller: jobs of the operator's file run as that user.

An operator who logs in as a user of the cluster has that user's directories and rights, and their jobs are no different
from those of other users. Root's jobs, and those of a login that the file does not name, are `verbs/run.py`'s.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.hosts.api import Host
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.remote import shell_command
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordShare, parse_record

USERS_FILE = "/etc/shoal/users"
"""The users of the cluster, a name and an id on each line; `roles/user_ids.py` writes it."""
LOGIN_TIMEOUT_S = 60.0
LOGIN_COMMAND = shell_command(
    'me=$(id -un); echo "login $(id -u) $me $HOME"; '
    f'grep -q "^$me " {USERS_FILE} 2> /dev/null && echo user; cat {RECORD_PATH} 2> /dev/null; exit 0'
)


@dataclass(frozen=True)
class OperatorLogin:
    """The account on the controller that the operator's connection belongs to."""

    uid: int = 0
    user: str = "root"
    home: str = "/root"
    is_user: bool = False
    """It is a user of the cluster."""
    record: ClusterRecord | None = None
    """What the cluster says of itself; None where no `up` of this release has run."""

    @property
    def code_directory(self) -> str:
        """Where each node keeps code of this login's jobs: only root, or the login itself, can write there."""
        return f"{USER_JOBS_DIRECTORY}/root" if self.uid == 0 else f"{self.home}/.shoal/code"

    def share_of(self, directory: str) -> RecordShare | None:
        """The share that a directory is on."""
        shares = self.record.shares if self.record else {}
        return next((share for path, share in shares.items() if f"{directory}/".startswith(f"{path}/")), None)


async def read_login(host: Host) -> OperatorLogin:
    """Ask the controller."""
    result = await host.run(LOGIN_COMMAND, timeout=LOGIN_TIMEOUT_S, root=False)
    return parse_login(result.text) if result.status == 0 else OperatorLogin()


def parse_login(text: str) -> OperatorLogin:
    """The answer to LOGIN_COMMAND."""
    first, _, rest = text.partition("\n")
    words = first.split(" ", 3)
    if len(words) != 4 or words[0] != "login" or not words[1].isdecimal():
        return OperatorLogin()
    is_user = rest.startswith("user\n")
    record = None
    with contextlib.suppress(UsageError):  # of another release: the operator's next `up` writes it anew
        record = parse_record(rest.removeprefix("user\n"), RECORD_PATH)
    uid = int(words[1])
    return OperatorLogin(uid, words[2], words[3], is_user and uid != 0 and record is not None, record)
