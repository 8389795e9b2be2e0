"""The watchdog of a rented machine.

It shuts the machine down when the controller is gone, when Slurm has released the node, or when its time is over. Some
providers still bill a machine that is shut down.
"""

from __future__ import annotations

from shoal.agent.document import HEADER, Directory, Document, File, Service, render_unit

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
