"""The code of a job inside its batch script, for users' jobs without a share, and for root's jobs on one: Slurm brings
it to the first node.

The batch script sends it on to the other nodes, through srun, as the job's user. Each node checks the directory and the
content before it runs anything (`remote/job_directory.py`). Slurm keeps the script, so a job that is queued again, and
each task of an array, has its code wherever it starts.
"""

from __future__ import annotations

import base64
import gzip
import io
import shlex
import tarfile
from collections.abc import Iterator

from shoal.errors import UsageError
from shoal.jobs.bundle import Bundle
from shoal.jobs.model import JobPaths
from shoal.remote import program_text
from shoal.remote.runner.node import SUBMISSION

MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""Slurm takes no larger batch script (max_script_size)."""
MAX_TEXT_BYTES = 64 * 1024
"""So much of it is left for the script itself."""
MARK = "# The code of the job:"


def receive_lines(shipped: JobPaths, nodes: int) -> Iterator[str]:
    """Lines of the batch script that give every node the code."""
    root = shlex.quote(shipped.code_root or shipped.root)
    indent = ""
    yield "# The code is at the end of this script. Each node takes and checks it."
    if shipped.staged:
        yield f'if [ "$SHOAL_SENT" = {root} ]; then'
        indent = "    "
    yield f"{indent}shoal_code() {{ sed '1,/^{MARK}$/d' \"$0\" | base64 -d; }}"
    yield f"{indent}program=$(shoal_code | tar -xzO program.py) || exit 1"
    srun = "srun --mpi=none --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --cpus-per-task=1 --chdir=/ \\"
    yield f"{indent}shoal_code | {srun if nodes > 1 else chr(92)}"
    yield f'{indent}    python3 -I -S -B -c "$program" receive {root} {shipped.code} {shipped.runtime} || exit 1'
    if shipped.staged:
        yield "fi"


def owner_lines(owner: int) -> Iterator[str]:
    """Lines for root's job on a share where root of some nodes is `owner`: both write to its directory, nobody else."""
    yield f"# On this share root is user {owner} on some nodes. Both write here, and nobody else can enter."
    yield "umask 000"
    yield "mark=$SHOAL_JOB_DIR/submission"
    yield f'if [ "$(cat "$mark" 2> /dev/null)" != "${SUBMISSION}" ]; then'
    yield f'    [ ! -e "$SHOAL_JOB_DIR" ] || mv -T "$SHOAL_JOB_DIR" "$SHOAL_JOB_DIR.before-${SUBMISSION}"'
    yield '    mkdir -m 0700 "$SHOAL_JOB_DIR" || exit 1'
    yield f'    printf %s "${SUBMISSION}" > "$mark"'
    yield f'    chown {owner} "$SHOAL_JOB_DIR" 2> /dev/null'
    yield "fi"


def pack_code(tree: Bundle, runtime: Bundle) -> bytes:
    """What `receive` of `remote/job_directory.py` takes."""
    program = program_text("job_directory").encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in (("program.py", program), ("code.tar", tree.data), ("lib.tar", runtime.data)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def encode_code(tree: Bundle, runtime: Bundle) -> str:
    """What stands at the end of the batch script. Raises UsageError where Slurm would not take it."""
    text = base64.encodebytes(pack_code(tree, runtime)).decode()
    if len(text) > MAX_SCRIPT_BYTES - MAX_TEXT_BYTES:
        size, limit = len(text) / 1024 / 1024, (MAX_SCRIPT_BYTES - MAX_TEXT_BYTES) / 1024 / 1024
        raise UsageError(
            f"the working tree is {size:.1f} MiB as Slurm carries it, and it carries {limit:.1f} MiB at most",
            hint="put data into .gitignore; users' jobs on a share, and root's without --directory, may have more code",
        )
    return f"{MARK}\n{text}"
