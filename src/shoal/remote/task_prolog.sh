#!/bin/sh
# Written by shoal; changes here are lost.
# Slurm's TaskProlog, as the job's user: a task has in its environment what this prints.
user=$(id -un)
place=@JOBS@/$user
store=@STORE@/$user

# use_state JOB: podman's containers, their network and its database are those of the job.
use_state() {
    SHOAL_PODMAN=$store/jobs/$1
    XDG_RUNTIME_DIR=$place/$1
    mkdir -p -m 0700 "$XDG_RUNTIME_DIR"
}

# remove_state JOB: remove the containers that a job has left, which frees their names.
remove_state() (
    use_state "$1"
    if [ -d "$SHOAL_PODMAN/libpod" ]; then
        podman pod rm --all --force --time 0
        podman rm --all --force --time 0 --volumes
        kill "$(cat "$XDG_RUNTIME_DIR/libpod/tmp/pause.pid")"
    fi
    rm -rf "$SHOAL_PODMAN" "$XDG_RUNTIME_DIR"
)

# make_state: this job's, beside images, volumes and networks, which stay on the node for the user's next job. Once
# XDG_RUNTIME_DIR is there it is complete.
make_state() {
    jobs=$(ls "$place" | grep -cx '[0-9]*')
    for state in "$store"/jobs/*; do
        job=${state##*/}
        [ ! -d "$state" ] || [ -d "$place/$job" ] || remove_state "$job"
    done
    mkdir -p -m 0700 "$SHOAL_PODMAN" || return
    for name in overlay overlay-containers overlay-images overlay-layers networks secrets volumes; do
        mkdir -p "$store/$name" && ln -sfn "../../$name" "$SHOAL_PODMAN/$name" || return
    done
    for name in storage.lock userns.lock; do
        ln -sfn "../../$name" "$SHOAL_PODMAN/$name" || return
    done
    use_state "$SLURM_JOB_ID"
    # Of builds that were killed. Those of another job that runs look the same.
    if [ "$jobs" = 0 ] && grep -qs '"id"' "$store/overlay-containers/containers.json"; then
        podman ps --all --external --quiet | xargs -r podman rm --force
    fi
}

# start_socket: podman as Docker's SDKs ask it. It starts at the first connection, and ends with the step.
start_socket() {
    [ ! -S "$1" ] || return
    # Slurm ends the group of processes that this program has.
    setsid systemd-socket-activate --listen="$1" -E SHOAL_PODMAN -E XDG_RUNTIME_DIR -E CONTAINERS_CONF \
        -E CONTAINERS_STORAGE_CONF -E CONTAINERS_REGISTRIES_CONF podman system service --time 0 9>&- &
    echo $! > "$1.pid"
    until [ -S "$1" ] || ! kill -0 $!; do sleep 0.01; done
}

if [ -O "$place" ] && [ -e @PODMAN@/containers.conf ]; then
    export XDG_RUNTIME_DIR="$place/$SLURM_JOB_ID" SHOAL_PODMAN="$store/jobs/$SLURM_JOB_ID"
    export CONTAINERS_CONF=@PODMAN@/containers.conf CONTAINERS_STORAGE_CONF=@PODMAN@/storage.conf
    # Through the user's systemd podman would start its network's processes outside the job.
    unset DBUS_SESSION_BUS_ADDRESS
    echo "unset DBUS_SESSION_BUS_ADDRESS"
    variables="XDG_RUNTIME_DIR CONTAINERS_CONF CONTAINERS_STORAGE_CONF SHOAL_PODMAN"
    has_docker=
    case " @USERS@ " in *" $user "*) has_docker=yes ;; esac
    # One that the user has set stays; that of a job that submitted this one does not.
    case ${DOCKER_HOST:-unix://$place/} in "unix://$place/"*) ;; *) has_docker= ;; esac
    if [ "$has_docker" ]; then
        # A batch script may have the number of the step that has submitted it.
        step=$(sed -n 's|.*/step_\([^/]*\).*|\1|p' /proc/self/cgroup | head -n 1)
        socket=$XDG_RUNTIME_DIR/docker-${step:-${SLURM_STEP_ID:-batch}}
        export CONTAINERS_REGISTRIES_CONF=@PODMAN@/registries.conf DOCKER_HOST="unix://$socket" DOCKER_BUILDKIT=0
        export PATH="@DOCKER@:${PATH#@DOCKER@:}"
        variables="$variables CONTAINERS_REGISTRIES_CONF DOCKER_HOST DOCKER_BUILDKIT PATH"
    fi
    (
        flock 9
        [ -d "$XDG_RUNTIME_DIR" ] || make_state
        [ ! "$has_docker" ] || start_socket "$socket"
    ) 9> "$place/lock" < /dev/null > /dev/null 2>&1
    for name in $variables; do
        eval "printf 'export %s=%s\\n' $name \"\$$name\""
    done
fi
program='@PROGRAM@'
[ -z "$program" ] || exec "$program"
