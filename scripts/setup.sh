# Sourced by the other scripts and the benches: installs what the project needs on a fresh Debian machine, each step once.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
cache=${SHOAL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal}

# step TITLE COMMAND...: run a command with a progress bar and its time; on failure print the end of its output.
step() {
    local title=$1 start=$SECONDS out pid status width=24 at=0
    shift
    out=$(mktemp)
    set -m  # its own process group, so that Ctrl-C ends all its children
    "$@" >"$out" 2>&1 </dev/null &
    pid=$!
    set +m
    trap 'stop_step "$pid" "$out"' INT TERM
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        at=$(((at + 1) % width))
        printf '\r  %-26s [%*s###%*s] %4d s' "$title" "$at" '' $((width - at)) '' $((SECONDS - start)) >&2
        sleep 0.2
    done
    status=0
    wait "$pid" || status=$?
    trap - INT TERM
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$status" -ne 0 ]; then
        printf '✗ %s failed after %d s:\n' "$title" $((SECONDS - start)) >&2
        tail -n 20 "$out" >&2
        rm -f "$out"
        exit 1
    fi
    rm -f "$out"
    printf '✓ %-26s %6d s\n' "$title" $((SECONDS - start)) >&2
}

stop_step() {
    kill -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    rm -f "$2"
    printf '\nstopped; run the same command again to continue\n' >&2
    exit 130
}

need_root() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "This needs root, because the sandbox creates containers, bridges and mounts. Run it with sudo." >&2
        exit 1
    fi
}

# need_engine: stop unless an ordinary user can make sandbox hosts, as containers of podman or docker.
need_engine() {
    if ! command -v podman >/dev/null && ! command -v docker >/dev/null; then
        cat >&2 <<'T'
Without root, the hosts of the sandbox are containers of podman or docker, and neither is installed.
Run this with sudo, or install podman once:
  sudo apt-get install --no-install-recommends podman uidmap slirp4netns netavark iptables runc mmdebstrap
T
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
        echo "Install these packages first: ${missing[*]}" >&2
        exit 1
    fi
    step "system packages" apt_install "${missing[@]}"
}

# sandbox_packages: install what sandbox hosts need on this machine.
sandbox_packages() {
    system_packages systemd-nspawn:systemd-container mmdebstrap:mmdebstrap nft:nftables ip:iproute2 ssh:openssh-client
}

# engine_packages: install what sandbox hosts under podman need on this machine.
engine_packages() {
    system_packages podman:podman newuidmap:uidmap slirp4netns:slirp4netns runc:runc iptables:iptables \
        mmdebstrap:mmdebstrap
    # Helpers of podman are not on PATH.
    [ -e /usr/lib/podman/netavark ] || system_packages netavark:netavark
}

# vm_packages: install what virtual machines need on this machine.
vm_packages() {
    case $(uname -m) in
    x86_64) system_packages qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils ;;
    aarch64) system_packages qemu-system-aarch64:qemu-system-arm qemu-img:qemu-utils ;;
    *)
        echo "Virtual machines run on x86_64 and aarch64; this machine is $(uname -m)." >&2
        exit 1
        ;;
    esac
    # Debian 12 has virtiofsd in a package that QEMU needs.
    [ -e /usr/lib/qemu/virtiofsd ] || [ -e /usr/libexec/virtiofsd ] || system_packages virtiofsd:virtiofsd
}

# test_environment ARGUMENTS...: install what scripts/test and scripts/matrix need, and set their environment.
test_environment() {
    need_root
    sandbox_packages
    engine_packages
    system_packages sshd:openssh-server scontrol:slurm-client slurmctld:slurmctld munged:munge sudo:sudo git:git \
        cc:gcc cc:libc6-dev openssl:openssl
    # Tests on virtual machines are not in the daily set.
    if [ "${SHOAL_TEST_KIND:-}" = vm ] || [[ "$*" == *matrix* ]] || [[ "$*" == *test_vm* ]]; then vm_packages; fi
    virtual_environment '[dev]'
    # Bytecode is kept: without it each of the hundreds of processes here compiles what it imports.
    unset PYTHONDONTWRITEBYTECODE
    # Real Tailscale and Headscale, where they are available. The tests that need them are skipped elsewhere.
    local tools=${SHOAL_TEST_TOOLS:-$root/../shared/tools} programs
    if [ -x "$tools/unpack" ]; then
        programs=$cache/tools
        "$tools/unpack" "$programs"
        PATH=$programs:$PATH
    fi
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q && apt-get install -q -y --no-install-recommends "$@"
}

# virtual_environment EXTRA: create .venv with Shoal in it, again whenever pyproject.toml has changed.
virtual_environment() {
    local extra=$1 stamp dev_stamp
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Shoal needs Python 3.11 or newer; python3 here is $(python3 -V 2>&1)." >&2
        exit 1
    fi
    if ! python3 -c 'import ensurepip' 2>/dev/null; then
        need_root
        step "python3-venv" apt_install python3-venv
    fi
    stamp=$venv/.shoal-$(sha256sum "$root/pyproject.toml" | cut -c1-16)
    dev_stamp="${stamp}[dev]"
    stamp+=$extra
    # [dev] includes every extra. Installing Shoal again would remove it for a moment from tests that run.
    if [ -e "$stamp" ] || [ -e "$dev_stamp" ]; then return; fi
    step "virtual environment" make_environment "$extra"
    touch "$stamp"
}

make_environment() {
    [ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check --no-compile -e "$root$1"
    # pip would compile on one core. Some packages contain files that are not valid Python, hence `true`.
    "$venv/bin/python" -m compileall -qq -j0 "$venv/lib" || true
}

# run_sandbox_bench NAME ARGUMENTS...: the same for a bench that needs sandbox hosts.
run_sandbox_bench() {
    need_root
    sandbox_packages
    run_bench "$@"
}

# run_bench NAME ARGUMENTS...: run bench/NAME.d/run.py with the developers' environment.
run_bench() {
    local name=$1
    shift
    has_dev_packages || virtual_environment '[dev]'
    # The peers are compiled when they are installed, so Shoal is too.
    "$venv/bin/python" -m compileall -q "$root/src/shoal"
    PYTHONPATH=$root/bench:$root:$root/src exec "$venv/bin/python" "$root/bench/$name.d/run.py" "$@"
}

has_dev_packages() {
    "$venv/bin/python" -c 'import sys
from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("shoal", "torch", "webdataset", "starlette"))))' 2>/dev/null
}
