"""The first boot of a simulated machine: its login user and key, the script of the order, and GPUs that do not work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shoal.spec.member import Shape
from shoal_simulators.instances import Profile, SimulatedInstance

FIRST_BOOT = """\
[Unit]
Description=The login user of this machine, and its key
Before=ssh.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/shoal-first-boot
"""
FIRST_BOOT_PROGRAM = """\
#!/bin/sh
set -eu
user=$(cat /etc/shoal-cloud/user)
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
home=$(getent passwd "$user" | cut -d: -f6)
install -d -m 0700 -o "$user" -g "$user" "$home/.ssh"
install -m 0600 -o "$user" -g "$user" /etc/shoal-cloud/authorized_keys "$home/.ssh/authorized_keys"
if [ "$user" != root ]; then
    echo "$user ALL=(ALL) NOPASSWD: ALL" > /etc/sudoers.d/90-cloud
    chmod 0440 /etc/sudoers.d/90-cloud
fi
"""
USER_DATA = """\
[Unit]
Description=The script that this machine was ordered with
After=network.target ssh.service
ConditionPathExists=!/var/lib/shoal-user-data-ran

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=/usr/bin/touch /var/lib/shoal-user-data-ran
ExecStart=/etc/shoal-cloud/user-data
"""
BROKEN_SMI = b"""\
#!/bin/sh
echo "Unable to determine the device handle for GPU0000:00:05.0: Unknown Error" >&2
exit 15
"""
NO_DEVICE = os.makedev(240, 0)
"""A device number without a driver: opening it fails with ENXIO, as for a GPU that fell off its bus."""


def first_boot_files(ordered: SimulatedInstance, profile: Profile, shape: Shape) -> dict[str, tuple[bytes, int]]:
    """The files that make a host the ordered machine at its first boot."""
    files: dict[str, tuple[bytes, int]] = {}
    if not ordered.gpu_works and shape.gpus:
        files["usr/bin/nvidia-smi"] = (BROKEN_SMI, 0o755)
    if shape.container:
        return files
    files |= {
        "etc/shoal-cloud/user": (f"{profile.user}\n".encode(), 0o644),
        "etc/shoal-cloud/authorized_keys": (authorized_keys(ordered).encode(), 0o644),
        "usr/local/lib/shoal-first-boot": (FIRST_BOOT_PROGRAM.encode(), 0o755),
        "etc/systemd/system/shoal-first-boot.service": (FIRST_BOOT.encode(), 0o644),
        "etc/systemd/system/ssh.service.d/cloud.conf": (
            b"[Unit]\nWants=shoal-first-boot.service\nAfter=shoal-first-boot.service\n",
            0o644,
        ),
    }
    if ordered.order.user_data and ordered.runs_user_data:
        files["etc/shoal-cloud/user-data"] = (ordered.order.user_data.encode(), 0o700)
        files["etc/systemd/system/shoal-user-data.service"] = (USER_DATA.encode(), 0o644)
        files["etc/systemd/system/multi-user.target.d/cloud.conf"] = (
            b"[Unit]\nWants=shoal-user-data.service\n",
            0o644,
        )
    return files


def authorized_keys(ordered: SimulatedInstance) -> str:
    return "".join(f"{key.strip()}\n" for key in ordered.order.public_keys)


def break_devices(where: Path) -> None:
    """Replace every GPU device of a host by one that cannot be opened."""
    for path in where.glob("nvidia*"):
        path.unlink()
        os.mknod(path, 0o666 | stat.S_IFCHR, NO_DEVICE)
        path.chmod(0o666)
