"""Every error Shoal raises on purpose, as one tree.

    ShoalError                   exit 1   something the user can act on
    ├── SpecError                exit 2   the file is wrong; carries every finding
    ├── UsageError               exit 2   the command line is wrong
    ├── Partly                   exit 3   some hosts did it, some did not
    ├── HostError                exit 1   one host, one cause
    │   ├── Unreachable                   no route, refused, no answer
    │   ├── AuthRefused                   the host does not accept our key
    │   ├── HostKeyChanged                not the machine we met before
    │   ├── SudoRefused                   the user may not become root
    │   ├── CommandFailed                 a command ended with a non-zero status
    │   ├── TimedOut                      a command did not end in time; the host itself answers
    │   ├── ConnectionLost                the host went away while we worked
    │   ├── AgentFailed                   the agent could not converge the host
    │   └── ControllerFailed              nothing goes on without it; carries what happened to every other host
    ├── ProviderError            exit 1   a provider cannot give us what we asked for
    ├── LedgerError              exit 1   the record of rented machines cannot be read or kept
    ├── SlurmError               exit 1   Slurm said no
    │   └── VersionWindow                 hosts whose Slurm versions cannot talk to each other
    └── Interrupted              exit 130 Ctrl-C

The text says what was asked and what was found; `hint` says what to do about it. Anything else that escapes is our
bug and exits 70.
"""

from __future__ import annotations

from collections.abc import Mapping


class ShoalError(Exception):
    """Something went wrong that the user can act on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.hint}" if self.hint else self.message


class UsageError(ShoalError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class SpecError(ShoalError):
    """The spec file is wrong. `findings` holds every problem, not only the first."""

    exit_code = 2

    def __init__(self, findings: tuple[object, ...]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = findings


class Partly(ShoalError):
    """Some hosts are done and some are not; the summary has named them."""

    exit_code = 3


class HostError(ShoalError):
    """One host could not do what was asked of it."""

    def __init__(self, host: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint=hint)
        self.host = host
        self.cause = message


class Unreachable(HostError):
    """The host does not answer."""


class AuthRefused(HostError):
    """The host answers and does not accept our key."""


class HostKeyChanged(HostError):
    """The host shows another key than the one we met first."""


class SudoRefused(HostError):
    """The user we log in as may not become root without a password."""


class CommandFailed(HostError):
    """A command on the host ended with a non-zero status."""


class TimedOut(HostError):
    """A command on the host did not end in time. The host itself answers."""


class ConnectionLost(HostError):
    """The host went away while it worked for us."""


class AgentFailed(HostError):
    """The agent ran and could not bring the host to the state we asked for."""


class ControllerFailed(HostError):
    """The controller dropped out, and other hosts too. `failures` has the error of each, the controller's first."""

    def __init__(self, controller: str, failures: Mapping[str, HostError]) -> None:
        first = failures[controller]
        self.failures = {controller: first, **failures}
        others = [error for name, error in failures.items() if name != controller]
        told = "".join(f"\nand {error.message}" + f" ({error.hint})" * bool(error.hint) for error in others)
        super().__init__(controller, first.cause + told, hint=first.hint)


class ProviderError(ShoalError):
    """A provider cannot give us what we asked for. `hosts` says why, by name, when the other hosts are there."""

    def __init__(self, message: str, *, hint: str = "", hosts: Mapping[str, str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.hosts = dict(hosts or {})


class LedgerError(ShoalError):
    """The record of rented machines cannot be read or kept."""


class SlurmError(ShoalError):
    """Slurm refused a request."""


class VersionWindow(SlurmError):
    """The hosts' Slurm versions cannot talk to each other. `findings` has one entry a host that is outside."""

    def __init__(self, message: str, *, hint: str = "", findings: tuple[object, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.findings = findings


class Interrupted(ShoalError):
    """The user pressed Ctrl-C."""

    exit_code = 130
