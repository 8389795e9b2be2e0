"""Starting Shoal starts no other program: asyncssh would look for libraries with compilers and linkers."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import sys
started = []
sys.addaudithook(lambda event, arguments: started.append(arguments[1]) if event == "subprocess.Popen" else None)
import {module}
import ctypes.util
print(list(started), ctypes.util.find_library("c") is not None)
"""


@pytest.mark.parametrize("module", ["shoal.hosts.ssh", "shoal.cli, shoal.verbs.up", "shoal.verbs.remote"])
def test_no_program_is_started_and_libraries_are_found_as_ever_afterwards(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNT.format(module=module)], capture_output=True, text=True)
    assert done.stdout == "[] True\n", done.stderr
