#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's Epilog: ends what a job has left of podman. Its containers are removed by the user's next job, in its limits.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
# As the user: root would follow a user's links, and send signals to what a user names. A pipe of the user's would hold us.
as_user() { timeout -k 5 30 setpriv --reuid="$SLURM_JOB_UID" --regid="$(id -g "$SLURM_JOB_USER")" --clear-groups "$@"; }
place=@JOBS@/$SLURM_JOB_USER
# Where no cgroup has ended the programs behind sockets, they end here. A directory of the job's name says that it goes on.
end='
cd "$1" && [ -d "$2" ] || exit
for file in "$2"/docker-*.pid; do
    pid=$(cat "$file")
    ! tr "\0" " " < "/proc/$pid/cmdline" | grep -q "podman system service" || kill "$pid"
done
mv "$2" "$2.ended" && rm -rf "$2.ended"
'
[ ! -d "$place" ] || as_user sh -c "$end" sh "$place" "$SLURM_JOB_ID" 2> /dev/null
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
