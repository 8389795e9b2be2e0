"""The end of a machine that never becomes a node: what it is told to do when it boots, in case nobody comes for it.

A node has a watchdog, which comes with joining. Until then this stands in for it: a machine that has none an hour after
it should have been a node shuts itself down. It needs neither the controller nor the provider for that.
"""

from __future__ import annotations

from shoal.providers.rental import Abilities
from shoal.roles.watchdog import CONTAINER_OFF, POWEROFF, SILENT_SECONDS, UNITS, WATCHDOG

UNIT = "shoal-unclaimed"


def boot_script(abilities: Abilities, lifetime: int) -> str:
    """What the provider is to have a machine run when it boots; nothing where it runs nothing for us.

    No secret is in it: providers show such scripts in their consoles, and machines to whoever is on them.
    """
    if abilities.boots_with == "none":
        return ""
    expected = min(abilities.boot_seconds, lifetime) if lifetime else abilities.boot_seconds
    if abilities.container:
        return container_script(expected + SILENT_SECONDS)
    return machine_script(expected + SILENT_SECONDS)


def machine_script(seconds: int, units: str = UNITS, watchdog: str = WATCHDOG, systemctl: str = "systemctl") -> str:
    """By a timer of systemd's, so that it is there again after the machine was started again."""
    return f"""#!/bin/sh
# Written by shoal: this machine shuts itself down if it does not become a node of its cluster.
cat > {units}/{UNIT}.service <<'end'
[Unit]
Description=Shuts this rented machine down, which was to become a node and did not
ConditionPathExists=!{watchdog}

[Service]
Type=oneshot
ExecStart={POWEROFF}
end
cat > {units}/{UNIT}.timer <<'end'
[Unit]
Description=Waits for this rented machine to become a node

[Timer]
OnBootSec={seconds}

[Install]
WantedBy=timers.target
end
{systemctl} daemon-reload
{systemctl} enable {UNIT}.timer
{systemctl} start --no-block {UNIT}.timer
"""


def container_script(seconds: int, off: str = CONTAINER_OFF, watchdog: str = WATCHDOG) -> str:
    """By a process that waits. One that is started again waits again."""
    return f"""#!/bin/sh
# Written by shoal: this container ends if it does not become a node of its cluster.
(
    sleep {seconds}
    [ -e {watchdog} ] || {off}
) > /dev/null 2>&1 &
"""
