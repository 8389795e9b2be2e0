# Sourced by the other scripts and the benches: installs what the project needs on a fresh Debian machine, each step once.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
cache=${SHOAL_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/shoal}

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
    tailscale_programs
}

# tailscale_programs: real Tailscale and Headscale, where they are available. The tests that need them are skipped elsewhere.
tailscale_programs() {
    local tools=${SHOAL_TEST_TOOLS:-$root/../shared/tools}
    if [ -x "$tools/unpack" ]; then
        "$tools/unpack" "$cache/tools"
        PATH=$cache/tools:$PATH
    fi
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q && apt-get install -q -y --no-install-recommends "$@"
}

# virtual_environment EXTRA: make .venv with Shoal in it, again whenever pyproject.toml has changed.
virtual_environment() {
    local extra=$1 key
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Shoal needs Python 3.11 or newer; python3 here is $(python3 -V 2>&1)." >&2
        exit 1
    fi
    if ! python3 -c 'import ensurepip' 2>/dev/null; then
        need_root
        step "python3-venv" apt_install python3-venv
    fi
    key=$(sha256sum "$root/pyproject.toml" | cut -c1-16)
    # [dev] includes every extra. Making it again would remove it for a moment from tests that run.
    if [ -e "$venv/.shoal-$key$extra" ] || [ -e "$venv/.shoal-$key[dev]" ]; then return; fi
    step "virtual environment" make_environment "$key" "$extra"
}

# make_environment KEY EXTRA: install packages once for each pyproject.toml and Python, into the user's cache. A checkout
# has hard links to them, and its own src. What was killed is begun again: directories are complete or absent.
make_environment() {
    set -e  # `step` runs this in a subshell of its own
    local key=$1 extra=$2 kept=$cache/python place
    rm -rf "$venv.new" "$venv.old"
    if mkdir -p "$kept" 2>/dev/null && [ -w "$kept" ]; then
        place=$kept/$key-$(python3 -c 'import sys; print(sys.implementation.cache_tag, sys.base_prefix)' | cksum | cut -d' ' -f1)
        [ ! -d "$place-dev" ] || extra='[dev]'
        place+=${extra:+-dev}
        exec 9>"$place.lock"
        flock 9
        if [ ! -d "$place" ]; then
            install_packages "$place.new" "$extra"
            mv "$place.new" "$place"
        fi
        touch "$place"
        # Of a cache on another file system, copies.
        cp -al "$place" "$venv.new" 2>/dev/null || { rm -rf "$venv.new" && cp -a "$place" "$venv.new"; }
        remove_old_environments "$kept"
    else
        install_packages "$venv.new" "$extra"
    fi
    point_environment "$venv.new"
    touch "$venv.new/.shoal-$key$extra"
    [ ! -e "$venv" ] || mv "$venv" "$venv.old"
    mv "$venv.new" "$venv"
    rm -rf "$venv.old"
}

# install_packages PLACE EXTRA: a new virtual environment. Compiled is what is imported, by importing it: of all files of
# all packages, that is one in three.
install_packages() {
    local place=$1 extra=$2
    rm -rf "$place"
    python3 -m venv "$place"
    "$place/bin/pip" install -q --disable-pip-version-check --no-compile -e "$root$extra"
    printf '%s\n%s\n' "$place" "$root" >"$place/.made-for"
    env -u PYTHONDONTWRITEBYTECODE "$place/bin/python" - <<'END'
import contextlib, importlib

for name in (
    "shoal.cli.app", "httpx", "pip._internal.cli.main", "pytest", "xdist.remote", "xdist.dsession",
    "pytest_asyncio", "pytest_timeout", "hypothesis", "starlette.applications", "uvicorn", "google.auth.crypt",
    "nebius.sdk", "numpy.random", "webdataset", "lmdb", "torch.distributed.run", "torch._dynamo", "torch.utils.data",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.nn.parallel",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
END
}

# point_environment PLACE: have files that name an environment's directory, or Shoal's, name those of this checkout.
point_environment() {
    local place=$1 made_in made_for site
    { read -r made_in && read -r made_for; } <"$place/.made-for"
    site=$(echo "$place"/lib/python3*/site-packages)
    # sed writes a new file: the linked one stays as it is.
    sed -i "s|$made_for|$root|g" "$site"/*shoal*.pth "$site"/shoal-*.dist-info/direct_url.json
    grep -rlI -F "$made_in" "$place/bin" "$place/pyvenv.cfg" | xargs -d '\n' sed -i "s|$made_in|$venv|g"
}

# remove_old_environments PLACE: all but the three that were used last. Checkouts keep their hard links.
remove_old_environments() {
    find "$1" -mindepth 1 -maxdepth 1 -type d ! -name '*.new' -printf '%T@ %p\n' | sort -rn | tail -n +4 |
        cut -d' ' -f2- | xargs -r -d '\n' rm -rf
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
