"""SSH from node to node: the host keys of all members, and logins without a password where a user has a job.

A node vouches for its users with its host key (host-based authentication). This holds for the users of the spec only,
never for root, and only to nodes. There `pam_slurm_adopt` admits users with a job; on a node that is open for logins,
such as a controller that computes, a session program does. Without cgroups there is neither, and the logins stay off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shoal.agent.document import HEADER, Block, Directory, Document, File, Item
from shoal.agent.facts import Facts
from shoal.network.tunnel import HOST_KEYS
from shoal.remote import program_text
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.shares import reload_sshd, sshd_file
from shoal.spec.finding import Finding
from shoal.spec.member import Member

KNOWN_HOSTS, EQUIV, BLOCK = "/etc/ssh/ssh_known_hosts", "/etc/ssh/shosts.equiv", "members"
SSH_CONF = "/etc/ssh/ssh_config.d/10-shoal-nodes.conf"
SSHD_CONF = "/etc/ssh/sshd_config.d/10-shoal-nodes.conf"
KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-")
PROGRAM = "/usr/local/lib/shoal/node_login"


class NodeLoginsComponent(Component):
    """What a host knows about the others' SSH."""

    files: Mapping[str, FileQuery] = dict.fromkeys((KNOWN_HOSTS, *HOST_KEYS), "text")

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        return {Stage.BASE: neighbour_key_items(cluster, member)}

    def removal(self) -> Document:
        return (
            sshd_file(SSHD_CONF, None),
            reload_sshd(),
            Block(EQUIV, BLOCK, ""),
            File(SSH_CONF),
            File(PROGRAM),
            Block(KNOWN_HOSTS, BLOCK, ""),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        if not cluster.spec.users or not cluster.conf.nodes or allows_node_logins(cluster):
            return ()
        what = "SSH from node to node needs a key of the user: host-based logins are off"
        cause = "not all hosts let Slurm use cgroups, and pam_slurm_adopt needs them"
        return (Finding("info", what, cause, path="users"),)


def neighbour_key_items(cluster: Cluster, member: Member) -> Document:
    """Items that change when another host joins or leaves: its keys, and whether its word counts."""
    client = ssh_conf(cluster) if allows_node_logins(cluster) else None
    return (
        Block(KNOWN_HOSTS, BLOCK, known_hosts(cluster)),
        Block(EQUIV, BLOCK, equiv(cluster) if accepts_node_logins(cluster, member) else ""),
        File(SSH_CONF, client),
    )


def allows_node_logins(cluster: Cluster) -> bool:
    return bool(cluster.spec.users) and cluster.conf.confinement.tracked


def accepts_node_logins(cluster: Cluster, member: Member) -> bool:
    """Whether the member accepts logins from other nodes."""
    return allows_node_logins(cluster) and "compute" in member.roles and member.name in cluster.addresses


def known_hosts(cluster: Cluster) -> str:
    """The host keys of all members with an address, as read over the operator's connection to each.

    A host that does not answer keeps its lines: the controller has them.
    """
    before = recorded_keys(cluster.controller_facts)
    lines: list[str] = []
    for name, address in sorted(cluster.addresses.items()):
        if name in cluster.facts:
            lines += [f"{name},{address} {key}" for key in host_keys(cluster.facts[name])]
        else:
            lines += [f"{name},{address} {key}" for key in before.get(name, ())]
    return "".join(f"{line}\n" for line in lines)


def host_keys(facts: Facts) -> list[str]:
    """A host's public keys, without comments."""
    words = (facts.text(path).split() for path in HOST_KEYS)
    return [" ".join(key[:2]) for key in words if len(key) >= 2 and key[0].startswith(KEY_TYPES)]


def recorded_keys(facts: Facts) -> dict[str, list[str]]:
    """The keys in our block on a host, by member."""
    keys: dict[str, list[str]] = {}
    block = facts.text(KNOWN_HOSTS).partition(f"# BEGIN shoal {BLOCK}\n")[2].partition(f"# END shoal {BLOCK}\n")[0]
    for line in block.splitlines():
        names, _, key = line.partition(" ")
        keys.setdefault(names.partition(",")[0], []).append(key)
    return keys


def equiv(cluster: Cluster) -> str:
    """The hosts whose word counts, by address and by name. A line without a user is for the same user name only."""
    return "".join(f"{address}\n{name}\n" for name, address in sorted(cluster.addresses.items()))


def ssh_conf(cluster: Cluster) -> str:
    """The client's settings. `ssh-keysign` reads its own only outside of `Host`."""
    nodes = {node.name for node in cluster.conf.nodes} & cluster.addresses.keys()
    hosts = " ".join(word for name in sorted(nodes) for word in (name, cluster.addresses[name]))
    if not hosts:
        return HEADER
    return f"{HEADER}EnableSSHKeysign yes\nHost {hosts}\n    HostbasedAuthentication yes\n"


def sshd_conf(users: Iterable[str]) -> str:
    return (
        f"{HEADER}Match User {','.join(sorted(users))}\n"
        "    HostbasedAuthentication yes\n"
        "    HostbasedUsesNameFromPacketOnly no\n"
        "    IgnoreRhosts yes\n"
    )


def server_items(cluster: Cluster, member: Member) -> Iterator[Item]:
    """What sshd accepts from other nodes, after the rules of PAM. The document reloads sshd afterwards."""
    accepts = accepts_node_logins(cluster, member)
    if accepts:
        yield Directory("/usr/local/lib/shoal")
    yield File(PROGRAM, program_text("node_login.sh", NODE=member.name) if accepts else None, mode=0o755)
    yield sshd_file(SSHD_CONF, sshd_conf(cluster.spec.users) if accepts else None)


def session_rules(group: str) -> str:
    """PAM rules of a node that is open for logins. A session that is not opened has no shell and no forwarding."""
    return (
        f"session [success=1 default=ignore] pam_succeed_if.so quiet user notingroup {group}\n"
        f"session required pam_exec.so quiet stdout {PROGRAM}\n"
        "session required pam_permit.so\n"
    )
