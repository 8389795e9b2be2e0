"""What is wrong with the machine that the command runs on: a full disk, a directory that may not be written to."""

from __future__ import annotations

import errno

from shoal.errors import ShoalError

FIX = {
    errno.EACCES: "run it as the user whose file that is, or make it yours; what root made, only root may use",
    errno.EPERM: "run it as the user whose file that is, or make it yours; what root made, only root may use",
    errno.EROFS: "use a place that can be written to: XDG_STATE_HOME and XDG_CACHE_HOME name others",
    errno.ENOSPC: "make room on this machine's disk, then run the same command again",
    errno.EDQUOT: "make room in your home directory, then run the same command again",
    errno.EMFILE: "allow more open files (`ulimit -n 8192`), then run the same command again",
}
"""What to do, by what the operating system said."""


def trouble_here(error: BaseException | None) -> ShoalError | None:
    """What to tell of an error that this machine's operating system raised; None where it may be a bug of ours."""
    if not isinstance(error, OSError) or error.errno not in FIX:
        return None
    on = f"{error.filename}: " if error.filename else ""
    return ShoalError(f"this machine refuses: {on}{error.strerror}", hint=FIX[error.errno])
