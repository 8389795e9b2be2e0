"""The version table: how versions are parsed, which are compatible, and the findings about a skew."""

from itertools import pairwise

import pytest
from tests.support.cases import cases

from shoal.slurm.versions import (
    ONE_SLURM,
    SlurmRelease,
    Version,
    all_support,
    is_compatible,
    packaged_version,
    version_findings,
)

V = Version.parse


@cases(
    "text, version",
    ("slurm 22.05.8", Version(22, 5, 8)),
    ("slurm-wlm 24.11.5\n", Version(24, 11, 5)),
    ("22.05.8-4+deb12u3", Version(22, 5, 8)),
    ("1:23.11.4-1.2ubuntu5", Version(23, 11, 4)),
    ("26.05.5-1", Version(26, 5, 5)),
    ("slurm 23.11.0rc1", Version(23, 11, 0)),
    ("24.11", Version(24, 11, 0)),
)
def test_versions_are_parsed_from_commands_and_packages(text: str, version: Version) -> None:
    assert V(text) == version


@cases("text", "", "slurm", "slurm 2.6.5", "122.05.8", "22.5.8", "bash: slurmd: not found")
def test_text_without_a_version_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"no Slurm version in .*; expected text like 'slurm 22\.05\.8'"):
        V(text)


def test_version_is_printed_as_in_slurm() -> None:
    assert str(V("22.05.8-4+deb12u3")) == "22.05.8"
    assert str(V("22.05.8").release) == "22.05"
    assert V("22.05.8") < V("22.05.11") < V("23.02.0") < V("24.11.5")


TALKS = [
    # controller, node, whether it takes it: as compiled into the releases
    ("22.05.8", "20.11.9", True),
    ("22.05.8", "21.08.5", True),
    ("22.05.8", "22.05.2", True),
    ("22.05.8", "23.11.4", False),
    ("23.11.4", "22.05.8", True),
    ("23.11.4", "21.08.5", False),
    ("23.11.4", "24.11.5", False),
    ("24.11.5", "23.11.4", True),
    ("24.11.5", "23.02.8", True),
    ("24.11.5", "22.05.8", False),
    ("25.11.2", "24.05.8", True),
    ("25.11.2", "23.11.4", False),
    ("26.05.5", "24.11.5", True),
    ("26.05.5", "24.05.8", False),
    ("26.05.5", "22.05.8", False),
    ("26.11.0", "25.05.1", True),
    ("26.11.0", "24.11.5", False),
    ("19.05.1", "18.08.1", False),
]


@cases("controller, node, answer", *TALKS)
def test_compatibility_of_controller_and_node(controller: str, node: str, answer: bool) -> None:
    assert is_compatible(V(controller), V(node)) is answer


def test_every_release_is_compatible_with_itself_and_the_previous_release() -> None:
    releases = [
        *("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05", "26.11"),
        "27.05",
    ]
    assert all(is_compatible(V(release), V(release)) for release in releases)
    assert all(is_compatible(V(newer), V(older)) for older, newer in pairwise(releases))


def test_features_depend_on_the_release() -> None:
    assert [V(v).supports("cloud_reg_addrs") for v in ("22.05", "23.02", "23.11", "26.05")] == [
        True,
        True,
        False,
        False,
    ]
    assert [V(v).supports("cgroup_disabled") for v in ("22.05", "23.11", "24.05", "26.05")] == [
        False,
        False,
        True,
        True,
    ]
    assert [V(v).supports("supported") for v in ("21.08", "22.05", "30.05")] == [False, True, True]
    assert SlurmRelease(23, 11).supports("sackd") and not SlurmRelease(23, 2).supports("sackd")
    assert SlurmRelease(24, 11).supports("autodetect_nvidia") and not SlurmRelease(24, 5).supports("autodetect_nvidia")
    assert SlurmRelease(23, 2).supports("preempt_parameters") and not SlurmRelease(22, 5).supports("preempt_parameters")


def test_oldest_member_decides_about_a_feature() -> None:
    mixed = [V("26.05.5"), V("24.11.5"), V("25.05.1")]
    assert all_support("cgroup_disabled", mixed)
    assert not all_support("cgroup_disabled", [*mixed, V("23.11.4")])


@cases(
    "os_id, os_version, version",
    ("debian", "12", "22.05.8"),
    ("debian", "13", "24.11.5"),
    ("debian", "", "26.05.5"),
    ("debian", "sid", "26.05.5"),
    ("ubuntu", "22.04", "21.08.5"),
    ("ubuntu", "24.04", "23.11.4"),
    ("ubuntu", "26.04", "25.11.2"),
)
def test_packaged_version_of_a_distribution(os_id: str, os_version: str, version: str) -> None:
    assert packaged_version(os_id, os_version) == V(version)


def test_unknown_distribution_has_no_packaged_version() -> None:
    assert packaged_version("fedora", "42") is None
    assert packaged_version("debian", "9") is None


def test_hosts_inside_the_window_give_no_finding() -> None:
    assert version_findings(("ctl", V("26.05.5")), {"a": V("24.11.5"), "b": V("26.05.1")}) == []


def test_newer_node_is_reported_with_a_possible_controller() -> None:
    (finding,) = version_findings(("ctl", V("23.11.4")), {"a": V("24.11.5"), "b": V("23.11.4")})
    assert str(finding) == (
        "a: Slurm newer than the controller's, found Slurm 24.11.5; the controller ctl has 23.11.4 and talks to "
        f"22.05 to 23.11, {ONE_SLURM}; or make a the controller (its Slurm 24.11.5 talks to every other host); "
        "or install Slurm 22.05 to 23.11 on a; or take a out of the spec"
    )


def test_older_node_is_reported_with_the_accepted_releases() -> None:
    (finding,) = version_findings(("ctl", V("26.05.5")), {"a": V("22.05.8")})
    assert finding.host == "a"
    assert finding.level == "error"
    assert finding.what == "Slurm too old for the controller's"
    assert finding.found == "Slurm 22.05.8; the controller ctl has 26.05.5 and talks to 24.11 to 26.05"
    assert finding.fix == (
        f"{ONE_SLURM}; or bring all hosts to one release, as no Slurm talks to all of these; "
        "or install Slurm 24.11 to 26.05 on a; or take a out of the spec"
    )


def test_fix_names_a_controller_upgrade_when_nothing_else_helps() -> None:
    findings = version_findings(("ctl", V("22.05.8")), {"a": V("23.11.4")})
    assert findings[0].fix.startswith(
        f"{ONE_SLURM}; or make a the controller (its Slurm 23.11.4 talks to every other host)"
    )


def test_releases_of_old_distributions_are_known_as_too_old() -> None:
    for name, version in (("debian", "11"), ("ubuntu", "20.04"), ("ubuntu", "22.04")):
        packaged = packaged_version(name, version)
        assert packaged is not None and not packaged.supports("supported")


def test_slurm_before_22_05_is_rejected_with_the_fix_on_any_host() -> None:
    (node,) = version_findings(("ctl", V("22.05.8")), {"old": V("21.08.5")})
    assert (node.host, node.what, node.found) == ("old", "Slurm before 22.05 is not supported", "Slurm 21.08.5")
    assert node.fix == (
        f"{ONE_SLURM}; or upgrade the host to a distribution with a newer Slurm "
        "(Debian 12 has 22.05.8, Debian 13 has 24.11.5, Ubuntu 24.04 has 23.11.4, Ubuntu 26.04 has 25.11.2), "
        "or take it out of the spec"
    )
    (controller,) = version_findings(("ctl", V("21.08.5")), {"a": V("22.05.8")})
    assert controller.host == "ctl"


def test_every_incompatible_host_has_its_own_finding() -> None:
    others = {"a": V("22.05.8"), "b": V("26.05.5"), "c": V("24.11.5"), "d": V("21.08.5")}
    assert [f.host for f in version_findings(("ctl", V("24.11.5")), others)] == ["d", "a", "b"]
