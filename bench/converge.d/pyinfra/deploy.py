"""What Shoal's roles do, as a pyinfra deploy, in the same order and with the same result."""

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
    """The controller's munge key. pyinfra reads all facts before it changes anything, so the key is created here."""

    def command(self):
        # All hosts ask at the same time. A link is atomic, so all of them read the same key.
        key, own = "/etc/munge/munge.key", "/etc/munge/munge.key.$$"
        make = f"umask 077; mkdir -p /etc/munge; head -c 1024 /dev/urandom >{own}; ln {own} {key} 2>/dev/null; rm {own}"
        return f"test -s {key} || {{ {make}; }}; base64 -w0 {key}"

    def process(self, output):
        return base64.b64decode("".join(output))


class NodesReady(FactBase):
    """Whether every node has registered; false if Slurm is not installed yet."""

    def command(self):
        return f"if {NODES_READY}; then echo yes; else echo no; fi 2>/dev/null"

    def process(self, output):
        return "yes" in list(output)


def ask_controller(fact):
    """A fact of the controller, read once for all hosts: sshd allows ten sessions on a connection."""
    # This file runs once for each host, all at the same time; a module attribute is shared by all of them.
    with vars(pyinfra).setdefault("_converge_lock", RLock()):
        return inventory.get_host(inputs["controller"]).get_fact(fact)


def put(name, path, folder="", mode="644"):
    """A file that is owned by root. Files that differ between hosts are in a folder with the name of the host."""
    source = str(Path(inputs["files"], folder, Path(path).name))
    return files.put(name=name, src=source, dest=path, user="root", group="root", mode=mode)


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

files.block(
    name="The host keys of the members",
    path="/etc/ssh/ssh_known_hosts",
    content=inputs["host_keys"].rstrip("\n"),
    marker="# {mark} shoal members",
)

directory("/etc/shoal")
put("The cluster that the host belongs to", "/etc/shoal/member.json")
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
    directory("/etc/systemd/system/slurmctld.service.d")
    address = put(
        "slurmctld waits for the address", "/etc/systemd/system/slurmctld.service.d/shoal-address.conf", host.name
    )
    put("Rotation of the job records", "/etc/logrotate.d/shoal-jobcomp")
    configuration = [put(name, f"/etc/slurm/{name}") for name in ("cgroup.conf", "gres.conf", "slurm.conf")]
    configuration.append(files.file(name="No topology", path="/etc/slurm/topology.conf", present=False))
    systemd.service(
        name="Restart slurmctld",
        service="slurmctld",
        restarted=True,
        daemon_reload=True,
        _if=any_changed(address, *configuration),
    )
    systemd.service(name="slurmctld runs", service="slurmctld", running=True, enabled=True)
    directory("/usr/local/lib/shoal")
    check = "shoal-returning-nodes"
    program = put("The check for nodes that return", "/usr/local/lib/shoal/returning-nodes", mode="755")
    unit = put("The unit of that check", f"/etc/systemd/system/{check}.service")
    systemd.service(
        name="Restart the check for nodes that return",
        service=check,
        restarted=True,
        daemon_reload=True,
        _if=any_changed(program, unit),
    )
    systemd.service(name="The check for nodes that return runs", service=check, running=True, enabled=True)
    put("The description for users", "/etc/shoal/cluster.json")

# ---- the nodes

if role == "compute":
    directory("/etc/systemd/system/slurmd.service.d")
    directory("/var/log/slurm", "slurm")
    directory("/var/lib/slurm/slurmd")
    for path in ("/var/lib/shoal", "/var/lib/shoal/health", "/usr/local/lib/shoal", "/usr/local/lib/shoal/node_health"):
        directory(path)
    modules = ("node", "host_checks", "gpu_checks", "gpu_driver", "gpu_test", "leftovers", "job_stacks", "training")
    for name in (*modules, "hung_job", "main"):
        put(f"The health program: {name}", f"/usr/local/lib/shoal/node_health/{name}.py")
    put("The hook of the health program", "/usr/local/lib/shoal/health-hook", mode="755")
    put("The configuration of the health program", "/etc/shoal/health.json")
    unit = put("The unit of the health program", "/etc/systemd/system/shoal-health.service")
    timer = put("The timer of the health program", "/etc/systemd/system/shoal-health.timer")
    systemd.service(
        name="Restart the timer of the health program",
        service="shoal-health.timer",
        restarted=True,
        daemon_reload=True,
        _if=any_changed(unit, timer),
    )
    systemd.service(name="The health program runs", service="shoal-health.timer", running=True, enabled=True)
    defaults = put("Options of slurmd", "/etc/default/slurmd")
    drop_in = put("Additions to its unit", "/etc/systemd/system/slurmd.service.d/shoal.conf")
    address = put("slurmd waits for the address", "/etc/systemd/system/slurmd.service.d/shoal-address.conf", host.name)
    put("Files that a node removes at boot", "/etc/tmpfiles.d/shoal-slurmd.conf")
    for name in ("slurm.conf", "gres.conf", "cgroup.conf", "topology.conf"):
        files.file(name=f"No local {name}", path=f"/etc/slurm/{name}", present=False)
    devices = put("Device rules of the GPUs", "/etc/udev/rules.d/90-shoal-nvidia.rules")
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
        _if=any_changed(defaults, drop_in, address),
    )
    systemd.service(name="slurmd runs", service="slurmd", running=True, enabled=True)

# ---- the cluster

if not ask_controller(NodesReady):
    wait = f"for _ in $(seq 120); do if {NODES_READY}; then exit 0; fi; sleep 0.5; done; exit 1"
    # Declared on all hosts, so that it comes after their operations; only the controller runs it.
    server.shell(name="Every node has registered", commands=wait, _if=lambda: role == "controller")
