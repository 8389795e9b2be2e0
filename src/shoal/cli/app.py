"""The `shoal` command: which module has which command, and only that one is loaded."""

from __future__ import annotations

import importlib
import keyword
import sys
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli.help import CommandGroup, add_examples
from shoal.cli.session import run_app

COMMANDS: dict[str, dict[str, str]] = {
    "Build": {
        "init": "cluster_commands",
        "check": "cluster_commands",
        "plan": "cluster_commands",
        "up": "cluster_commands",
        "down": "cluster_commands",
        "schema": "cluster_commands",
    },
    "Train": {
        "join": "job_commands",
        "run": "run_command",
        "jobs": "job_commands",
        "logs": "job_commands",
        "fetch": "job_commands",
        "cancel": "job_commands",
        "env": "env_commands",
        "image": "image_commands",
        "prove": "prove_commands",
    },
    "Observe": {
        "status": "cluster_commands",
        "doctor": "doctor_command",
        "validate": "validate_command",
        "usage": "accounting_commands",
        "ui": "server_commands",
        "bench": "bench_commands",
    },
    "Hosts and services": {
        "ssh": "host_commands",
        "exec": "host_commands",
        "node": "host_commands",
        "keys": "host_commands",
        "restore": "accounting_commands",
    },
    "Rent": {
        "offers": "rental_commands",
        "cost": "rental_commands",
        "try": "rental_commands",
        "reap": "rental_commands",
        "simulate": "server_commands",
    },
}
"""The commands under their headings in `shoal --help`, each with its module in this package.

The function has its name; `try_` that of a Python keyword.
"""
RUNS_PROGRAM = ("run", "ssh", "exec")
"""What follows the first argument of these is for the program that they run."""

_MODULES = {command: module for commands in COMMANDS.values() for command, module in commands.items()}


class ShoalGroup(CommandGroup):
    headings = COMMANDS


def main() -> None:
    """Run what the command line says."""
    run_app(make_app(*sys.argv[1:2]))


def make_app(command: str = "") -> typer.Typer:
    """The app with the one command that is called: typer builds every command it knows. All, for the help."""
    app = typer.Typer(
        name="shoal",
        cls=ShoalGroup,
        help="Turn your machines into one Slurm cluster, as shoal.yaml says. Without a file, use a sandbox here.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="`shoal COMMAND --help` shows examples. Begin with init, check and up; then run.",
    )
    app.callback(invoke_without_command=True)(_main_options)
    for name in [] if command == "--version" else [command] if command in _MODULES else _MODULES:
        module = importlib.import_module(f"shoal.cli.{_MODULES[name]}")
        entry = getattr(module, f"{name}_" if keyword.iskeyword(name) else name)
        if isinstance(entry, typer.Typer):
            app.add_typer(entry, name=name)
        else:
            app.command(name, context_settings={"allow_interspersed_args": name not in RUNS_PROGRAM})(entry)
    add_examples(app)
    return app


def _main_options(version: Annotated[bool, typer.Option("--version", help="Print Shoal's version.")] = False) -> None:
    if version:
        print(f"shoal {__version__}")
        sys.exit(0)
