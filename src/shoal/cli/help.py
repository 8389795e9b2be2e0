"""What `--help` shows: commands under headings, placeholders for values, and examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("shoal init --hosts desktop,gpu01,gpu02", "shoal init --ssh-config ~/.ssh/config"),
    "schema": ("shoal schema > shoal.schema.json",),
    "check": ("shoal check", "shoal check -f lab.yaml"),
    "plan": ("shoal plan", "shoal plan --diff"),
    "up": ("shoal up", "shoal up --drain-timeout 600"),
    "status": ("shoal status", "shoal status --json"),
    "doctor": (
        "shoal doctor",
        "shoal doctor --node gpu[01-04]",
        "shoal doctor --job 17",
        "shoal doctor --fix slurmd-stopped",
        "shoal doctor --history",
    ),
    "validate": (
        "shoal validate --quick",
        "shoal validate --env torch -w gpu[01-04]",
        "shoal validate --launcher srun,torchrun --env torch",
        "shoal validate --since 7d",
    ),
    "down": ("shoal down", "shoal down --yes"),
    "ssh": ("shoal ssh gpu01", "shoal ssh desktop squeue", "shoal ssh --job 17", "shoal ssh --forget-key gpu01"),
    "exec": ("shoal exec -- uptime", "shoal exec --job 17 -- nvidia-smi", "shoal exec -w gpu[01-04] -- nvidia-smi -L"),
    "node drain": ("shoal node drain gpu01 --reason fan",),
    "node resume": ("shoal node resume gpu[01-04]",),
    "node remove": ("shoal node remove gpu02",),
    "join": ("shoal join alice@desktop", "shoal join"),
    "run": (
        "shoal run train.py",
        "shoal run -N2 --gpus-per-node 8 --time 4:00:00 train.py --lr 0.1",
        "shoal run --env torch -N2 --wait train.py",
        "shoal run --image docker.io/pytorch/pytorch:latest --mount /data:/data:ro train.py",
        "shoal run --sbatch '--mem-per-cpu=3200' --sbatch --hold train.py",
        "shoal run --job job.yaml",
    ),
    "jobs": ("shoal jobs", "shoal jobs --all"),
    "logs": ("shoal logs 17", "shoal logs -f --rank 0 17"),
    "fetch": ("shoal fetch 17", "shoal fetch 17 out/ckpt.pt --to results"),
    "cancel": ("shoal cancel 17", "shoal cancel 17 18_3"),
    "prove": ("shoal prove train.py -n 4", "shoal prove train.py -n 4 -N2 -f shoal.yaml"),
    "usage": ("shoal usage", "shoal usage --by nodeset --since 7d"),
    "restore": ("shoal restore", "shoal restore latest"),
    "keys rotate": ("shoal keys rotate munge", "shoal keys rotate all"),
    "offers": ("shoal offers --gpu H100 --count 8", "shoal offers --provider lambda --market on-demand"),
    "cost": ("shoal cost", "shoal cost --month 2026-10"),
    "try": ("shoal try lambda", "shoal try aws --max-cost 0.50 --type g4dn.xlarge"),
    "reap": ("shoal reap", "shoal reap --yes"),
    "bench links": ("shoal bench links", "shoal bench links --hosts gpu01,gpu02 --seconds 2"),
    "env build": ("shoal env build torch", "shoal env build mine --requirements requirements.txt"),
    "env list": ("shoal env list",),
    "env remove": ("shoal env remove mine",),
    "env clean": ("shoal env clean --dry-run",),
    "image pull": ("shoal image pull docker.io/library/debian:12 --name debian",),
    "image build": ("shoal image build train . --from mini", "shoal image build mini /shared/mini"),
    "image push": ("shoal image push train registry.example.org/lab/train:3",),
    "image login": ("shoal image login registry.example.org --user ann --password file:registry-password",),
    "image logout": ("shoal image logout registry.example.org",),
    "image save": ("shoal image save tuned mine --node gpu01", "shoal image save tuned mine --job 17"),
    "image bundle": ("shoal image bundle debian --mount /data:/data:ro",),
    "image list": ("shoal image list",),
    "image remove": ("shoal image remove debian",),
    "image prune": ("shoal image prune",),
    "ui": ("shoal ui mlflow", "shoal ui mlflow --show-password"),
    "simulate": ("shoal simulate lambda --port 8001",),
}
"""Command lines, by command. Each is parsed by a test."""


def add_examples(app: typer.Typer) -> None:
    """Give every command its examples, and its help the layout of this file."""
    for name, command in named_commands(app):
        command.cls = ShoalCommand
        # The mark at the beginning keeps the lines as they are.
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES.get(name, ()))


def named_commands(app: typer.Typer, prefix: str = "") -> Iterator[tuple[str, CommandInfo]]:
    """Every command of the app with the words that call it."""
    for command in app.registered_commands:
        yield f"{prefix}{command.name}", command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from named_commands(group.typer_instance, f"{prefix}{group.name} ")


class ShoalCommand(TyperCommand):
    """A command whose help has a placeholder for each value. Releases of typer differ in how they show its type."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            parameter.metavar = placeholder(parameter) or None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [(parameter.required, _argument(parameter)) for parameter in _arguments(self, ctx)]
        return [self.options_metavar or "", *(text if required else f"[{text}]" for required, text in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [(_argument(parameter), parameter.help or "") for parameter in _arguments(self, ctx)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        _write_options(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """A group whose help has its commands under headings, with their descriptions in one column."""

    headings: ClassVar[Mapping[str, Iterable[str]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in self.headings.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width))
                        for name, command in commands
                        if command
                    ]
                )
        _write_options(self, ctx, formatter)


def placeholder(parameter: Any) -> str:
    """What stands for the value of an argument or an option; nothing for a flag."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return "" if parameter.is_flag else str(parameter.metavar or "SHELL")  # typer's own options complete for a shell


def _arguments(command: TyperCommand, ctx: Any) -> Iterator[Any]:
    return (parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "argument")


def _argument(argument: Any) -> str:
    return placeholder(argument) + ("" if argument.nargs == 1 else "...")


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    options = (parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "option")
    with formatter.section("Options"):
        formatter.write_dl([_option(option) for option in options if not option.hidden])


def _option(option: Any) -> tuple[str, str]:
    """An option as `-N, --nodes NUMBER`, and what it does."""
    names = ", ".join(sorted(option.opts, key=len))
    spellings = " / ".join([names, *option.secondary_opts])
    default = "" if option.is_flag or option.default in (None, "", 0) else f"Default: {option.default}."
    variable = f"Or set {option.envvar}." if option.envvar else ""
    return f"{spellings} {placeholder(option)}".strip(), " ".join(filter(None, (option.help, default, variable)))
