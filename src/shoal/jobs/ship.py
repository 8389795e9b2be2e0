"""Sends a job's code to the hosts. Code that a host has already, by its hash, is not sent again.

The jobs' directory may be on storage that all hosts share, or on each host's own disk. A file in it with a random
number tells them apart: hosts that read the same number share one copy; otherwise every node gets its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import CommandFailed, PartialFailure
from shoal.hosts.api import Host
from shoal.jobs.bundle import Bundle

KEEP_NEWEST, KEEP_DAYS = 20, 7
"""Code that no job uses is kept while it is among the newest, or young."""

_INSPECT = r"""
set -eu
root=$1 code=$2 lib=$3
[ -d "$root" ] || { mkdir -p "$root" && chmod 1777 "$root"; }
[ -d "$root/code" ] && [ -d "$root/lib" ] || mkdir -p "$root/code" "$root/lib"
as_made_now() {  # root of a client of NFS may be somebody else there
    new=$(mktemp "$root/.new.XXXXXX")
    owner=$(stat -c %u "$new")
    rm -f "$new"
    [ "$(stat -c %u "$1")" = "$owner" ]
}
for place in "$root/code" "$root/lib"; do
    if [ -L "$place" ] || ! { [ -O "$place" ] || as_made_now "$place"; }; then
        echo "$place is a link, or does not belong to root" >&2
        exit 3
    fi
done
if [ ! -s "$root/.id" ]; then
    new=$root/.id.$$.$(hostname)  # two hosts may have the same process number
    head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$new"
    ln "$new" "$root/.id" 2> /dev/null || true
    rm -f "$new"
fi
read -r id < "$root/.id" || true  # there is no end of line in it
echo "$id"
[ ! -e "$root/.shared" ] || echo shared
exec 9> "$root/code/.lock"
flock 9
[ ! -e "$root/code/$code.tar" ] || { touch "$root/code/$code.tar"; echo code; }
[ ! -d "$root/lib/$lib" ] || { touch "$root/lib/$lib"; echo lib; }
exec 9>&-
find "$root" -maxdepth 2 -mtime +KEEP_DAYS '(' -path "$root/code/*.tar" -printf 'code\n' -o \
    -path "$root/lib/*" -printf 'lib\n' -o -name tree.lock -printf 'tree\n' ')' 2> /dev/null |
    awk '++many[$0] > KEEP_NEWEST { print "old"; exit }'
""".replace("KEEP_DAYS", str(KEEP_DAYS)).replace("KEEP_NEWEST", str(KEEP_NEWEST))
"""Makes the directories, open to every user as /tmp is; says which storage this is and what is there already.

What is there is touched, under the lock that `clean` holds too: it has just been used, and stays. Root is going to
write and delete in `code` and `lib`: below a --directory that a user may write to, they might be the user's.
"""

_STORE_FILE = r"""
set -eu
place=$1 bytes=$2
new=$place.$$.$(hostname)
trap 'rm -f "$new"' EXIT
cat > "$new"
[ "$(stat -c %s "$new")" = "$bytes" ] || { echo "only a part of it arrived" >&2; exit 4; }
chmod 644 "$new"
mv -f "$new" "$place"
"""
"""Takes a file from standard input; it has its name only once it is there whole."""

_UNPACK = r"""
set -eu
place=$1
new=$place.$$.$(hostname)
trap 'rm -rf "$new"' EXIT
mkdir "$new"
tar -x --no-same-owner -f - -C "$new"
# Here once, for all jobs: their users may not write here, and would compile it at every start.
python3 -I -m compileall -q -d "$place" --invalidation-mode unchecked-hash "$new" > /dev/null 2>&1 || true
chmod -R a+rX "$new"
mv -T "$new" "$place" 2> /dev/null || [ -d "$place" ]
"""
"""Unpacks an archive from standard input; the directory has its name only once all of it is there."""

_CLEAN_CODE = r"""
set -eu
root=$1 newest=$2 days=$3 used=" $4 "
exec 9> "$root/code/.lock"
flock 9
for place in code lib; do
    cd "$root/$place"
    ls -t | tail -n "+$((newest + 1))" | while IFS= read -r name; do
        case $used in *" ${name%.tar} "*) continue ;; esac
        [ -z "$(find "$name" -maxdepth 0 -mtime "+$days")" ] || rm -rf "./$name"
    done
done
"""
"""Removes archives that no job has used for long. `inspect_storage` has checked that the directories are root's."""

_CLEAN_TREES = r"""
set -eu
root=$1 newest=$2 days=$3 used=" $4 "
cd "$root"
ls -t ./*/tree.lock 2> /dev/null | tail -n "+$((newest + 1))" | while IFS=/ read -r _ job _; do
    case $used in *" $job "*) continue ;; esac
    [ -O "$job/tree.lock" ] && [ -n "$(find "$job/tree.lock" -mtime "+$days")" ] || continue
    find "$job/tree" -type f ! -newermt @0 -delete
    find "$job/tree" -depth -type d -empty -delete
    rm -f "$job/tree.lock"
done
"""
"""Removes from the trees of ended jobs the files that were sent, by their date of 1970: a script may have written its
results and checkpoints between them. Runs as the user whose jobs they are."""


@dataclass(frozen=True)
class StorageState:
    """What the jobs' directory of a host has."""

    id: str
    """The random number of its jobs' directory: the same on hosts that share it."""
    shared: bool = False
    """It is marked as shared by all nodes."""
    code: bool = False
    runtime: bool = False
    old: bool = False
    """It has more code than is kept."""


async def inspect_storage(host: Host, root: str, code: str, runtime: str) -> StorageState:
    """Make the jobs' directory on a host and report what it has."""
    result = await host.run(["sh", "-c", _INSPECT, "sh", root, code, runtime], timeout=60)
    if result.status == 3:
        raise CommandFailed(host.name, result.error_text.strip(), hint="remove it there, or use another --directory")
    if result.status != 0:
        raise CommandFailed(host.name, f"cannot use {root}: {result.error_text.strip()}", hint="is its disk full?")
    lines = result.text.split()
    return StorageState(lines[0], "shared" in lines, "code" in lines, "lib" in lines, "old" in lines)


def one_host_per_storage(storages: Mapping[str, StorageState]) -> tuple[str, ...]:
    """One host of each storage."""
    return tuple({storages[name].id: name for name in reversed(list(storages))}.values())


async def mark(host: Host, root: str, shared: bool) -> None:
    """Record for later jobs whether their nodes share the directory."""
    await host.run(["touch", f"{root}/.shared"] if shared else ["rm", "-f", f"{root}/.shared"], timeout=60)


async def send(host: Host, root: str, code: Bundle, runtime: Bundle, state: StorageState) -> int:
    """Send what the host lacks; returns how many bytes."""
    size = 0
    if not state.runtime:
        await _transfer(host, _UNPACK, f"{root}/lib/{runtime.hash}", runtime.data)
        size += len(runtime.data)
    if not state.code:
        await _transfer(host, _STORE_FILE, f"{root}/code/{code.hash}.tar", code.data)
        size += len(code.data)
    return size


async def clean(
    host: Host, root: str, jobs: Collection[str], hashes: Collection[str], newest: int = KEEP_NEWEST
) -> None:
    """Remove old code but what these jobs and those of these hashes use. Logs, checkpoints and whatever else jobs
    wrote stay. Failures are ignored: the next job tries again."""
    arguments = [root, str(newest), str(KEEP_DAYS)]
    await host.run(["sh", "-c", _CLEAN_CODE, "sh", *arguments, " ".join(hashes)], timeout=60)
    await host.run(["sh", "-c", _CLEAN_TREES, "sh", *arguments, " ".join(jobs)], timeout=60, root=False)


async def _transfer(host: Host, program: str, place: str, data: bytes) -> None:
    result = await host.run(["sh", "-c", program, "sh", place, str(len(data))], stdin=data, timeout=600)
    if result.status != 0:
        raise CommandFailed(
            host.name, f"cannot keep the job's code in {place}: {result.error_text.strip()}", hint="is its disk full?"
        )


def require_all_hosts(names: Sequence[str], done: Mapping[str, object], failures: Mapping[str, Exception]) -> None:
    """Raise PartialFailure unless every node has the code: the job would fail on the others."""
    missing = [name for name in names if name not in done]
    if missing:
        causes = "; ".join(str(failures[name]).split("\n")[0] for name in missing if name in failures)
        raise PartialFailure(
            f"cannot send the code to {', '.join(missing)}, so nothing was queued: {causes}",
            hint="repair these nodes, or name others with --nodelist or --partition",
        )
