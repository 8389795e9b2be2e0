"""What `--help` shows: commands under headings, and words that say what to write in place of Python's types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.cli.examples import EXAMPLES, named_commands

HEADINGS: dict[str, tuple[str, ...]] = {
    "Build": ("init", "check", "plan", "up", "down", "schema"),
    "Train": ("run", "jobs", "logs", "cancel", "env", "prove"),
    "Look": ("status", "usage", "ui", "bench"),
    "Hosts and services": ("ssh", "exec", "node", "keys", "restore"),
    "Rent": ("offers", "cost", "reap", "simulate"),
}
"""The commands of `shoal --help`, in the order in which they are shown."""

PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "FILE": ("--file", "--ssh-config", "--job", "--faults", "--output", "--error"),
    "DIRECTORY": ("--directory", "--keep"),
    "PROGRAM": ("--python",),
    "URL": ("--tracking-uri",),
    "NAME": (
        *("--cluster", "--nodeset", "--partition", "--account", "--qos", "--job-name", "--experiment", "--env"),
        *("--provider", "--type", "--region", "--gpu", "--image"),
    ),
    "HOSTS": ("--hosts", "--nodelist"),
    "NUMBER": (
        *("--nodes", "--gpus-per-node", "--ntasks-per-node", "--cpus-per-task", "--switches", "--rank"),
        *("--processes", "--steps", "--count", "--port", "--tolerance"),
    ),
    "SECONDS": ("--drain-timeout", "--timeout", "--seconds", "--boot-seconds"),
    "TIME": ("--time", "--since", "--until"),
    "MONTH": ("--month",),
    "SIZE": ("--mem",),
    "MIB": ("--max-size",),
    "RANGE": ("--array",),
    "JOBS": ("--dependency",),
    "FEATURES": ("--constraint",),
    "SIGNAL@SECONDS": ("--signal",),
    "NAME=VALUE": ("--export",),
    "WORD": ("--launcher", "--profile", "--parallel", "--dtype", "--market", "--by"),
    "TEXT": ("--reason",),
    "SHELL": ("--install-completion", "--show-completion"),
}
"""What stands behind an option, and the options that it stands behind."""

ARGUMENTS = {"args": "ARG", "jobs": "JOB", "names": "NAME", "kind": "PROVIDER"}
"""What stands for an argument that is not called as its variable is."""

_OF_OPTION = {option: word for word, options in PLACEHOLDERS.items() for option in options}


def explain(app: typer.Typer) -> None:
    """Give every command its examples, and its help the looks of this file."""
    for name, command in named_commands(app):
        command.cls = Command
        # The mark at the beginning keeps the lines as they are.
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.get(name, ()))


class Command(TyperCommand):
    """A command whose help names what to write. Releases of typer differ in how they tell a parameter's type."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            parameter.metavar = placeholder(parameter) or None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or "", *(_usage(parameter) for parameter in _arguments(self, ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [(_written(one), one.help or "") for one in _arguments(self, ctx)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        _write_options(self, ctx, formatter)


class Headed(TyperGroup):
    """The `shoal` command itself: its commands under headings, with their descriptions below one another."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        wide = max(map(len, self.list_commands(ctx)))
        for heading, names in HEADINGS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(wide), one.get_short_help_str(formatter.width)) for name, one in commands if one]
                )
        _write_options(self, ctx, formatter)


def placeholder(parameter: Any) -> str:
    """What a person writes in the place of this argument, or behind this option; nothing behind a flag."""
    if parameter.param_type_name == "argument":
        return ARGUMENTS.get(parameter.name) or parameter.name.upper()
    return "" if parameter.is_flag else _OF_OPTION[max(parameter.opts, key=len)]


def _arguments(command: TyperCommand, ctx: Any) -> Iterator[Any]:
    return (one for one in command.get_params(ctx) if one.param_type_name == "argument")


def _written(argument: Any) -> str:
    return placeholder(argument) + ("" if argument.nargs == 1 else "...")


def _usage(argument: Any) -> str:
    return _written(argument) if argument.required else f"[{_written(argument)}]"


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    with formatter.section("Options"):
        formatter.write_dl(
            [_option(one) for one in command.get_params(ctx) if one.param_type_name == "option" and not one.hidden]
        )


def _option(option: Any) -> tuple[str, str]:
    """An option as `-N, --nodes NUMBER`, and what it does."""
    names = ", ".join(sorted(option.opts, key=len))
    either = " / ".join([names, *option.secondary_opts])
    default = "" if option.is_flag or option.default in (None, "", 0) else f"Default: {option.default}."
    variable = f"Or set {option.envvar}." if option.envvar else ""
    return f"{either} {placeholder(option)}".strip(), " ".join(filter(None, (option.help, default, variable)))
