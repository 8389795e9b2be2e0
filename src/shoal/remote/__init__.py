"""Every program that runs on another machine, the agent among them: standard library only, Python 3.8.

Each is sent as text over the SSH connection that is there. Modules here import nothing of the rest of Shoal; the rest
imports constants from them, so that both sides agree.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources

MODULES_LOADER = """\
import sys
sys.modules["remote"] = type(sys)("remote")
sys.modules["remote"].__path__ = []
for name, text in %r:
    module = sys.modules["remote." + name] = type(sys)("remote." + name)
    module.__package__ = "remote"
    exec(compile(text, name + ".py", "exec"), module.__dict__)
sys.exit(module.main(sys.argv[1:]))
"""


@cache
def program_text(name: str, **words: object) -> str:
    """The source of a program of this package, with a value for each `@WORD@` in it; `name` without `.py`."""
    text = resources.files("shoal.remote").joinpath(name if "." in name else name + ".py").read_text("utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", str(value))
    return text


def python_command(name: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a program of this package on a host."""
    return ("python3", "-I", "-S", "-B", "-c", program_text(name), *arguments)


def modules_command(names: Sequence[str], *arguments: str) -> tuple[str, ...]:
    """The command that runs programs of this package that import each other; the last one has `main`."""
    texts = [(name, program_text(name)) for name in names]
    return ("python3", "-I", "-S", "-B", "-c", MODULES_LOADER % (texts,), *arguments)


def shell_command(text: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs the text of a shell program on a host."""
    return ("sh", "-c", text, "sh", *arguments)
