"""The variables of ranks: what torch, NCCL, gloo and MPI read from the environment."""

from __future__ import annotations

import contextlib
import os
import re

IMAGE = "SHOAL_IMAGE"
"""What the job's commands run in, as JSON; not set where that is the node itself."""
CONTAINER = "SHOAL_CONTAINER"
"""Inside an image: its name, or that of the container."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FIRST_PORT, PORTS = 10000, 20000
"""Ports for rendezvous: below those the kernel and srun give out. Jobs of one node have ids far closer than this."""
STEP_PORT = 12361
"""From a job's port to that of its first step, and on to the next: the golden section of PORTS, so that a hundred
steps of dozens of jobs with near ids have ports of their own."""
RANKS_OF = "SHOAL_RANKS_OF"
"""The step that our variables are of: a step that another one starts has that one's environment."""
VARIABLES = re.compile(
    "(GROUP_|NODE_|LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|SHOAL_SPAWN|TORCHELASTIC_.*"  # of any launcher
)
VPN_INTERFACES = ("shoal0", "tailscale0")
SIOCGIFADDR = 0x8915
NCCL_SETTINGS = "/etc/shoal/nccl.env"
"""What `shoal bench links` measured."""


def torch_variables(rank_from: str) -> None:
    """What torch reads from the environment, where the launcher has not set it."""
    rank = int(os.environ[rank_from])
    if rank_from.startswith("OMPI_"):  # Slurm's variables are those of the batch script, or of a daemon of mpirun
        local, world, here = (int(os.environ["OMPI_COMM_WORLD_" + n]) for n in ("LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
        node = rank // here
    else:
        nodes, world = (int(os.environ.get(name, "1")) for name in ("SLURM_NNODES", "SLURM_NTASKS"))
        local, node = (int(os.environ.get(name, "0")) for name in ("SLURM_LOCALID", "SLURM_NODEID"))
        here = world // nodes
    set_ranks(rank, world, local, here, node)


def set_ranks(rank: int, world: int, local: int, here: int, node: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
    for name, value in {**variables, "GROUP_RANK": node, "NODE_RANK": node}.items():
        os.environ.setdefault(name, str(value))
    os.environ[RANKS_OF] = own_step()


def own_step() -> str:
    return "%s.%s" % (os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", ""))


def forget_other_step() -> None:
    """Drop what we set for the task that started this step. What the user sets, or torchrun in this step, stays."""
    if os.environ.get(RANKS_OF, own_step()) != own_step():
        for name in filter(VARIABLES.fullmatch, list(os.environ)):
            del os.environ[name]


def step_variables(container: str = "") -> None:
    """The same for a task of plain `srun`, whose batch script is not Shoal's, and where the ranks meet.

    Slurm 22.05 does not tell a container which task it is. Its name, NODE.USER.JOB.STEP.TASK, does. Below a batch
    script the container then has the script's variables, those of task 0, on every node.
    """
    forget_other_step()
    get = os.environ.get
    nodes = expand(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST", ""))
    tasks = tasks_per_node(get("SLURM_STEP_TASKS_PER_NODE", "1"))
    rank, node, local = (int(get(name, "0")) for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"))
    if container:
        name, _, _, _, local_rank = container.rsplit(".", 4)
        place = nodes.index(name) if name in nodes else node
        if place != node or "SLURM_PROCID" not in os.environ:
            node, local = place, int(local_rank)
            rank = sum(tasks[:node]) + local
            values = {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURMD_NODENAME": name}
            os.environ.update({key: str(value) for key, value in values.items()})
    set_ranks(rank, sum(tasks), local, tasks[node] if node < len(tasks) else 1, node)
    meeting_variables(nodes, len(tasks))


def script_variables() -> None:
    """The same for a batch script: it is one process, whatever the job asks for."""
    forget_other_step()
    set_ranks(0, 1, 0, 1, 0)
    meeting_variables(expand(os.environ.get("SLURM_JOB_NODELIST", "")), 1)


def meeting_variables(nodes: list[str], count: int) -> None:
    """Where the ranks meet, and over a VPN the interface that leads there."""
    here = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    first = nodes[0] if nodes else here
    number = int(os.environ.get("SLURM_JOB_ID", "0"))
    number += (int(os.environ.get("SLURM_STEP_ID", "-1")) + 1) * STEP_PORT
    values = {"MASTER_ADDR": address_of(first), "MASTER_PORT": str(FIRST_PORT + number % PORTS)}
    if count > 1:
        interface = vpn_interface(address_of(here))
        values.update(vpn_variables(interface) if interface else {})
        with contextlib.suppress(OSError), open(NCCL_SETTINGS) as file:
            values.update(re.findall(r"^(\w+)=(\S*)$", file.read(), re.MULTILINE))
    for name, value in values.items():
        os.environ.setdefault(name, value)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` is 2, 2, 2, 1."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks or [1]


def expand(nodes: str) -> list[str]:
    """The names of a hostlist, as Slurm writes it: `n[01-02,7],m1` is n01, n02, n7, m1."""
    names: list[str] = []
    for prefix, ranges, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes):
        if not ranges:
            names.append(prefix + suffix)
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            names += [prefix + str(n).zfill(len(first)) + suffix for n in range(int(first), int(last or first) + 1)]
    return names


def address_of(name: str) -> str:
    """The address of a node in the cluster; its name where that is not known."""
    import socket

    with contextlib.suppress(OSError):
        return socket.gethostbyname(name)
    return name


def vpn_interface(address: str) -> str:
    """The interface of WireGuard or Tailscale that has this address; empty where it is another."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in VPN_INTERFACES:
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def vpn_variables(interface: str) -> dict[str, str]:
    """The same as in the batch script of `shoal run`."""
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
    values = dict.fromkeys((*names, "PRTE_MCA_oob_tcp_if_include", "UCX_NET_DEVICES"), interface)
    values["NCCL_SOCKET_IFNAME"] = "=" + interface
    values.update(NCCL_NET="Socket", NCCL_IB_DISABLE="1", NCCL_SOCKET_NTHREADS="4", NCCL_NSOCKS_PERTHREAD="4")
    values.update(OMPI_MCA_pml="ob1", OMPI_MCA_btl="^openib,ofi,uct", OMPI_MCA_osc="^ucx")
    return values
