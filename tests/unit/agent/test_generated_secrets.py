"""Secrets that a host generates, and the files that contain them."""
# ruff: noqa: ASYNC240 - a test has nothing else to wait for

import os
import re
import stat
from pathlib import Path

from agent_place import ME, Place

from shoal.agent.document import Secret


async def test_secret_is_generated_once_and_closed_to_others(place: Place) -> None:
    secret = Secret(place.path("keys/database"), **ME, digits=40)
    (made,) = await place.apply(secret)
    assert (made.status, made.action, made.diff) == ("changed", f"make the secret {secret.path}", "(secret)")
    value = Path(secret.path).read_text()
    assert re.fullmatch("[0-9a-f]{40}\n", value) and stat.S_IMODE(os.stat(secret.path).st_mode) == 0o400
    assert (await place.apply(secret))[0].status == "ok" and Path(secret.path).read_text() == value
    os.chmod(secret.path, 0o644)
    (mended,) = await place.apply(secret)
    assert mended.action == f"set mode 0400 on {secret.path}"
    assert Path(secret.path).read_text() == value and stat.S_IMODE(os.stat(secret.path).st_mode) == 0o400


async def test_generated_secrets_differ(place: Place) -> None:
    await place.apply(Secret(place.path("one"), **ME), Secret(place.path("two"), **ME))
    assert Path(place.path("one")).read_text() != Path(place.path("two")).read_text()


async def test_secret_is_inserted_on_the_host_and_never_shown(place: Place) -> None:
    secret = Secret(place.path("password"), **ME)
    conf = place.file("d.conf", "User=slurm\nPass=@WORD@\n", mode=0o600, fills=(("@WORD@", secret.path),))
    _, planned = await place.check(secret, conf)
    assert (planned.status, planned.diff) == ("change", "(secret)")
    assert {item.status for item in await place.apply(secret, conf)} == {"changed"}
    word = Path(secret.path).read_text().strip()
    assert Path(conf.path).read_text() == f"User=slurm\nPass={word}\n"
    assert {item.status for item in await place.apply(secret, conf)} == {"ok"}
    Path(conf.path).write_text(f"User=root\nPass={word}\n")
    _, found = await place.apply(secret, conf)
    assert (found.action, found.diff) == (f"update {conf.path}", "(secret)")
    assert word not in repr(found) and not any(word in text for text in place.told)


async def test_file_with_a_missing_secret_is_not_written(place: Place) -> None:
    conf = place.file("d.conf", "Pass=@WORD@\n", fills=(("@WORD@", place.path("none")),))
    (failed,) = await place.apply(conf)
    assert failed.status == "failed" and "the value of the secret for" in failed.detail
    assert not Path(conf.path).exists()
