"""What only rented machines have: a check of their GPUs before they take jobs, and a watchdog.

The watchdog shuts the machine down when the controller is gone, when Slurm has released the node, or when its time is
over. Some providers still bill a machine that is shut down.
"""

from __future__ import annotations

from shoal.agent.document import Directory, Document, File, Service
from shoal.agent.units import HEADER, render_unit

DIRECTORY = "/usr/local/lib/shoal"
WATCHDOG = f"{DIRECTORY}/watchdog"
TIMER = "shoal-watchdog.timer"
UNITS = "/etc/systemd/system"
CONTROLLER_TIMEOUT_S = 3600
"""After this silence of the controller the machine shuts down."""
RELEASE_TIMEOUT_S = 900
"""The same for a node that Slurm has suspended, or does not know any more."""
POWEROFF = "systemctl poweroff"
CONTAINER_POWEROFF = "kill -TERM 1"
"""A container without systemd stops with its first process."""

HEALTH = r"""
import subprocess, sys
wanted = int(sys.argv[1])
if not wanted:
    sys.exit(0)
def smi(*fields):
    query = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
    if done.returncode:
        return None, (done.stderr or done.stdout).strip()
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()], ""
try:
    cards, said = smi("index", "name", "memory.total")
except (OSError, subprocess.SubprocessError) as error:
    sys.exit("nvidia-smi does not run: %s" % error)
if cards is None:
    sys.exit("nvidia-smi: " + said.replace("\n", " "))
if len(cards) < wanted:
    sys.exit("%d GPUs were promised, and there are %d" % (wanted, len(cards)))
for card in cards:
    if not card[2].isdigit() or int(card[2]) <= 0:
        sys.exit("GPU %s (%s) tells no memory: %s" % tuple(card))
errors, _ = smi("index", "ecc.errors.uncorrected.volatile.total")  # not every card counts them
for card in errors or ():
    if len(card) > 1 and card[1].isdigit() and int(card[1]) > 0:
        sys.exit("GPU %s has %s uncorrected memory errors" % tuple(card[:2]))
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    if all(card[1] == "Simulated GPU" for card in cards):
        sys.exit(0)  # as sandbox hosts have them
    sys.exit("nvidia-smi answers, and CUDA's driver cannot be loaded: %s" % error)
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        sys.exit("%s: CUDA error %d, %s" % (name, code, (text.value or b"unknown").decode()))
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
if count.value < wanted:
    sys.exit("%d GPUs were promised, and CUDA sees %d" % (wanted, count.value))
for number in range(count.value):
    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    if free.value * 10 < total.value * 9:
        sys.exit("GPU %d has only %d of %d MiB free" % (number, free.value >> 20, total.value >> 20))
    call("cuCtxDestroy_v2", context)
"""
"""Checks that so many GPUs work. Prints one line for a problem, and nothing otherwise."""


def health_command(gpus: int) -> tuple[str, ...]:
    """The command that checks a machine for this many working GPUs."""
    return ("python3", "-I", "-c", HEALTH, str(gpus))


def watchdog(node: str, until: int, *, systemd: bool = True) -> Document:
    """The watchdog of a node. `until` is when its time is over, as a Unix time; 0 is never."""
    off = POWEROFF if systemd else CONTAINER_POWEROFF
    program = (Directory(DIRECTORY), File(WATCHDOG, script(node, until, off), mode=0o755))
    if not systemd:
        loop = f"while :; do sleep 60; {WATCHDOG}; done"
        return (*program, Service("shoal-watchdog", command=("/bin/sh", "-c", loop)))
    return (
        *program,
        File(f"{UNITS}/shoal-watchdog.service", _service()),
        File(f"{UNITS}/{TIMER}", _timer(), restarts=(TIMER,)),
        Service(TIMER),
    )


def script(node: str, until: int, off: str = POWEROFF, marks: str = "/run/shoal-watchdog") -> str:
    """Checks once whether the machine is still needed, and shuts it down with the command `off` when it is not."""
    return rf"""#!/bin/sh
{HEADER}now=$(date +%s)
mkdir -p {marks}
since() {{ cat "{marks}/$1" 2>/dev/null || echo "$now" | tee "{marks}/$1"; }}
end() {{
    echo "this machine is shut down: $1"
    {off}
    exit 0
}}
if [ {until} -gt 0 ] && [ "$now" -ge {until} ]; then end "its time is over"; fi
if state=$(timeout 30 scontrol show node {node} -o 2>&1); then
    rm -f {marks}/silent
    case "$state" in
    *State=*POWERED_DOWN* | *State=*POWERING_DOWN*) ;;
    *State=*)
        rm -f {marks}/let-go
        exit 0
        ;;
    esac
elif echo "$state" | grep -q "not found"; then
    rm -f {marks}/silent
else
    [ $((now - $(since silent))) -lt {CONTROLLER_TIMEOUT_S} ] || end "the controller does not answer"
    exit 0
fi
[ $((now - $(since let-go))) -lt {RELEASE_TIMEOUT_S} ] || end "Slurm has let go of {node}"
"""


def _service() -> str:
    return render_unit(
        Unit={"Description": "Looks whether this rented machine is still wanted"},
        Service={"Type": "oneshot", "ExecStart": WATCHDOG},
    )


def _timer() -> str:
    return render_unit(
        Unit={"Description": "Looks every minute whether this rented machine is still wanted"},
        Timer={"OnActiveSec": 60, "OnUnitActiveSec": 60, "AccuracySec": 5},
        Install={"WantedBy": "timers.target"},
    )
