"""The agent: runs on a host, reports its facts, and applies a document of items.

`agent/loader.py` sends its files over one connection. It reads one JSON request a line and answers in JSON lines until
`exit` or the end of its input. Start at `main.py` and `converge.py`; each kind of item has a file, in which `check_*`
only reads and `make_*` only changes.

It may be killed at any point: a file is written beside its place and renamed; a restart that a change makes due is
noted in `pending-restarts` before the change, and struck out after the restart.
"""
