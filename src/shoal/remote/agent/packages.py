"""Packages: which are there, which could be, and installing those that are missing."""

from __future__ import annotations

import os

from shoal.remote.agent.apt import have_package_lists, install, update_lists, wait_for_apt
from shoal.remote.agent.connection import Item
from shoal.remote.agent.context import ConvergeContext, ItemChange
from shoal.remote.agent.failure import Failure
from shoal.remote.agent.file_io import read_bytes, read_text, remove, write_atomic
from shoal.remote.agent.running import run, which

POLICY = "/usr/sbin/policy-rc.d"
POLICY_TEXT = (
    b"#!/bin/sh\n# Made by shoal: daemons start after they are configured, not while packages install.\nexit 101\n"
)


def check_packages(item: Item, context: ConvergeContext) -> ItemChange | None:
    manager = package_manager()
    if manager != "apt":
        raise Failure(
            f"this host's package manager is {manager}; Shoal installs packages with apt only (Debian, Ubuntu). "
            f"Install {' '.join(item['names'])} by hand, or use a host that has apt"
        )
    missing = missing_packages(item)
    return ItemChange(f"install {' '.join(missing)}") if missing else None


def make_packages(item: Item, context: ConvergeContext) -> str:
    policy_written = hold_daemons()
    try:
        install(missing_packages(item), context)
    finally:
        if policy_written:
            remove(POLICY)
    context.invalidate_units()
    return ""


def missing_packages(item: Item) -> list[str]:
    installed = installed_packages(item["names"])
    return [name for name in item["names"] if name not in installed]


def hold_daemons() -> bool:
    """Keep packages from starting their daemons half-configured. False when another policy is in place."""
    if os.path.exists(POLICY) and read_bytes(POLICY) != POLICY_TEXT:
        return False
    write_atomic(POLICY, POLICY_TEXT, 0o755, 0, 0)
    return True


def release_daemons(context: ConvergeContext) -> None:
    """Remove a policy of ours that a killed run left behind, once its dpkg is no longer at work."""
    if read_text(POLICY).encode() != POLICY_TEXT:
        return
    try:
        wait_for_apt(context)
    except Failure:
        return  # it never ends, or the operator disconnected: then the next run does it
    remove(POLICY)


def package_manager() -> str:
    for name, program in (("apt", "apt-get"), ("dnf", "dnf"), ("yum", "yum"), ("zypper", "zypper"), ("apk", "apk")):
        if which(program):
            return name
    return "pacman" if which("pacman") else "none"


def package_facts(names: list[str], context: ConvergeContext) -> Item:
    if not names or package_manager() != "apt":
        return {}
    installed = installed_packages(names)
    absent = [name for name in names if name not in installed]
    if absent and not have_package_lists():
        context.report("apt: fetching package lists")
        try:
            update_lists([], context)
        except Failure as failure:
            context.report(str(failure))
    candidates = package_candidates(absent) if absent else {}
    return {name: {"installed": installed.get(name), "candidate": candidates.get(name)} for name in names}


def installed_packages(names: list[str]) -> dict[str, str]:
    """The versions of those of `names` that are fully installed, read from dpkg's own file: no process is started."""
    try:
        return parse_dpkg_status(read_bytes("/var/lib/dpkg/status"), names)
    except OSError:
        return {}


def parse_dpkg_status(data: bytes, names: list[str]) -> dict[str, str]:
    data = b"\n" + data
    packages = {}
    for name in names:
        head = b"\nPackage: " + name.encode() + b"\n"
        start = data.find(head)
        while start >= 0:  # more than once where there is more than one architecture
            stanza = data[start : data.find(b"\n\n", start)]
            if b"\nStatus: install ok installed\n" in stanza or b"\nStatus: hold ok installed\n" in stanza:
                packages[name] = stanza.split(b"\nVersion: ")[1].split(b"\n")[0].decode()
                break
            start = data.find(head, start + 1)
    return packages


def package_candidates(names: list[str]) -> dict[str, str]:
    return parse_apt_policy(run(["apt-cache", "policy", *names], timeout=120.0)[1])


def parse_apt_policy(text: str) -> dict[str, str]:
    versions, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            versions[name] = line.split()[1]
    return versions
