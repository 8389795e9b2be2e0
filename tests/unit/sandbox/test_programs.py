"""How the machine's programs are called."""

import os
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import ProviderError
from shoal.sandbox.programs import call, call_logged, last_lines


async def test_program_gets_its_input_and_returns_its_output() -> None:
    assert await call("cat", stdin="hello\n") == "hello\n"


async def test_failed_program_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(ProviderError, match=r"`ls /nowhere/at/all` ended with status 2: ls: cannot access"):
        await call("ls", "/nowhere/at/all")
    assert "cannot access" in await call("ls", "/nowhere/at/all", check=False)


async def test_missing_program_is_named() -> None:
    with pytest.raises(ProviderError, match="the program no-such-program is not installed"):
        await call("no-such-program")


async def test_argument_is_never_read_by_a_shell() -> None:
    assert await call("echo", "$(id)", "; id") == "$(id) ; id\n"


async def test_logged_program_appends_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert await call_logged("echo", "one", log=log) == 0
    assert await call_logged("ls", "/nowhere/at/all", log=log) == 2
    assert log.read_text().startswith("one\nls: cannot access")


def test_last_lines_returns_fifteen_lines() -> None:
    assert last_lines("\n".join(str(n) for n in range(100))).split() == [str(n) for n in range(85, 100)]
    assert last_lines("") == "(it printed nothing)"


@cases("apart", False, True)
async def test_program_apart_gets_no_signals_of_our_group(apart: bool) -> None:
    group = await call("sh", "-c", "cut -d' ' -f5 /proc/$$/stat", apart=apart)
    assert (int(group) != os.getpgrp()) == apart
