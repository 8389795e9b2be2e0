"""How packages are installed, also when apt fails.

The program runs in its own mount namespace, with scripts in place of apt-get and dpkg.
"""

import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_place import Apart, Place

from shoal.agent.client import AgentSession, ItemEvent
from shoal.agent.document import Packages
from shoal.remote.agent.packages import POLICY_TEXT

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/apt-get").exists(), reason="needs root and apt")

SETUP = """
mkdir -p /var/lib/apt/lists && mount --bind "$1/dpkg" /var/lib/dpkg && mount --bind "$1/lists" /var/lib/apt/lists &&
mount --bind "$1/apt-get" /usr/bin/apt-get && mount --bind "$1/dpkg-program" /usr/bin/dpkg &&
mount --bind "$1/sbin" /usr/sbin || exit 1
shift
exec "$@"
"""
APT_GET = """#!/bin/sh
cd "{folder}" || exit 9
echo "$*" >> calls
test -e /usr/sbin/policy-rc.d && /usr/sbin/policy-rc.d; echo "policy $?" >> calls
next="$(head -n1 answers)"; sed -i 1d answers
case "$next" in ?*) echo "$next"; exit 100;; esac
case "$*" in
*" update") touch lists/x_Packages;;
*" install "*)
    printf 'dlstatus:1:52.5:Retrieving\\npmstatus:tree:41.0:Installing tree\\n' >&3
    printf 'Package: tree\\nStatus: install ok installed\\nVersion: 2.1\\n\\n' >> dpkg/status;;
esac
"""
DPKG = """#!/bin/sh
cd "{folder}" && echo "dpkg $*" >> calls && sed -i 's/half-configured/installed/' dpkg/status
"""
ITEM = Packages(("tree",))


class AptPlace(Place):
    def answers(self, *lines: str) -> None:
        """The error of apt-get, call by call; "" for a call that succeeds."""
        (self.folder / "answers").write_text("".join(line + "\n" for line in lines))

    def calls(self, about: str = "") -> list[str]:
        """What was run, and the policy for daemons that it found."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if about in line]

    @property
    def policy(self) -> Path:
        return self.folder / "sbin/policy-rc.d"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[AptPlace]:
    for name in ("dpkg/updates", "lists", "sbin"):
        (tmp_path / name).mkdir(parents=True)
    for name, text in (("apt-get", APT_GET), ("dpkg-program", DPKG)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    for name in ("dpkg/status", "dpkg/lock-frontend", "lists/x_Packages", "answers"):
        (tmp_path / name).touch()
    async with await AgentSession.open(Apart(tmp_path, SETUP), state=str(tmp_path / "state")) as opened:
        yield AptPlace(tmp_path, opened)


async def test_packages_install_once_with_progress_and_without_recommended_packages(place: AptPlace) -> None:
    assert [(await place.apply(ITEM))[0].status for _ in range(2)] == ["changed", "ok"]
    (call,) = place.calls("install")
    assert call.endswith(" --no-install-recommends install tree")
    assert [text for text in place.told if text] == ["download 50%", "install 40% (tree)"]


async def test_daemons_are_blocked_only_while_packages_install(place: AptPlace) -> None:
    await place.apply(ITEM)
    assert place.calls("policy") == ["policy 101"] and not place.policy.exists()


async def test_existing_policy_rc_d_is_kept(place: AptPlace) -> None:
    place.policy.write_text("#!/bin/sh\nexit 7\n")
    place.policy.chmod(0o755)
    await place.apply(ITEM)
    assert place.calls("policy") == ["policy 7"]
    assert place.policy.read_text() == "#!/bin/sh\nexit 7\n"


async def test_policy_rc_d_of_a_killed_run_is_removed(place: AptPlace) -> None:
    place.policy.write_bytes(POLICY_TEXT)
    await place.apply()
    assert not place.policy.exists()


async def test_policy_rc_d_of_a_killed_run_stays_until_its_dpkg_ends(place: AptPlace) -> None:
    place.policy.write_bytes(POLICY_TEXT)
    kept: list[bool] = []
    with (place.folder / "dpkg/lock-frontend").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)

        def release(event: ItemEvent) -> None:
            kept.append(place.policy.exists())
            fcntl.lockf(lock, fcntl.LOCK_UN)

        await place.session.apply((), {}, release)
    assert kept == [True] and not place.policy.exists()


async def test_missing_package_lists_are_fetched_first(place: AptPlace) -> None:
    (place.folder / "lists/x_Packages").unlink()
    assert (await place.apply(ITEM))[0].status == "changed"
    assert [call.split()[-1] for call in place.calls("-q")] == ["update", "tree"]


async def test_failed_download_is_retried_and_reported(place: AptPlace) -> None:
    place.answers("E: Failed to fetch x  404  Not Found")
    assert (await place.apply(ITEM))[0].status == "changed"
    assert "apt: Failed to fetch x  404  Not Found; trying again in 2 s (2 of 3)" in place.told
    assert [call.split()[-1] for call in place.calls("-q")] == ["tree", "update", "tree"]


async def test_missing_package_fails_after_a_single_list_update(place: AptPlace) -> None:
    place.answers("E: Unable to locate package tree", "", "E: Unable to locate package tree")
    (found,) = await place.apply(ITEM)
    assert found.detail == "apt-get install tree failed\nE: Unable to locate package tree"


async def test_expired_lists_are_accepted_only_on_a_second_try(place: AptPlace) -> None:
    (place.folder / "lists/x_Packages").unlink()
    place.answers("E: Release file for x is expired (invalid since 3d). Updates for it will not be applied.")
    assert (await place.apply(ITEM))[0].status == "changed"
    first, second = place.calls(" update")
    assert "Check-Valid-Until" not in first and "Acquire::Check-Valid-Until=false" in second


async def test_full_disk_is_reported_with_sizes(place: AptPlace) -> None:
    place.answers("dpkg: error: failed to write (No space left on device)")
    (found,) = await place.apply(ITEM)
    assert found.detail.startswith("No space left on device while installing packages: /var/cache/apt")
    assert " MB free of " in found.detail and not place.policy.exists()


async def test_interrupted_installation_is_finished_first(place: AptPlace) -> None:
    (place.folder / "dpkg/status").write_text("Package: other\nStatus: install ok half-configured\nVersion: 1\n\n")
    assert (await place.apply(ITEM))[0].status == "changed"
    assert place.calls("--configure") == ["dpkg --configure -a --force-confdef --force-confold"]
    assert "dpkg: finishing an interrupted installation" in place.told


async def test_busy_lock_is_awaited_and_its_holder_named(place: AptPlace) -> None:
    told: list[str] = []
    with (place.folder / "dpkg/lock-frontend").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)

        def release(event: ItemEvent) -> None:
            told.append(event.text)
            fcntl.lockf(lock, fcntl.LOCK_UN)

        report = await place.session.apply((ITEM,), {}, release)
    assert report.changed == 1
    assert told[0].startswith("apt: waiting for ") and told[0].endswith(f"(pid {os.getpid()}) to release the lock")


async def test_other_package_manager_is_rejected_with_the_supported_manager(place: AptPlace) -> None:
    (place.folder / "apt-get").chmod(0o644)
    for results in (await place.check(ITEM), await place.apply(ITEM)):
        assert results[0].detail == (
            "this host's package manager is none; Shoal installs packages with apt (Debian, Ubuntu) or dnf (RHEL). "
            "Install tree by hand, or use a host that has apt"
        )


RPM = """#!/bin/sh
for name; do :; done
grep -qx "$name" "{folder}/rpms" && echo "$name 1.0-1" || {{ echo "package $name is not installed"; exit 1; }}
"""
DNF = """#!/bin/sh
echo "$*" >> "{folder}/calls"
[ -s "{folder}/answers" ] && cat "{folder}/answers" && exit 1
for name; do :; done
echo "$name" >> "{folder}/rpms"
"""


async def test_host_with_dnf_gets_the_packages_under_their_names_there(place: AptPlace) -> None:
    (place.folder / "apt-get").chmod(0o644)
    (place.folder / "rpms").touch()
    for name, text in (("rpm", RPM), ("dnf", DNF)):
        (place.folder / "sbin" / name).write_text(text.format(folder=place.folder))
        (place.folder / "sbin" / name).chmod(0o755)
    item = Packages(("nfs-common",))
    place.answers("Error: Unable to find a match: nfs-utils")
    [failed] = await place.apply(item)
    assert failed.detail.startswith("dnf install nfs-utils failed\n") and "Unable to find a match" in failed.detail
    place.answers()
    assert [result.status for result in await place.apply(item)] == ["changed"]
    assert place.calls("nfs-utils")[-1] == "-y -q --setopt=install_weak_deps=False install nfs-utils"
    assert [result.status for result in await place.apply(item)] == ["ok"] and not place.policy.exists()
