"""Names: every member resolves every other without DNS, and itself as the others do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MARK = "#shoal "
"""Before a line of `/etc/hosts` that we have put out of force."""
REST = " #shoal: the rest of the line above"
"""After a line that stands for one of those, as far as it said what `localhost` is."""


def hosts_block(addresses: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> str:
    """The lines of `/etc/hosts` that name the members; `aliases` are further names, by the member's."""
    width = max((len(address) for address in addresses.values()), default=0)
    names = {name: f"{name} {alias}" for name, alias in (aliases or {}).items()}
    return "".join(f"{address:<{width}}  {names.get(name, name)}\n" for name, address in addresses.items() if address)


def addresses_in(hosts: str, block: str) -> dict[str, str]:
    """The addresses that an earlier run wrote into the named block of `/etc/hosts`, by name."""
    inside = hosts.partition(f"# BEGIN shoal {block}\n")[2].partition(f"# END shoal {block}\n")[0]
    lines = [line.split() for line in inside.splitlines()]
    return {words[1]: words[0] for words in lines if len(words) > 1}


def own_names(hosts: str, block: str, names: Iterable[str], address: str) -> tuple[str, ...]:
    """The lines of `/etc/hosts` that give the host's own names another address than its one on our network.

    Debian puts the host's name beside 127.0.1.1, and programs that ask for their own name would listen there.
    """
    wanted, inside, found = {name.lower() for name in names}, False, []
    for line in hosts.splitlines():
        inside = line == f"# BEGIN shoal {block}" or (inside and line != f"# END shoal {block}")
        words = line.partition("#")[0].lower().split()
        if not inside and words and words[0] != address and wanted.intersection(words[1:]):
            found.append(line)
    return tuple(found)


def own_name_rule(block: str, names: Iterable[str]) -> str:
    """For `sed -E`: such lines are put out of force. What they say of `localhost` a line goes on to say."""
    words = "|".join(name.replace(".", "[.]") for name in dict.fromkeys(names))
    return (
        f"/^# BEGIN shoal {block}$/,/^# END shoal {block}$/ b\n"
        f"/^[0-9a-fA-F.:]+[[:blank:]]+([^#]*[[:blank:]])?({words})([[:blank:]#]|$)/I! b\n"
        "h\n"
        f"s/^/{MARK}/\n"
        "/[[:blank:]](ip6-)?localhost/! b\n"
        "p\n"
        "g\n"
        "s/[[:blank:]]*#.*//\n"
        ":next\n"
        f"s/[[:blank:]]+({words})([[:blank:]]|$)/\\2/I\n"
        "t next\n"
        f"s/$/{REST}/\n"
    )


def names_program(hosts: str, block: str, kept: str, rule: str) -> str:
    """Puts the members' names back, of which `kept` is a copy, where somebody wrote the file again; and the rule."""
    return (
        "#!/bin/sh\n"
        "# Written by shoal; changes here are lost.\n"
        f"grep -qx '# BEGIN shoal {block}' {hosts} || {{\n"
        f"    echo '# BEGIN shoal {block}'\n"
        f"    cat {kept}\n"
        f"    echo '# END shoal {block}'\n"
        f"}} >> {hosts}\n"
        f"exec sed -i -E -f /dev/stdin {hosts} << 'END'\n{rule}END\n"
    )


def names_unit(program: str) -> str:
    """Runs the program at boot, once cloud-init has written `/etc/hosts`, which it does on many images every time."""
    return (
        "# Written by shoal; changes here are lost.\n"
        "[Unit]\n"
        "Description=Names of the cluster's members in /etc/hosts\n"
        "After=cloud-init.service cloud-init-network.service\n"
        "Before=munge.service slurmdbd.service slurmctld.service slurmd.service\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        "RemainAfterExit=yes\n"
        f"ExecStart=/bin/sh {program}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )
