#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's TaskProlog, as the job's user: a task has in its environment what this prints.
place=@JOBS@/$(id -un)
if [ -O "$place" ]; then
    # A job that another job has submitted has that one's, which goes with it.
    case $DOCKER_CONFIG in "$place"/docker-*) DOCKER_CONFIG= ;; esac
    if [ -z "$DOCKER_CONFIG" ] && [ -e @GUARD@ ]; then
        own=$place/docker-$SLURM_JOB_ID
        mkdir -p -m 0700 "$own"
        if [ ! -e "$own/config.json" ]; then  # podman reads it, too, and must find it
            cp "$HOME/.docker/config.json" "$own" 2> /dev/null || echo '{}' > "$own/config.json"
        fi
        echo "export DOCKER_CONFIG=$own"
        echo "export DOCKER_BUILDKIT=0"
    fi
    if [ -e @PODMAN@/containers.conf ]; then
        mkdir -p -m 0700 "$place/podman"
        echo "export XDG_RUNTIME_DIR=$place/podman"
        echo "export CONTAINERS_CONF=@PODMAN@/containers.conf"
        echo "export CONTAINERS_STORAGE_CONF=@PODMAN@/storage.conf"
    fi
fi
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
