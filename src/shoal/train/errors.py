"""The errors of the training library, as one tree.

    TrainError
    ├── EnvError            the launcher's variables contradict each other, or lack something
    ├── RendezvousError     the ranks cannot connect to each other
    ├── BindingError        ranks and GPUs do not match
    ├── CheckpointError     the checkpoint does not fit, or none is complete
    ├── ParallelError       the model cannot be distributed as requested
    └── DataError           the data cannot be read

Each has a message, what was found, and the fix. `StopExit` is not an error: it ends a process that has saved its work.
"""

from __future__ import annotations


class TrainError(RuntimeError):
    """Training cannot continue, and the user can fix the cause."""

    def __init__(self, what: str, *, found: str = "", fix: str = "") -> None:
        lines = [what]
        if found:
            lines.append("  found: " + found.replace("\n", "\n         "))
        if fix:
            lines.append("  fix: " + fix.replace("\n", "\n       "))
        super().__init__("\n".join(lines))
        self.what, self.found, self.fix = what, found, fix


class EnvError(TrainError):
    """The launcher's variables contradict each other, or lack something."""


class RendezvousError(TrainError):
    """The ranks cannot connect to each other."""


class BindingError(TrainError):
    """Ranks and GPUs do not match."""


class CheckpointError(TrainError):
    """The checkpoint does not fit the objects to restore, or none is complete."""


class ParallelError(TrainError):
    """The model cannot be distributed over the ranks as requested."""


class StopExit(SystemExit):
    """The job must stop: its work is saved as far as possible, and this process ends."""

    def __init__(self, status: int, *, requeued: bool) -> None:
        super().__init__(status)
        self.requeued = requeued
        """The job is queued again; otherwise a user cancelled it, or nothing could be saved."""


class DataError(TrainError):
    """The data cannot be read as requested."""
