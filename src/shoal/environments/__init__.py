"""Python environments for jobs: what is in one, how a host makes it, and whether it fits the nodes."""
