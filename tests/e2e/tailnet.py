"""A tailnet for tests: a stand-in for Tailscale's programs on lent hosts, and the hands of its administrator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.lent import Lent

from shoal.providers.sandbox.layout import Layout, cache_dir

STAND_IN = Path(__file__).with_name("tailscale_stand_in.py")

# As the package of the real one has it.
UNIT = """\
[Unit]
Description=Tailscale node agent
After=network-pre.target

[Service]
EnvironmentFile=/etc/default/tailscaled
ExecStart=/usr/sbin/tailscaled --state=/var/lib/tailscale/tailscaled.state \
--socket=/run/tailscale/tailscaled.sock --port=${PORT} $FLAGS
Restart=on-failure
RuntimeDirectory=tailscale
Type=notify

[Install]
WantedBy=multi-user.target
"""


class Tailnet:
    """The control server of the stand-in, which is a directory that all hosts of a sandbox see."""

    programs = "a stand-in for tailscale and tailscaled"

    def __init__(self, made_as: str) -> None:
        self.directory = Layout(cache_dir(), made_as).shared / "tailnet"
        for name in ("keys", "nodes", "relayed"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    def install(self, lent: Lent, name: str) -> None:
        """Put the programs on a host, stopped, as a package does where Shoal installs it."""
        lent.shell(
            name,
            f"cat > /usr/bin/tailscale << 'END'\n{STAND_IN.read_text()}END\n"
            "chmod 755 /usr/bin/tailscale; cp /usr/bin/tailscale /usr/sbin/tailscaled\n"
            "printf 'PORT=41641\\nFLAGS=\\n' > /etc/default/tailscaled\n"
            f"cat > /etc/systemd/system/tailscaled.service << 'END'\n{UNIT}END\n"
            "systemctl daemon-reload\n",
        )

    def allow(self, key: str, **terms: Any) -> None:
        """Let a key bring hosts in. `terms`: reusable, revoked, and when the keys end that hosts get by it."""
        (self.directory / "keys" / key).write_text(json.dumps(terms))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the server knows of every host, by the name it has in the tailnet."""
        found = {path: json.loads(path.read_text()) for path in (self.directory / "nodes").iterdir()}
        return {node["hostname"]: {**node, "id": path.name} for path, node in found.items()}

    def change(self, hostname: str, **what: Any) -> None:
        """Change what the server thinks of a host: `expired` throws it out."""
        node = self.nodes()[hostname]
        path = self.directory / "nodes" / node.pop("id")
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps({**node, **what}))
        new.rename(path)

    def relay(self, hostname: str, relayed: bool) -> None:
        """Have the others say that packets to this host go through a relay."""
        path = self.directory / "relayed" / self.nodes()[hostname]["id"]
        path.touch() if relayed else path.unlink()
