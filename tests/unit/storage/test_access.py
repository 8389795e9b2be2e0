"""How each host accesses a share, and what prevents better access."""

import pytest
from tests.support.cases import cases

from shoal.agent.facts import Facts
from shoal.spec.storage import SharedDirectory
from shoal.storage.nfs import ShareAccess, choose_access, kernel_serves_nfs

NFS, SSHFS, STAGE = (SharedDirectory(kind=kind) for kind in ("nfs", "sshfs", "stage"))
WHOLE = Facts(filesystems=("nfs4", "nfsd"), fuse=True)
FUSE = Facts(fuse=True)
POD = Facts()


@cases(
    "share, facts, expected",
    pytest.param(NFS, WHOLE, ShareAccess("nfs"), id="a whole host"),
    pytest.param(NFS, FUSE, ShareAccess("sshfs", "its kernel has no NFS"), id="no NFS"),
    pytest.param(NFS, POD, ShareAccess("stage", "its kernel has no NFS; it has no FUSE"), id="neither"),
    pytest.param(SSHFS, WHOLE, ShareAccess("sshfs"), id="SSH as asked"),
    pytest.param(SSHFS, POD, ShareAccess("stage", "it has no FUSE"), id="SSH and no FUSE"),
    pytest.param(STAGE, WHOLE, ShareAccess("stage"), id="a copy as asked"),
)
def test_host_uses_the_best_supported_access(share: SharedDirectory, facts: Facts, expected: ShareAccess) -> None:
    assert choose_access(share, "c1", "n1", facts) == expected


def test_server_of_a_share_uses_its_own_directory() -> None:
    assert choose_access(NFS, "c1", "c1", POD) == ShareAccess("local")


def test_controller_keyword_resolves_to_the_controller() -> None:
    assert NFS.server("desktop") == "desktop" and SharedDirectory(host="n1").server("desktop") == "n1"


def test_ganesha_serves_without_kernel_nfsd() -> None:
    assert kernel_serves_nfs(WHOLE) and not kernel_serves_nfs(Facts(filesystems=("nfs4",)))
