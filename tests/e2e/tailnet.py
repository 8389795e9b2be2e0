"""A real tailnet for tests: Headscale on this machine with TLS, relay and STUN; Tailscale's programs on the hosts.

`scripts/test` puts `headscale`, `tailscale` and `tailscaled` on the PATH, where it has them. Hosts get the programs as
a package from an apt source, as Tailscale's repository would serve it.
"""

import functools
import hashlib
import http.server
import json
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.existing_hosts import Lent

from shoal.local_files import cache_dir
from shoal.roles.tailscale import KEYRING, SOURCE
from shoal.sandbox.layout import Layout
from shoal.sandbox.network import gateway

PROGRAMS = ("headscale", "tailscale", "tailscaled")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
needs_programs = pytest.mark.skipif(
    bool(MISSING),
    reason=f"not installed: {', '.join(MISSING)}; set SHOAL_TEST_TOOLS to a directory whose `unpack DIR` provides "
    "them, and run scripts/test",
)
PORT = 18443
USER = "lab"
TAG = "tag:slurm"

# As in Tailscale's own package.
UNIT = """\
[Unit]
Description=Tailscale node agent
After=network-pre.target

[Service]
EnvironmentFile=/etc/default/tailscaled
ExecStart=/usr/sbin/tailscaled --state=/var/lib/tailscale/tailscaled.state \
--socket=/run/tailscale/tailscaled.sock --port=${PORT} $FLAGS
ExecStopPost=/usr/sbin/tailscaled --cleanup
Restart=on-failure
RuntimeDirectory=tailscale
StateDirectory=tailscale
Type=notify

[Install]
WantedBy=multi-user.target
"""
# A machine in a container has no systemd that could start it.
AFTER_INSTALL = """\
#!/bin/sh
update-ca-certificates > /dev/null
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
"""


class Tailnet:
    """A Headscale server at this machine's address on the hosts' network. The package makes hosts trust it."""

    def __init__(self, sandbox: str, directory: Path) -> None:
        self._layout = Layout(cache_dir(), sandbox)
        self._directory = directory
        address = gateway(self._layout.sites()["a"])
        self.url = f"https://{address}:{PORT}"
        self._user = ""
        self._server: subprocess.Popen[bytes] | None = None
        _certificates(directory, address)
        policy = {
            "tagOwners": {TAG: [f"{USER}@"]},
            "acls": [{"action": "accept", "src": ["*"], "dst": ["*:*"]}],
        }
        (directory / "policy.json").write_text(json.dumps(policy))
        self._write_config(address)

    def _write_config(self, address: str) -> None:
        relay = {
            "enabled": True,
            "region_id": 999,
            "region_code": "home",
            "region_name": "home",
            "stun_listen_addr": f"{address}:3478",
            "private_key_path": f"{self._directory}/relay.key",
            "automatically_add_embedded_derp_region": True,
            "ipv4": address,
        }
        config = {
            "server_url": self.url,
            "listen_addr": f"{address}:{PORT}",
            "metrics_listen_addr": f"{address}:19090",
            "grpc_listen_addr": f"{address}:15443",
            "tls_cert_path": f"{self._directory}/server.crt",
            "tls_key_path": f"{self._directory}/server.key",
            "noise": {"private_key_path": f"{self._directory}/noise.key"},
            "prefixes": {"v4": "100.64.0.0/10", "allocation": "sequential"},
            "derp": {"server": relay, "urls": [], "paths": [], "auto_update_enabled": False},
            "database": {"type": "sqlite", "sqlite": {"path": f"{self._directory}/db.sqlite"}},
            "policy": {"mode": "file", "path": f"{self._directory}/policy.json"},
            "dns": {"magic_dns": False, "base_domain": "lab.invalid", "override_local_dns": False},
            "unix_socket": f"{self._directory}/headscale.sock",
            "disable_check_updates": True,
        }
        self._config.write_text(json.dumps(config))

    @property
    def _config(self) -> Path:
        return self._directory / "config.yaml"

    def start(self) -> None:
        line = ["headscale", "serve", "-c", str(self._config)]
        with (self._directory / "log").open("ab") as log:
            self._server = subprocess.Popen(line, stdout=log, stderr=log)
        end = time.monotonic() + 120
        while self._call("users", "list", status=None) is None:
            assert self._server.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < end, "headscale does not answer"
            time.sleep(0.2)
        if not self._user:
            self._user = str(self._call("users", "create", USER)["id"])

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(timeout=60)
            self._server = None

    def create_key(self, *options: str) -> str:
        """An auth key: `--reusable`, `--ephemeral`, `--tags tag:slurm`, `--expiration 1s`."""
        return str(self._call("preauthkeys", "create", "--user", self._user, *options)["key"])

    def revoke_key(self, key: str) -> None:
        # The server stores and lists only the beginning of a key.
        listed = [entry for entry in self._call("preauthkeys", "list") if key.startswith(entry["key"].rstrip("*"))]
        assert len(listed) == 1, listed
        self._call("preauthkeys", "expire", "--id", str(listed[0]["id"]))

    def publish(self, lent: Lent, *names: str) -> None:
        """Give hosts an apt source with a package of the programs and of the server's certificate."""
        line = _package(self._layout.shared, self._directory / "ca.crt")
        for name in names:
            lent.shell(name, f"printf '%s' '{line}' > {SOURCE}; echo not used > {KEYRING}; apt-get -q update")

    @contextmanager
    def serving_packages(self, lent: Lent, name: str) -> Iterator[None]:
        """Serve key and list of the package source to a host that has neither, at Tailscale's own address."""
        release = lent.shell(name, '. /etc/os-release; echo "$ID/$VERSION_CODENAME"').strip()
        place = self._directory / "packages/stable" / release
        place.parent.mkdir(parents=True)
        place.with_name(f"{place.name}.noarmor.gpg").write_text("not used")
        source = _package(self._layout.shared, self._directory / "ca.crt")
        place.with_name(f"{place.name}.tailscale-keyring.list").write_text(source)
        address = gateway(self._layout.sites()["a"])
        authority = (self._directory / "ca.crt").read_text()
        trust = "/usr/local/share/ca-certificates/packages.crt"
        lent.shell(
            name,
            f"mkdir -p {Path(trust).parent}; cat > {trust} <<'END'\n{authority}END\n"
            f"! command -v update-ca-certificates > /dev/null || update-ca-certificates > /dev/null\n"
            f"echo {address} pkgs.tailscale.com >> /etc/hosts; test ! -e {SOURCE}",
        )
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=self._directory / "packages")
        with http.server.ThreadingHTTPServer((address, 443), handler) as server:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._directory / "server.crt", self._directory / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that the server has, by name: `id`, `ip_addresses`, `node_key`, `tags`, `online`."""
        return {node["name"]: node for node in self._call("nodes", "list") or []}

    def addresses(self) -> dict[str, str]:
        return {name: node["ip_addresses"][0] for name, node in self.nodes().items()}

    def expire(self, hostname: str, when: str = "") -> None:
        """End a node's key now, or at a time."""
        more = ("--expiry", when) if when else ()
        self._call("nodes", "expire", "-i", self._id(hostname), *more)

    def keep(self, hostname: str) -> None:
        """Have a node's key never end."""
        self._call("nodes", "expire", "-i", self._id(hostname), "--disable")

    def delete(self, hostname: str) -> None:
        self._call("nodes", "delete", "-i", self._id(hostname), "--force")

    def _id(self, hostname: str) -> str:
        return str(self.nodes()[hostname]["id"])

    def _call(self, *arguments: str, status: int | None = 0) -> Any:
        line = ["headscale", "-c", str(self._config), "-o", "json", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            assert status is None, f"{arguments}: {done.stdout}{done.stderr}"
            return None
        return json.loads(done.stdout) or []


@contextmanager
def tailnet(sandbox: str) -> Iterator[Tailnet]:
    with tempfile.TemporaryDirectory() as directory:
        network = Tailnet(sandbox, Path(directory))
        try:
            network.start()
            yield network
        finally:
            network.stop()


def _certificates(directory: Path, address: str) -> None:
    """A certificate authority, and the server's certificate by it."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    new = ("openssl", "req", "-x509", *curve, "-nodes", "-days", "9")
    authority = ("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test authority")
    server = ("-keyout", "server.key", "-out", "server.crt", "-subj", f"/CN={address}")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", f"subjectAltName=IP:{address},DNS:pkgs.tailscale.com")
    leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
    for options in (authority, (*server, *signed, *leaf)):
        subprocess.run([*new, *options], cwd=directory, check=True, capture_output=True, timeout=60)


def _package(shared: Path, certificate: Path) -> str:
    """Make a package and an apt source of it in the directory that all hosts see. Returns the line for apt."""
    place, tree = shared / "apt", shared / "package"
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    control = (
        f"Package: tailscale\nVersion: 1.102.5\nArchitecture: {architecture}\nMaintainer: tests <tests@example.org>\n"
        "Depends: ca-certificates\nDescription: Tailscale for tests\n"
    )
    texts = {
        "lib/systemd/system/tailscaled.service": UNIT,
        "etc/default/tailscaled": "PORT=41641\nFLAGS=\n",
        "usr/local/share/ca-certificates/test-authority.crt": certificate.read_text(),
        "DEBIAN/control": control,
        "DEBIAN/postinst": AFTER_INSTALL,
    }
    for name, text in texts.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755 if name == "DEBIAN/postinst" else 0o644)
    for program, name in (("tailscale", "usr/bin/tailscale"), ("tailscaled", "usr/sbin/tailscaled")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(shutil.which(program)), tree / name)
    place.mkdir(exist_ok=True)
    package = place / "tailscale.deb"
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(package)]
    subprocess.run(build, check=True, capture_output=True, timeout=60)
    shutil.rmtree(tree)
    data = package.read_bytes()
    listed = f"Filename: ./tailscale.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (place / "Packages").write_text(control + listed)
    return f"deb [trusted=yes signed-by={KEYRING}] file:/shared/apt ./\n"
