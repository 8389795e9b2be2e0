"""A job on a rented container: how it and the controller keep in step. Text from pure functions.

A container mounts nothing, so `job_file_transfer.py` copies the job's files: what it needs goes there when it starts,
what it writes comes back while it runs. The batch script waits for the first, Slurm's Epilog for the second:

    controller                        container
    sees that the job runs            batch script: writes its submission, and waits
    sends code, checkpoints ────────▶ sent/.ready: the ranks start
    fetches logs, checkpoints ◀────── as they are written
                                      the last process has ended: Epilog marks it, and waits
    fetches the rest ◀───────────────
    removes the job's mark ─────────▶ Epilog ends, and so does the job
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from shoal.remote import program_text, shell_command
from shoal.remote.job_file_transfer import FAILED, READY
from shoal.remote.runner.node import SUBMISSION

END_PROGRAM = "/usr/local/lib/shoal/job-end"
"""Slurm's Epilog in rented containers. Where it is, the controller carries a job's files."""
MARKS = "/run/shoal-jobs"
"""In the container: a file for each job whose files are carried. Whoever carries holds a lock on it."""
WAIT_MINUTES = 30
"""So long a job waits for its files: an environment may have gigabytes."""
FETCH_TIMEOUT_S, JOB_END_TIMEOUT_S = 120, 3600
"""The end of a job waits so long for somebody to fetch its files, and so long in all."""


def wait_for_files_lines(root: str) -> Iterator[str]:
    """Lines of a batch script that may run in a rented container: SHOAL_SENT is where its code is, once it is there.

    `root` is the jobs' directory, where it is on any other node.
    """
    yield f"SHOAL_SENT={root}"
    yield f"if [ -e {END_PROGRAM} ]; then"
    yield "    # A rented container: the controller sends what the job needs."
    yield "    SHOAL_SENT=$SHOAL_JOB_DIR/sent"
    yield f"    ready=$SHOAL_JOB_DIR/{READY} failed=$SHOAL_JOB_DIR/{FAILED} mark=$SHOAL_JOB_DIR/submission"
    yield f'    mkdir -p "$SHOAL_JOB_DIR" && printf %s "${SUBMISSION}" > "$mark.new" && mv "$mark.new" "$mark"'
    yield f"    for ((turn = 0; turn < {WAIT_MINUTES * 60 * 5}; turn++)); do"
    yield '        [ ! -e "$ready" ] && [ ! -e "$failed" ] || break'
    yield "        sleep 0.2"
    yield "    done"
    yield '    if [ ! -e "$ready" ]; then'
    yield f'        why=$(cat "$failed" 2> /dev/null) || why="not within {WAIT_MINUTES} minutes"'
    yield '        echo "shoal: error: the files of the job did not come from the controller: $why" >&2'
    yield "        exit 1"
    yield "    fi"
    yield "fi"


def job_end() -> str:
    """The Epilog: says that a job is over, and holds its node until the controller has all that it left."""
    turns = {"FETCH_TURNS": FETCH_TIMEOUT_S * 5, "TURNS": JOB_END_TIMEOUT_S * 5}
    return program_text("job_end.sh", MARKS=MARKS, **turns)


def end_mark_path(number: str) -> str:
    """In the container: says that no process of a job is left. `number` is Slurm's own."""
    return f"{MARKS}/{number}.over"


def as_user(uid: int, gid: int, *words: str) -> list[str]:
    """A command as a job's user, who gains nothing by it."""
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", *words]


def with_job_lock(number: str, words: Sequence[str]) -> str:
    """For the container's shell: a command with the job's mark made, and locked while it runs."""
    return shlex.join(shell_command(program_text("job_lock.sh"), f"{MARKS}/{number}", *words))


def write_end_mark_command(number: str) -> str:
    """The same for a job that had ended before there was a mark: its Epilog has said nothing."""
    return f": > {end_mark_path(number)}"


def fail(uid: int, gid: int, directory: str, why: str) -> str:
    """The same to tell the batch script that it need not wait any longer."""
    script = 'mkdir -p "${1%/*}" && printf "%s\\n" "$2" > "$1.new" && mv "$1.new" "$1"'
    return shlex.join(as_user(uid, gid, *shell_command(script, f"{directory}/{FAILED}", why)))


def cleanup_command(number: str, uid: int, gid: int, directory: str) -> str:
    """The same when all is fetched: nothing of it stays in the container, and the job may end."""
    away = shlex.join(as_user(uid, gid, "rm", "-rf", directory, f"{directory}.out"))
    return f"{away}; rm -f {MARKS}/{number} {end_mark_path(number)}"
