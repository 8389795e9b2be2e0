"""The fake host of other tests, which show most of it: what none of them would notice."""

import pytest

from shoal.errors import Unreachable
from shoal.hosts.api import Target
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost


async def test_exception_in_the_script_reaches_the_test() -> None:
    def broken(call: Call) -> bytes:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        await FakeHost("n1", broken).run(["true"])


async def test_host_that_is_not_in_the_table_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="no address is known for 'n4'"):
        await FakeConnector(FakeHost("n3")).connect(Target("n4"))
