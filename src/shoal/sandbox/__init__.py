"""The sandbox: real Debian hosts (systemd, sshd) on this machine, as light containers or as virtual machines.

Read `provider.py` first: it uses `checks` (prerequisites), `images`, `network`, `seed` (a host's files), `nspawn` and
`vm` (start a container, a virtual machine) and `lifecycle` (state, end). `vm_disk` and `qemu` have what virtual
machines need; `layout` has every name and path. May import `hosts`, `spec`, `remote` and `errors`.
"""
