#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's Epilog: removes the containers and settings that a job has left. Where it fails, Slurm drains the node.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
if [ -e @GUARD@ ]; then
    tries=10
    until @END@ "$SLURM_JOB_ID" "$SLURM_JOB_USER"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || exit 1
        sleep 1
    done
fi
# As the user: root would follow a user's links.
as_user() { setpriv --reuid="$SLURM_JOB_UID" --regid="$(id -g "$SLURM_JOB_USER")" --clear-groups "$@"; }
place=@JOBS@/$SLURM_JOB_USER
if [ -d "$place" ]; then
    as_user rm -rf "$place/docker-$SLURM_JOB_ID"
    # Without these podman knows that its containers have ended.
    pgrep -u "$SLURM_JOB_UID" > /dev/null || as_user rm -rf "$place/podman" "/dev/shm/libpod_rootless_lock_$SLURM_JOB_UID"
fi
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
