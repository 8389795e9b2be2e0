"""Every error Shoal raises on purpose, as one tree.

    ShoalError                   exit 1   the user can act on it
    ├── SpecError                exit 2   the file has errors; carries every finding
    ├── UsageError               exit 2   the command line has an error
    ├── PartialFailure           exit 3   some hosts succeeded, some failed
    ├── HostError                exit 1   one host, one cause
    │   ├── Unreachable                   no route, connection refused, no answer
    │   ├── AuthenticationFailed          the host does not accept our key
    │   ├── HostKeyChanged                the host key is not the recorded one
    │   ├── SudoDenied                    the user may not become root
    │   ├── CommandFailed                 a command ended with a non-zero status
    │   ├── CommandTimeout                a command did not end in time; the host itself answers
    │   ├── ConnectionLost                the connection broke during the work
    │   ├── AgentFailed                   the agent could not converge the host
    │   └── ControllerFailed              nothing works without it; carries the errors of all other hosts
    ├── ProviderError            exit 1   a provider cannot deliver what we requested
    ├── LedgerError              exit 1   the ledger of rented machines cannot be read or written
    ├── SlurmError               exit 1   Slurm rejected a request
    │   └── VersionMismatch               hosts whose Slurm versions cannot work together
    └── Interrupted              exit 130 Ctrl-C

The message has the request and the cause, `hint` the fix. Any other exception is a bug and exits 70.
"""

from __future__ import annotations

from collections.abc import Mapping


class ShoalError(Exception):
    """An error that the user can act on."""

    exit_code = 1
    json_name = ""
    """What `--json` calls it, where that is not the name of the class: scripts rely on it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.hint}" if self.hint else self.message


class UsageError(ShoalError):
    """The command line has an error."""

    exit_code = 2


class SpecError(ShoalError):
    """The spec file has errors. `findings` has all of them, not only the first."""

    exit_code = 2

    def __init__(self, findings: tuple[object, ...]) -> None:
        super().__init__("\n".join(getattr(finding, "labelled", str(finding)) for finding in findings))
        self.findings = findings


class PartialFailure(ShoalError):
    """Some hosts succeeded and some failed; the summary names them."""

    exit_code = 3
    json_name = "Partly"


class HostError(ShoalError):
    """One host failed."""

    def __init__(self, host: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint=hint)
        self.host = host
        self.cause = message


class Unreachable(HostError):
    """The host does not answer."""


class AuthenticationFailed(HostError):
    """The host does not accept our key."""

    json_name = "AuthRefused"


class HostKeyChanged(HostError):
    """The host key is not the one that was recorded first."""


class SudoDenied(HostError):
    """The user we log in as may not become root without a password."""

    json_name = "SudoRefused"


class CommandFailed(HostError):
    """A command on the host ended with a non-zero status."""


class CommandTimeout(HostError):
    """A command on the host did not end in time. The host itself answers."""

    json_name = "TimedOut"


class ConnectionLost(HostError):
    """The connection broke while the host worked."""


class AgentFailed(HostError):
    """The agent ran and could not converge the host."""


class ControllerFailed(HostError):
    """The controller failed, and other hosts too. `failures` has the error of each, the controller's first."""

    def __init__(self, controller: str, failures: Mapping[str, HostError]) -> None:
        first = failures[controller]
        self.failures = {controller: first, **failures}
        other_errors = [error for name, error in failures.items() if name != controller]
        other_messages = "".join(
            f"\nand {error.message}" + f" ({error.hint})" * bool(error.hint) for error in other_errors
        )
        super().__init__(controller, first.cause + other_messages, hint=first.hint)


class ProviderError(ShoalError):
    """A provider cannot deliver what we requested. `hosts` has the causes by host, when the other hosts exist."""

    def __init__(self, message: str, *, hint: str = "", hosts: Mapping[str, str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.hosts = dict(hosts or {})


class LedgerError(ShoalError):
    """The ledger of rented machines cannot be read or written."""


class SlurmError(ShoalError):
    """Slurm rejected a request."""


class VersionMismatch(SlurmError):
    """The hosts' Slurm versions cannot work together. `findings` has an entry for each host that does not fit."""

    json_name = "VersionWindow"

    def __init__(self, message: str, *, hint: str = "", findings: tuple[object, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.findings = findings


class Interrupted(ShoalError):
    """The user pressed Ctrl-C."""

    exit_code = 130
    signals: tuple[int, ...] = ()
    """What has come until the command had stopped."""
