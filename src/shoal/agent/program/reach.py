"""Which addresses of others answer this host."""

from __future__ import annotations

import errno
import os
import select
import time

from shoal.agent.program.fast_stdlib import socket


def reach(targets: list[list[object]], seconds: float) -> list[str]:
    """Connect to all `[address, port]` at once. `open` and `refused` mean that somebody answered, `silent` that
    nobody did within `seconds`; anything else is what the kernel says against it."""
    answers = [""] * len(targets)
    waiting = {}
    poll = select.poll()
    for index, (address, port) in enumerate(targets):
        link = socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        answers[index] = _said(link.connect_ex((address, port)))
        if answers[index]:
            link.close()
            continue
        waiting[link.fileno()] = (index, link)
        poll.register(link, select.POLLOUT)
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0.0, left) * 1000)
        for fd, _ in ready:
            index, link = waiting.pop(fd)
            answers[index] = _said(link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            poll.unregister(fd)
            link.close()
        if not ready and left <= 0:  # looked once more after the time was over: a busy host comes late to its answers
            break
    for index, link in waiting.values():
        answers[index] = "silent"
        link.close()
    return answers


def _said(error: int) -> str:
    if error == errno.EINPROGRESS:
        return ""
    if error == 0:
        return "open"
    return "refused" if error == errno.ECONNREFUSED else os.strerror(error)
