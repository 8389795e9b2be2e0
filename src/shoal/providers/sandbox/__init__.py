"""The sandbox: real Debian hosts (systemd, sshd) as light containers on this one machine.

Read `provider.py` first; it uses the other files in this order: `checks.py` (can it be done here), `images.py` (what a
host is made of), `network.py` (bridges and NAT), `seed.py` (what makes a host itself), `machine.py` (starting and
stopping it), `faults.py` (breaking it on purpose). `layout.py` holds every name and path.
"""
