"""Every program that runs on another machine, the agent among them: standard library only, Python 3.8.

Each is sent as text over the SSH connection that is there. Modules here import nothing of the rest of Shoal; the rest
imports constants from them, so that both sides agree.
"""

from functools import cache
from importlib import resources


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


def shell_command(text: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs the text of a shell program on a host."""
    return ("sh", "-c", text, "sh", *arguments)
