# Sourced by demo, test and check: makes what the project needs on a fresh Debian machine, each step once.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

# step TITLE COMMAND...: run a command with a moving bar and its time; on failure show the end of its output.
step() {
    local title=$1 begun=$SECONDS out pid status width=24 at=0
    shift
    out=$(mktemp)
    set -m  # a process group of its own: Ctrl-C ends all that it has started
    "$@" >"$out" 2>&1 </dev/null &
    pid=$!
    set +m
    trap 'stop_step "$pid" "$out"' INT TERM
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        at=$(((at + 1) % width))
        printf '\r  %-26s [%*s###%*s] %4d s' "$title" "$at" '' $((width - at)) '' $((SECONDS - begun)) >&2
        sleep 0.2
    done
    status=0
    wait "$pid" || status=$?
    trap - INT TERM
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$status" -ne 0 ]; then
        printf '✗ %s failed after %d s:\n' "$title" $((SECONDS - begun)) >&2
        tail -n 20 "$out" >&2
        rm -f "$out"
        exit 1
    fi
    rm -f "$out"
    printf '✓ %-26s %6d s\n' "$title" $((SECONDS - begun)) >&2
}

stop_step() {
    kill -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    rm -f "$2"
    printf '\nstopped; run the same command again to go on from here\n' >&2
    exit 130
}

need_root() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "This needs root: the sandbox makes containers, bridges and mounts. Run it with sudo." >&2
        exit 1
    fi
}

# system_packages PROGRAM:PACKAGE...: install the packages whose program is missing.
system_packages() {
    local missing=() pair
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    [ ${#missing[@]} -eq 0 ] && return
    if ! command -v apt-get >/dev/null; then
        echo "Install these with your package manager first: ${missing[*]}" >&2
        exit 1
    fi
    step "system packages" apt_install "${missing[@]}"
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q && apt-get install -q -y --no-install-recommends "$@"
}

# virtual_environment EXTRA: .venv with Shoal in it, made again when pyproject.toml has changed.
virtual_environment() {
    local extra=$1 stamp all
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Shoal needs Python 3.11 or newer; python3 here is $(python3 -V 2>&1)." >&2
        exit 1
    fi
    if ! python3 -c 'import ensurepip' 2>/dev/null; then
        need_root
        step "python3-venv" apt_install python3-venv
    fi
    stamp=$venv/.shoal-$(sha256sum "$root/pyproject.toml" | cut -c1-16)
    all="${stamp}[dev]"
    stamp+=$extra
    # Who develops has all of it; installing less of it again would take Shoal away from the tests for a moment.
    if [ -e "$stamp" ] || [ -e "$all" ]; then return; fi
    step "virtual environment" make_environment "$extra"
    touch "$stamp"
}

make_environment() {
    [ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check --no-compile -e "$root$1"
    # pip would do it on one core. Some packages bring files that are no Python.
    "$venv/bin/python" -m compileall -qq -j0 "$venv/lib" || true
}
