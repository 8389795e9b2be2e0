"""How each host gets at a share, and why not in a better way."""

from __future__ import annotations

import pytest

from shoal.agent.facts import Facts
from shoal.spec.storage import SharedDirectory
from shoal.storage.ways import Way, served_by_kernel, server_of, way

NFS, SSHFS, STAGE = (SharedDirectory(kind=kind) for kind in ("nfs", "sshfs", "stage"))
WHOLE = Facts(filesystems=("nfs4", "nfsd"), fuse=True)
FUSE = Facts(fuse=True)
POD = Facts()


@pytest.mark.parametrize(
    ("share", "facts", "expected"),
    [
        pytest.param(NFS, WHOLE, Way("nfs"), id="a whole host"),
        pytest.param(NFS, FUSE, Way("sshfs", "its kernel has no NFS"), id="no NFS"),
        pytest.param(NFS, POD, Way("stage", "its kernel has no NFS; it has no FUSE"), id="neither"),
        pytest.param(SSHFS, WHOLE, Way("sshfs"), id="SSH as asked"),
        pytest.param(SSHFS, POD, Way("stage", "it has no FUSE"), id="SSH and no FUSE"),
        pytest.param(STAGE, WHOLE, Way("stage"), id="a copy as asked"),
    ],
)
def test_a_host_takes_the_best_way_it_is_capable_of(share: SharedDirectory, facts: Facts, expected: Way) -> None:
    assert way(share, "c1", "n1", facts) == expected


def test_the_host_that_keeps_a_share_has_it_as_it_is() -> None:
    assert way(NFS, "c1", "c1", POD) == Way("local")


def test_the_word_controller_means_the_controller_whatever_its_name() -> None:
    assert server_of(NFS, "desktop") == "desktop"
    assert server_of(SharedDirectory(host="n1"), "desktop") == "n1"


def test_a_kernel_without_nfsd_leaves_it_to_ganesha() -> None:
    assert served_by_kernel(WHOLE)
    assert not served_by_kernel(Facts(filesystems=("nfs4",)))
