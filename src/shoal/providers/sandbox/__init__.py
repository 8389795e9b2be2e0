"""The sandbox: real Debian hosts (systemd, sshd) as light containers on this one machine.

Read `provider.py` first; it uses the other files in this order: `images.py` (what a host is made of), `network.py`
(bridges and NAT), `machine.py` (one host), `faults.py` (breaking it on purpose). `layout.py` holds every name and path.
"""
