#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's Epilog: ends what a job has left of podman. Its containers are removed by the user's next job, in its limits.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
# As the user: root would follow a user's links, and send signals to what a user names. A pipe of the user's would hold us.
as_user() { timeout -k 5 30 setpriv --reuid="$SLURM_JOB_UID" --regid="$(id -g "$SLURM_JOB_USER")" --clear-groups "$@"; }
place=@JOBS@/$SLURM_JOB_USER/$SLURM_JOB_ID
if [ -d "$place" ]; then
    # Where no cgroup has ended them.
    as_user sh -c 'cat "$1"/docker-*.pid | xargs -r kill' sh "$place" 2> /dev/null
    # A directory of that name says that the job goes on.
    as_user sh -c 'mv "$1" "$1.ended" && rm -rf "$1.ended"' sh "$place"
fi
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
