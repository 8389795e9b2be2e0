"""What Shoal's roles do, as a pyinfra deploy: hosts that end in the same state, in the same order."""

import base64
import io
import json
import os
from pathlib import Path

import pyinfra
from gevent.lock import RLock
from pyinfra import host, inventory
from pyinfra.api import FactBase
from pyinfra.operations import apt, files, server, systemd
from pyinfra.operations.util import any_changed

inputs = json.loads(Path(os.environ["CONVERGE_INPUTS"]).read_text())
role = "controller" if "controller" in host.groups else "compute"
NODES_READY = "scontrol ping >/dev/null && ! sinfo --noheader --Node --format=%T | grep -qvxE 'idle|mixed|allocated'"


class MungeKey(FactBase):
    """The controller's munge key. pyinfra decides what to do before it does anything, so the key is made here."""

    def command(self):
        # All hosts ask at once; a link is made whole or not at all, so that every one of them reads the same key.
        key, own = "/etc/munge/munge.key", "/etc/munge/munge.key.$$"
        make = f"umask 077; mkdir -p /etc/munge; head -c 1024 /dev/urandom >{own}; ln {own} {key} 2>/dev/null; rm {own}"
        return f"test -s {key} || {{ {make}; }}; base64 -w0 {key}"

    def process(self, output):
        return base64.b64decode("".join(output))


class NodesReady(FactBase):
    """Whether Slurm sees every node; no where there is no Slurm yet."""

    def command(self):
        return f"if {NODES_READY}; then echo yes; else echo no; fi 2>/dev/null"

    def process(self, output):
        return "yes" in list(output)


def ask_controller(fact):
    """A fact of the controller, asked once for all hosts: sshd allows ten sessions on a connection at a time."""
    # This file runs once for each host, all at the same time; what they share hangs on a module.
    with vars(pyinfra).setdefault("_converge_lock", RLock()):
        return inventory.get_host(inputs["controller"]).get_fact(fact)


def put(name, path):
    """One of our files, owned by root and readable by all."""
    source = str(Path(inputs["files"], Path(path).name))
    return files.put(name=name, src=source, dest=path, user="root", group="root", mode="644")


def directory(path, owner="root", mode="755"):
    files.directory(name=f"Directory {path}", path=path, user=owner, group=owner, mode=mode)


# ---- every member

for account in inputs["accounts"]:
    server.group(name=f"Group {account['name']}", group=account["name"], gid=account["gid"], system=True)
    server.user(  # noqa: S604 - `shell` is the login shell
        name=f"User {account['name']}",
        user=account["name"],
        uid=account["uid"],
        group=account["name"],
        home=account["home"],
        shell="/usr/sbin/nologin",
        ensure_home=False,
        create_home=False,
        system=True,
    )

apt.packages(name="Packages", packages=inputs["packages"][role], no_recommends=True)
for link in inputs["links"][role]:
    files.link(name="PMIx under the name that Slurm asks for", path=link["path"], target=link["target"])

directory("/etc/munge", "munge", "700")
key = files.put(
    name="The same munge key everywhere",
    src=io.BytesIO(ask_controller(MungeKey)),
    dest="/etc/munge/munge.key",
    user="munge",
    group="munge",
    mode="400",
)
systemd.service(name="Restart munge", service="munge", restarted=True, _if=key.did_change)
systemd.service(name="munge runs", service="munge", running=True, enabled=True)

files.block(
    name="The names of the members",
    path="/etc/hosts",
    content=inputs["members"].rstrip("\n"),
    marker="# {mark} shoal members",
)

directory("/etc/shoal")
rules = put("The firewall", "/etc/shoal/firewall.nft")
unit = put("The firewall's unit", "/etc/systemd/system/shoal-firewall.service")
systemd.service(
    name="Restart the firewall",
    service="shoal-firewall",
    restarted=True,
    daemon_reload=True,
    _if=any_changed(rules, unit),
)
systemd.service(name="The firewall is on", service="shoal-firewall", running=True, enabled=True)

# ---- the controller

if role == "controller":
    directory("/etc/slurm")
    directory("/var/log/slurm", "slurm")
    directory("/var/lib/slurm/slurmctld", "slurm", "700")
    put("How the records of jobs are rotated", "/etc/logrotate.d/shoal-jobcomp")
    configuration = [put(name, f"/etc/slurm/{name}") for name in ("cgroup.conf", "gres.conf", "slurm.conf")]
    configuration.append(files.file(name="No topology", path="/etc/slurm/topology.conf", present=False))
    systemd.service(
        name="Restart slurmctld",
        service="slurmctld",
        restarted=True,
        _if=any_changed(*configuration),
    )
    systemd.service(name="slurmctld runs", service="slurmctld", running=True, enabled=True)

# ---- the nodes

if role == "compute":
    directory("/etc/systemd/system/slurmd.service.d")
    directory("/var/log/slurm", "slurm")
    directory("/var/lib/slurm/slurmd")
    defaults = put("How slurmd starts", "/etc/default/slurmd")
    drop_in = put("What its unit lacks", "/etc/systemd/system/slurmd.service.d/shoal.conf")
    put("What a node forgets at boot", "/etc/tmpfiles.d/shoal-slurmd.conf")
    for name in ("slurm.conf", "gres.conf", "cgroup.conf", "topology.conf"):
        files.file(name=f"No {name} of its own", path=f"/etc/slurm/{name}", present=False)
    devices = put("Who may open the GPUs", "/etc/udev/rules.d/90-shoal-nvidia.rules")
    server.shell(
        name="Load the device rules",
        commands="test ! -e /run/udev/control || { udevadm control --reload && udevadm trigger; }",
        _if=devices.did_change,
    )
    systemd.service(
        name="Restart slurmd",
        service="slurmd",
        restarted=True,
        daemon_reload=True,
        _if=any_changed(defaults, drop_in),
    )
    systemd.service(name="slurmd runs", service="slurmd", running=True, enabled=True)

# ---- the cluster

if not ask_controller(NodesReady):
    wait = f"for _ in $(seq 120); do if {NODES_READY}; then exit 0; fi; sleep 0.5; done; exit 1"
    # Named by all hosts, so that it comes after what each of them does; run by the controller.
    server.shell(name="Every node has registered", commands=wait, _if=lambda: role == "controller")
