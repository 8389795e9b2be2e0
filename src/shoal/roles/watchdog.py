"""The watchdog of a rented machine.

It shuts the machine down when the controller is gone, when Slurm has released the node, or when its time is over. Some
providers still bill a machine that is shut down.
"""

from __future__ import annotations

from shoal.agent.document import Directory, Document, File, Service, render_unit
from shoal.remote import program_text

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
    service = render_unit(
        Unit={"Description": "Looks whether this rented machine is still wanted"},
        Service={"Type": "oneshot", "ExecStart": WATCHDOG},
    )
    timer = render_unit(
        Unit={"Description": "Looks every minute whether this rented machine is still wanted"},
        Timer={"OnActiveSec": 60, "OnUnitActiveSec": 60, "AccuracySec": 5},
        Install={"WantedBy": "timers.target"},
    )
    units = (File(f"{UNITS}/shoal-watchdog.service", service), File(f"{UNITS}/{TIMER}", timer, restarts=(TIMER,)))
    return (*program, *units, Service(TIMER))


def script(node: str, until: int, off: str = POWEROFF, marks: str = "/run/shoal-watchdog") -> str:
    """Checks once whether the machine is still needed, and shuts it down with the command `off` when it is not."""
    timeouts = {"CONTROLLER_TIMEOUT_S": CONTROLLER_TIMEOUT_S, "RELEASE_TIMEOUT_S": RELEASE_TIMEOUT_S}
    return program_text("watchdog.sh", NODE=node, UNTIL=until, POWEROFF=off, MARKS=marks, **timeouts)
