"""Why MPI did not start in a job: the words of Open MPI and PMIx, and the cause behind each. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LINES = 10
"""Of the output are shown."""


@dataclass(frozen=True)
class MpiFailure:
    """One way in which MPI does not start."""

    pattern: re.Pattern[str]
    cause: str
    fix: str


_START = re.compile(
    r"orte_ess_init failed|orte_init failed|ompi_mpi_init|An error occurred in MPI_Init|PMIX ERROR|OPAL ERROR"
    r"|ORTE was unable to reliably start|ORTE daemon has unexpectedly failed|PMI support and therefore cannot"
    r"|pmixp?_\w+.*fail|PMIx_Init failed"
)
"""How Open MPI, PMIx and Slurm's plugin for it begin."""

_FAILURES = (
    # The first that fits counts: a full disk makes PMIx fail in many ways.
    MpiFailure(
        re.compile(r"No space left on device|OUT-OF-RESOURCE|not enough space"),
        "there is no room left in /tmp or /dev/shm on the node",
        "free space there (`shoal doctor` names the file system), or set PMIX_MCA_gds=hash for the job",
    ),
    MpiFailure(
        re.compile(r"session_dir|opal_os_dirpath_create|session directory|TMPDIR", re.IGNORECASE),
        "the directory for temporary files (TMPDIR) is missing on the node, or cannot be written",
        "make it on every node, or unset TMPDIR for the job; with an image, mount it there too",
    ),
    MpiFailure(
        re.compile(r"PMI support|OPAL ERROR: Unreachable|ext\dx_client|undefined.*PMI"),
        "the program was started by srun without PMIx (--mpi=none or pmi2), which its Open MPI needs",
        "use `shoal run --launcher pmix`, or `srun --mpi=pmix`; `srun --mpi=list` shows what Slurm has",
    ),
    MpiFailure(
        re.compile(r"ds12|ds21|UNPACK-|PACK-MISMATCH|gds|version.*mismatch|BAD-PARAM|psec"),
        "the PMIx of the program and that of Slurm are of different releases, as often in an image or with conda",
        "set PMIX_MCA_gds=hash and PMIX_MCA_psec=native for the job, or use an Open MPI of the nodes' release",
    ),
    MpiFailure(
        re.compile(r"unable to reliably start|unexpectedly failed|oob_tcp|tcp_peer|No route to host|timed out"),
        "mpirun's helper on another node could not call back: a firewall, or an address that is not reached",
        "let nodes reach each other on every port; with several networks name one: "
        "OMPI_MCA_oob_tcp_if_include and OMPI_MCA_btl_tcp_if_include",
    ),
)
_UNKNOWN = MpiFailure(
    re.compile(""),
    "Open MPI gives no known cause",
    "compare `mpirun --version` and `srun --mpi=list` on the nodes; a conda mpirun hides the system's",
)


def explain_mpi(lines: Sequence[str]) -> tuple[MpiFailure, tuple[str, ...]] | None:
    """The failure of MPI's start that these lines show, with the lines; None where they show none."""
    first = next((number for number, text in enumerate(lines) if _START.search(text)), None)
    if first is None:
        return None
    shown = tuple(text for text in lines[first:] if text.strip(" -"))[:MAX_LINES]
    text = "\n".join(lines)
    return next((failure for failure in _FAILURES if failure.pattern.search(text)), _UNKNOWN), shown
