"""The text of systemd units, and the first line of every file that Shoal writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

HEADER = "# Written by shoal; changes here are lost.\n"

Settings = Mapping[str, str | int | tuple[str, ...] | None]
"""The settings of one section. A tuple repeats its key; None leaves it out."""


def render_unit(**sections: Settings) -> str:
    """A unit or a drop-in, its sections in the order given."""
    return HEADER + "\n".join(f"[{name}]\n{_render_settings(settings)}" for name, settings in sections.items())


def restart_drop_in(unit: Settings | None = None, service: Settings | None = None) -> str:
    """A drop-in after which systemd restarts a service that fails, without a limit."""
    return render_unit(
        Unit={**(unit or {}), "StartLimitIntervalSec": 0},
        Service={**(service or {}), "Restart": "on-failure", "RestartSec": 3},
    )


def _render_settings(settings: Settings) -> str:
    pairs = ((key, value if isinstance(value, tuple) else (value,)) for key, value in settings.items())
    return "".join(f"{key}={value}\n" for key, values in pairs for value in values if value is not None)
