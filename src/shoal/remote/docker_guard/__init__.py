"""Stands before Docker on a node: it takes requests from processes of Slurm jobs only, and confines what they start.

Each user has a Docker daemon of their own, whose containers map root to an id without rights on the node.
"""

DAEMONS = "/run/shoal-docker"
"""Where the daemons of users have their sockets."""
CONFIG = "/etc/shoal/docker-guard.json"
SOCKET = "/run/docker.sock"
