"""The sandbox: real Debian hosts (systemd, sshd) as light containers on this machine.

Read `provider.py` first: it uses `checks` (prerequisites), `images`, `network`, `seed` (a host's files) and `nspawn`
(start, stop); `layout` has every name and path. May import `hosts`, `spec`, `remote` and `errors`.
"""
