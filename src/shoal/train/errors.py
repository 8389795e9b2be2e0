"""The errors of the training library, as one tree.

    TrainError
    ├── EnvError            the launcher's variables contradict each other, or lack something
    ├── RendezvousError     the ranks did not find each other
    ├── BindingError        ranks and GPUs do not match
    ├── CheckpointError     what is saved does not fit, or none of it is whole
    └── ParallelError       the model cannot be spread over the ranks as asked

Each says what was asked, what was found, and what to do. `Leaving` is no error: it ends a process that has saved its
work.
"""

from __future__ import annotations


class TrainError(RuntimeError):
    """Training cannot go on, and the user can do something about it."""

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
    """The ranks did not find each other."""


class BindingError(TrainError):
    """Ranks and GPUs do not match."""


class CheckpointError(TrainError):
    """What is saved does not fit the objects at hand, or none of it is whole."""


class ParallelError(TrainError):
    """The model cannot be spread over the ranks as asked."""


class Leaving(SystemExit):
    """The job must stop: its work is saved as far as it can be, and this process ends."""

    def __init__(self, status: int, *, comes_back: bool) -> None:
        super().__init__(status)
        self.comes_back = comes_back
        """The job goes back into the queue; otherwise somebody cancelled it, or nothing could be saved."""
