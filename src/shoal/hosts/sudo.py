"""Becoming root through sudo, and telling sudo's own refusals from the command's errors."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence

from shoal.errors import SudoDenied
from shoal.hosts.api import Result

# sudo translates its messages; LANGUAGE=C keeps them as we know them and leaves the command's character set alone.
_PREFIX = ("env", "LANGUAGE=C", "sudo", "-n", "--")

_NEEDS_PASSWORD = re.compile(
    r"^sudo(?:-rs)?: .*(?:password is required|terminal is required|no tty present|must have a tty"
    r"|authentication is required)",
    re.M,
)
_NOT_ALLOWED = re.compile(
    r"is not in the sudoers file|may not run sudo on|is not allowed to (?:execute|run)|I'm afraid I can't do that"
    r"|^sudo: .*(?:account validation failure|account is locked|effective uid is not 0|must be owned by uid 0)"
    r"|^sudo: .*(?:no valid sudoers sources|unable to open /etc/sudoers)",
    re.M,
)
_NO_SUDO = re.compile(r"^env: .?sudo.?: (?:No such file or directory|Permission denied)", re.M)


def as_root(argv: Sequence[str]) -> list[str]:
    """The same command, run as root."""
    return [*_PREFIX, *argv]


def check_sudo_result(host: str, user: str, argv: Sequence[str], result: Result) -> Result:
    """How the command itself ended, when `result` is how sudo ended. Raises SudoDenied when it never ran."""
    error = result.error_text
    if result.status == 1 and not result.stdout:
        if _NEEDS_PASSWORD.search(error):
            raise sudo_denied_error(host, user, "sudo asks for a password")
        if denied := _NOT_ALLOWED.search(error):
            line = error[error.rfind("\n", 0, denied.start()) + 1 :].splitlines()[0]
            raise sudo_denied_error(host, user, f"sudo says: {line.strip()}")
        # A missing program is status 127 everywhere but under sudo.
        if f"sudo: {argv[0]}: command not found" in error:
            return Result(127, result.stdout, result.stderr)
    if result.status in (126, 127) and not result.stdout and _NO_SUDO.search(error):
        raise SudoDenied(
            host,
            f"{user} is not root and there is no usable sudo on the host",
            hint=f"install sudo on {host} and allow {user} to use it, or log in as root (`user: root`)",
        )
    return result


def sudo_denied_error(host: str, user: str, cause: str) -> SudoDenied:
    return SudoDenied(
        host,
        f"{user} may not become root: {cause}",
        hint=(
            f"on {host}, as root: echo '{user} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/90-shoal "
            f"&& chmod 440 /etc/sudoers.d/90-shoal; or log in as root (`user: root`)"
        ),
    )


def login_name() -> str:
    """Who we are on this machine; a user id without a name counts as root's, as in a bare container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "root"
