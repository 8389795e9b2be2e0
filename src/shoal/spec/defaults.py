"""What holds where the file says nothing, for those who do not read the file: they need not load what does."""

from __future__ import annotations

WIREGUARD_SUBNET = "10.77.0.0/16"
WIREGUARD_PORT = 51820
