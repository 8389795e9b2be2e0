"""What `--help` shows below each command: how it is called."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.models import CommandInfo

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("shoal init --hosts desktop,gpu01,gpu02", "shoal init --ssh-config ~/.ssh/config"),
    "schema": ("shoal schema > shoal.schema.json",),
    "check": ("shoal check", "shoal check -f lab.yaml"),
    "plan": ("shoal plan", "shoal plan --diff"),
    "up": ("shoal up", "shoal up --drain-timeout 600"),
    "status": ("shoal status", "shoal status --json"),
    "down": ("shoal down", "shoal down --yes"),
    "ssh": ("shoal ssh gpu01", "shoal ssh desktop squeue", "shoal ssh --forget-key gpu01"),
    "exec": ("shoal exec -- uptime", "shoal exec -w gpu[01-04] -- nvidia-smi -L"),
    "node drain": ("shoal node drain gpu01 --reason fan",),
    "node resume": ("shoal node resume gpu[01-04]",),
    "node remove": ("shoal node remove gpu02",),
    "run": (
        "shoal run train.py",
        "shoal run -N2 --gpus-per-node 8 --time 4:00:00 train.py --lr 0.1",
        "shoal run --env torch -N2 --wait train.py",
        "shoal run --job job.yaml",
    ),
    "jobs": ("shoal jobs", "shoal jobs --all"),
    "logs": ("shoal logs 17", "shoal logs -f --rank 0 17"),
    "cancel": ("shoal cancel 17", "shoal cancel 17 18_3"),
    "prove": ("shoal prove train.py -n 4", "shoal prove train.py -n 4 -N2 -f shoal.yaml"),
    "usage": ("shoal usage", "shoal usage --by nodeset --since 7d"),
    "restore": ("shoal restore", "shoal restore latest"),
    "keys rotate": ("shoal keys rotate munge", "shoal keys rotate all"),
    "offers": ("shoal offers --gpu H100 --count 8", "shoal offers --provider lambda --market on-demand"),
    "cost": ("shoal cost", "shoal cost --month 2026-10"),
    "reap": ("shoal reap", "shoal reap --yes"),
    "bench links": ("shoal bench links", "shoal bench links --hosts gpu01,gpu02 --seconds 2"),
    "env build": ("shoal env build", "shoal env build torch"),
    "env list": ("shoal env list",),
    "env clean": ("shoal env clean --dry-run",),
    "ui": ("shoal ui mlflow", "shoal ui mlflow --show-password"),
    "simulate": ("shoal simulate lambda --port 8001",),
}
"""Command lines, by command. Each is parsed by a test."""


def named_commands(app: typer.Typer, before: str = "") -> Iterator[tuple[str, CommandInfo]]:
    """Every command of the app with the words that call it."""
    for command in app.registered_commands:
        yield before + called(command), command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from named_commands(group.typer_instance, f"{before}{group.name} ")


def called(command: CommandInfo) -> str:
    """The name of a command: what was said, or that of its function."""
    return command.name or (command.callback.__name__ if command.callback else "")
