"""The logins of `shoal run`, which begin before typer and the verb are loaded.

A login is mostly waiting, and loading is not. `ssh` logs in meanwhile and asks the controller what every job needs to
know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ShoalError
from shoal.hosts.host_keys import HostKeys
from shoal.hosts.ssh_login import Question, begin_login
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND
from shoal.tracking.login import ADDRESS_COMMAND
from shoal.verbs.context import Context, job_file_hosts, recall_hosts
from shoal.verbs.joined_cluster import READ_RECORD
from shoal.verbs.operator_login import LOGIN_COMMAND

MAX_EAGER_HOSTS = 16
"""All hosts of a cluster up to this size are connected at once, because a job may go to any of them."""


def _questions(first: tuple[str, ...], *, root: bool) -> tuple[Question, ...]:
    """Slurm's last: it may not answer."""
    address = Question(ADDRESS_COMMAND, root, may_fail=True)  # without tracking there is none
    return (Question(first, root=False), address, Question(NODES_COMMAND, root), Question(PARTITIONS_COMMAND, root))


USER_QUESTIONS = _questions(READ_RECORD, root=False)
OPERATOR_QUESTIONS = _questions(LOGIN_COMMAND, root=True)
"""What `verbs/submission.py` asks the controller whatever the job is."""


def begin_logins(words: Sequence[str]) -> None:
    """Start to log in to the hosts of the cluster that a command line names, where its spec was read before.

    Words are looked at, not understood: one may be the script's own. A login that nobody takes ends with the command.
    """
    if {"--help", "-h"} & set(words):
        return
    file = _option(words, "--file", "-f") or os.environ.get("SHOAL_FILE")
    cluster = _option(words, "--cluster") or os.environ.get("SHOAL_CLUSTER")
    context = recall_hosts(Path(file) if file else None, cluster or None)
    if context is None or _is_local(context):
        return
    names = job_file_hosts(context)
    if len(names) > MAX_EAGER_HOSTS:
        names = [context.controller.name]
    with contextlib.suppress(ShoalError):  # raised again by who needs the hosts
        targets = asyncio.run(context.targets(member for member in context.members if member.name in names))
        host_keys = HostKeys(context.known_hosts)
        for name, target in targets.items():
            questions = USER_QUESTIONS if context.joined else OPERATOR_QUESTIONS
            begin_login(target, host_keys, questions if name == context.controller.name else ())


def _is_local(context: Context) -> bool:
    """Whether the person sits on the host that the commands go to."""
    return context.joined is not None and context.joined.login is None


def _option(words: Sequence[str], *names: str) -> str | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return None
