"""Starting Shoal starts no other program and loads no X.509: asyncssh would do both."""

import subprocess
import sys

from tests.support.cases import cases

COUNT = """
import sys
started = []
sys.addaudithook(lambda event, arguments: started.append(arguments[1]) if event == "subprocess.Popen" else None)
import {module}
import ctypes.util
print(list(started), ctypes.util.find_library("c") is not None)
"""


@cases("module", "shoal.hosts.ssh", "shoal.cli, shoal.verbs.up", "shoal.verbs.exec")
def test_import_starts_no_program_and_library_lookup_still_works(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNT.format(module=module)], capture_output=True, text=True)
    assert done.stdout == "[] True\n", done.stderr


def test_x509_is_not_loaded_and_no_stub_remains() -> None:
    look = "import sys, shoal.hosts.ssh; print([name for name in sys.modules if 'x509' in name])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
