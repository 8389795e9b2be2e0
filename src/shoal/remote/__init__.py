"""Every program that runs on another machine, the agent among them: standard library only, Python 3.8.

Each is sent as text over the SSH connection that is there. Modules here import nothing of the rest of Shoal; the rest
imports constants from them, so that both sides agree.
"""

from importlib import resources


def program_text(name: str) -> str:
    """The source of a program of this package, for a host's `python3` to run."""
    return resources.files("shoal.remote").joinpath(name + ".py").read_text("utf-8")


def python_command(name: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a program of this package on a host."""
    return ("python3", "-I", "-S", "-B", "-c", program_text(name), *arguments)
