"""A uv that all tests of environments share: installing it takes seconds."""

import fcntl
import os
from pathlib import Path

import pytest
from tests.unit.environments.test_environment_builder import Place


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a host keeps its local environments, with the uv that all processes of this run of pytest share."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    with (run / "uv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(run.glob("with-uv/.uv-*/shoal-environment.json")):
            made = Place(tmp_path_factory.mktemp("uv"), run / "with-uv").build("herring==1.0")
            assert made["event"] == "done", made
    local = tmp_path_factory.mktemp("host") / "local"
    local.mkdir()
    [tools] = run.glob("with-uv/.uv-*")
    (local / tools.name).symlink_to(tools)
    return local
