"""The sandbox: real Debian hosts (systemd, sshd) on this machine: containers, virtual machines, or under an engine.

Read `provider.py` first: it uses `checks` (prerequisites), `images`, `network`, `seed` (a host's files), `nspawn` and
`vm` (start a container, a virtual machine) and `lifecycle` (state, end). `vm_disk` and `qemu` have what virtual
machines need; `engine`, `engine_image`, `engine_hosts` and `engine_checks` are hosts under a container engine; `layout`
has every name and path. May import `hosts`, `spec`, `remote` and `errors`.
"""
