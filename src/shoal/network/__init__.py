"""How members reach each other: addresses, names, firewall, WireGuard, Tailscale, tunnels into containers.

Pure functions that choose addresses and peers, and render the files of a host as text.
May import agent (facts), spec and below.
"""
