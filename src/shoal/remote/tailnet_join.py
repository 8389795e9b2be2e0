"""Joins a tailnet with `tailscale up`. A failure ends with its cause and, as the last line, `fix: …`.

Arguments: the control server, the file with the key or `-`, whether the node is ephemeral, and the flags of `tailscale
up`. The key file is removed, and no argument contains the key.

With `--source`: adds Tailscale's package source. Arguments: the address of the release, and the paths of keyring and
list.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

JOIN_TIMEOUT_S = 60
UNREACHABLE_TIMEOUT_S = 15
"""For a control server that did not answer us: the daemon may know another way to it, such as a proxy."""
BY_HAND_TIMEOUT_S = 10
PROBE_TIMEOUT_S = 10
OAUTH = "tskey-client-"
NEW_KEY = "create a reusable auth key for `network.auth_key`"
FIXES = (
    ("already used", NEW_KEY + ": this one is for a single host"),
    ("expired", NEW_KEY + ": this one has expired or was revoked"),
    (
        "tags",
        "let the policy of the tailnet give these tags to the owner of the key (`tagOwners`), create the key with "
        "them, or correct `network.tags`",
    ),
    (
        "invalid",
        NEW_KEY + " at {server}, which does not know this one; or set `network.login_server` to the key's own server",
    ),
)
LOGIN_FIX = NEW_KEY + " (the secret of an OAuth client also needs `network.tags`), or log the host in by hand"


SOURCE_OPTION = "--source"
KEYRING_SUFFIX, LIST_SUFFIX = ".noarmor.gpg", ".tailscale-keyring.list"
"""What Tailscale's installer fetches for a release: the key of its packages, and the line for apt that names it."""
FETCH_TIMEOUT_S = 60


def add_source(address: str, keyring: str, source: str) -> int:
    by_hand = f"curl -fsSL {address}{KEYRING_SUFFIX} -o {keyring} && curl -fsSL {address}{LIST_SUFFIX} -o {source}"
    contents = []
    for url in (address + KEYRING_SUFFIX, address + LIST_SUFFIX):
        try:
            with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:  # nosec B310: https, see the role
                contents.append(answer.read(1 << 20))
        except OSError as error:  # URLError is one
            print(f"cannot fetch {url}: {getattr(error, 'reason', error)}")
            print(f"fix: let the host reach it, or run there as root: {by_hand} && apt-get update")
            return 1
    if f"signed-by={keyring}".encode() not in contents[1]:
        print(f"{address}{LIST_SUFFIX} is no package source that is signed by {keyring}")
        print("fix: install tailscale on the host by hand (see its download page)")
        return 1
    for path, content in zip((keyring, source), contents):
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        with os.fdopen(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # apt reads both as a user of its own
            file.write(content)
        os.replace(path + ".new", path)
    # Another source of the host may fail; what apt has of this one shows when the package is installed.
    subprocess.run(["apt-get", "-q", "update"], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    return 0


def main(server: str, key: str, ephemeral: str, *flags: str) -> int:
    try:
        problem, fix = server_problem(server)
        return join(server, key, ephemeral, problem, fix, list(flags))
    finally:
        for path in (key, key + ".new"):
            if os.path.exists(path):
                os.remove(path)


def join(server: str, key: str, ephemeral: str, problem: str, fix: str, flags: list[str]) -> int:
    limit = UNREACHABLE_TIMEOUT_S if problem else JOIN_TIMEOUT_S
    if key == "-":
        limit = BY_HAND_TIMEOUT_S  # it prints a URL at which a person logs the host in
    else:
        complete_secret(key, ephemeral)
        flags = ["--auth-key=file:" + key, *flags]
    line = ["tailscale", "up", *flags, f"--timeout={limit}s"]
    status, text = run(line)
    if status and any(part in text for part, _ in FIXES):
        # tailscaled goes on trying the key of a run before, and this may have been the answer to that one.
        status, text = run(line)
    if status == 0:
        return 0
    if "timeout" in text.lower() and problem:
        text = problem
    else:
        fix = next((fix for part, fix in FIXES if part in text), LOGIN_FIX).format(server=server)
    print(f"{text}\nfix: {fix}")
    return 1


def run(line: list[str]) -> tuple[int, str]:
    """The status and the output of a command."""
    result = subprocess.run(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    )
    return result.returncode, result.stdout.strip()


def complete_secret(path: str, ephemeral: str) -> None:
    """Add options to the secret of an OAuth client: hosts need no approval, and only rented ones are ephemeral."""
    with open(path) as file:
        secret = file.read().strip()
    if not secret.startswith(OAUTH) or "?" in secret:
        return
    with os.fdopen(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{secret}?ephemeral={ephemeral}&preauthorized=true")
    os.replace(path + ".new", path)


def server_problem(server: str) -> tuple[str, str]:
    """Why the control server cannot be used from this host, and the fix; both empty when it answers."""
    try:
        # Every client begins with this request. The spec allows http and https alone.
        urllib.request.urlopen(server.rstrip("/") + "/key?v=100", timeout=PROBE_TIMEOUT_S).close()  # nosec B310
    except urllib.error.HTTPError:
        return "", ""
    except OSError as error:  # URLError is one
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {server} is not trusted here: {cause.verify_message}",
                "put the certificate of its authority into /usr/local/share/ca-certificates on the host (NAME.crt), "
                "run `update-ca-certificates` and `systemctl restart tailscaled` there",
            )
        text = getattr(cause, "strerror", None) or cause
        return (
            f"cannot reach {server}: {text}",
            "start the control server, let the host reach it, or correct `network.login_server`",
        )
    return "", ""


if __name__ == "__main__":
    sys.exit(add_source(*sys.argv[2:]) if sys.argv[1] == SOURCE_OPTION else main(*sys.argv[1:]))
