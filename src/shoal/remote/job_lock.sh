# job_lock.sh MARK COMMAND...: runs a command with the job's mark made, and locked while it runs.
set -eu
mkdir -p "${1%/*}"
: >> "$1"
exec 9< "$1"
flock -s 9
shift
exec "$@"
