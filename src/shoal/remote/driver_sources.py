"""Adds the components of Debian that have NVIDIA's driver, from the servers that the host has its other packages from.

Each source with `main` and without `non-free` gets a twin with the other components. A twin keeps all options: apt
rejects two sources of one server with different keys.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from typing import List

DIRECTORY = "/etc/apt"
NAME = "shoal-nvidia"
COMPONENTS = "contrib non-free non-free-firmware"
LINE = re.compile(r"^(deb\s+(?:\[[^]]*\]\s+)?\S+\s+[^\s/]+)\s+(.*?)\s*(?:#.*)?$")


def main() -> None:
    add_sources(DIRECTORY)
    sys.exit(subprocess.call(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "update"]))


def add_sources(directory: str) -> None:
    folder = os.path.join(directory, "sources.list.d")
    own = [os.path.join(folder, NAME + ending) for ending in (".list", ".sources")]
    files = [os.path.join(directory, "sources.list"), *sorted(glob.glob(os.path.join(folder, "*")))]
    texts = {path: read_text(path) for path in files if path not in own}
    lines = [line for path, text in texts.items() if path.endswith(".list") for line in twin_lines(text)]
    stanzas = [stanza for path, text in texts.items() if path.endswith(".sources") for stanza in twin_stanzas(text)]
    for path, text in zip(own, ("".join(lines), "\n".join(stanzas))):
        if text:
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(path + ".new", path)


def twin_lines(text: str) -> List[str]:
    """The twins of a file of one-line sources."""
    matches = [LINE.match(line) for line in text.splitlines()]
    return ["%s %s\n" % (match[1], COMPONENTS) for match in matches if match and needs_twin(match[2].split())]


def twin_stanzas(text: str) -> List[str]:
    """The twins of a file of stanzas."""
    twins = []
    for stanza in re.split(r"\n\s*\n", text):
        match = re.search(r"^Components:(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE | re.IGNORECASE)
        is_off = re.search(r"^Enabled:\s*no\b", stanza, re.MULTILINE | re.IGNORECASE)
        if match and not is_off and needs_twin(match[1].split()):
            twins.append(stanza[: match.start()].lstrip() + "Components: " + COMPONENTS + stanza[match.end() :] + "\n")
    return twins


def needs_twin(components: List[str]) -> bool:
    return "main" in components and "non-free" not in components


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
