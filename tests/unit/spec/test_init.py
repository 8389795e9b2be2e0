"""Every spec that init writes loads without findings."""

import re
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_text
from tests.support.fake_clusters import context_of
from tests.support.fake_world import lab, slurm_package

from shoal.errors import UsageError
from shoal.spec.loader import load_all, load_text_all
from shoal.spec.members import members
from shoal.spec.rental import KINDS
from shoal.verbs.check import check
from shoal.verbs.init import init, init_text, ssh_hosts

CONFIG = """\
# my machines
Host desktop  gpu01 "gpu02"
    HostName 10.0.0.1
Host *.lab !bad gpu0?
    User ubuntu
host=front # the door
Include more/*.conf
Match host x
"""

FISH = ("fish1", "fish2")
HOSTS = {
    "a sandbox": (None, [("controller", {"controller"}, None), *((name, {"compute"}, None) for name in FISH)]),
    "one host computes": (["desktop"], [("desktop", {"controller", "compute"}, None)]),
    "the first of several is the controller": (
        ["ctl", "root@gpu[01-02]:2222"],
        [("ctl", {"controller"}, None), ("gpu01", {"compute"}, None), ("gpu02", {"compute"}, None)],
    ),
    "addresses get names": (
        ["root@10.0.0.1:22", "u@[fe80::1]"],
        [("node1", {"controller"}, "10.0.0.1"), ("node2", {"compute"}, "fe80::1")],
    ),
    "an address is called after its place among all hosts": (
        ["desk", "gpu[01-03]", "10.0.0.5", "node6", "10.0.0.6"],
        [
            ("desk", {"controller"}, None),
            *((f"gpu0{number}", {"compute"}, None) for number in (1, 2, 3)),
            ("node5", {"compute"}, "10.0.0.5"),
            ("node6", {"compute"}, None),
            ("node7", {"compute"}, "10.0.0.6"),
        ],
    ),
    "a name that YAML would read otherwise": (
        ["ctl", "true", "1e3x"],
        [("ctl", {"controller"}, None), ("true", {"compute"}, None), ("1e3x", {"compute"}, None)],
    ),
}


@cases("name", *HOSTS)
def test_spec_for_hosts_loads_without_findings(name: str) -> None:
    hosts, expected = HOSTS[name]
    spec, findings = load_text_all(init_text(hosts, None, "reef"), "s.yaml")
    assert findings == []
    assert [(member.name, set(member.roles), member.address) for member in members(spec)] == expected
    if name == "addresses get names":
        assert [(member.user, member.port) for member in members(spec)] == [("root", 22), ("u", None)]


def test_spec_loads_with_every_commented_line_enabled() -> None:
    for hosts in (None, ["a", "b"]):
        text = init_text(hosts, None, "reef")
        for line in ("# max_time", "# cpus", "# memory", "# image", "# user", "# firewall"):
            text = text.replace(line, line[2:])
        for line in ("# storage:", "#   /shared", "# environments:", "#   torch"):
            text = text.replace(f"\n{line}", f"\n{line[2:]}")
        spec, findings = load_text_all(text, "s.yaml")
        assert findings == []
        assert spec.firewall is False
        assert (list(spec.storage), list(spec.environments)) == (["/shared"] if hosts else [], ["torch"])


def test_every_literal_alias_of_an_ssh_config_is_a_host(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.conf").write_text("Host rack01 gpu01\nInclude more/b.conf\n")
    config = tmp_path / "config"
    config.write_text(CONFIG)
    assert ssh_hosts(config) == (["desktop", "gpu01", "gpu02", "front", "rack01"], {})
    spec, findings = load_text_all(init_text(None, config, "reef"), "s.yaml")
    assert findings == []
    assert [member.name for member in members(spec)] == ["desktop", "gpu01", "gpu02", "front", "rack01"]


def test_jump_hosts_and_git_servers_of_an_ssh_config_are_skipped_and_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host door\n  HostName door.example.org\nHost github.com\n  User git\nHost work\n  HostName ssh.github.com\n"
        "Host desk gpu01\n  ProxyJump me@door:2222,inner\nHost inner\nHost old\n  ProxyCommand ssh -W %h:%p last\n"
        "Host last\nHost repo\n  Include more\n  User git\nHost *\n  User me\n"
    )
    (tmp_path / "more").write_text("Host tape\n  ProxyJump none\n")
    left_out = dict.fromkeys(("door", "inner", "last"), "a jump host")
    left_out |= dict.fromkeys(("github.com", "work", "repo"), "git")
    assert ssh_hosts(config) == (["desk", "gpu01", "old", "tape"], left_out)
    text = init_text(None, config, "reef")
    assert "# Left out of the SSH config: door (a jump host).\n" in text
    spec, findings = load_text_all(text, "s.yaml")
    assert findings == []
    assert [member.name for member in members(spec)] == ["desk", "gpu01", "old", "tape"]
    config.write_text("Host github.com\n")
    assert error_text(UsageError, init_text, None, config, "reef") == (
        f"{config} names no host that could run jobs\n"
        "  fix: wildcards, jump hosts and git servers do not count; use --hosts"
    )


def test_impossible_input_is_rejected_with_the_reason(tmp_path: Path) -> None:
    wildcards = tmp_path / "config"
    wildcards.write_text("Host *\n")
    none_named = "names no host\n  fix: wildcards, jump hosts and git servers do not count; use --hosts"
    cannot_read = f"cannot read {tmp_path}/none: No such file or directory\n  fix: name an SSH config file"
    cases: list[tuple[list[str] | None, Path | None, str, str]] = [
        ([], None, "reef", "no hosts are given\n  fix: name them: --hosts gpu01,gpu02"),
        (["a"], wildcards, "reef", "both hosts and an SSH config are given\n  fix: give one of them"),
        (None, wildcards, "reef", f"{wildcards} {none_named}"),
        (None, tmp_path / "none", "reef", cannot_read),
        (
            ["a", "b", "b"],
            None,
            "reef",
            'cannot make a spec of this: duplicate host, "b", it is named at nodesets.nodes.hosts[0] already\n'
            "  fix: change these names",
        ),
        (
            ["a'\nfirewall"],
            None,
            "re: ef",
            'cannot make a spec of this: not a cluster name, "re: ef", use a lower-case letter, then lower-case '
            'letters, digits and `-`; not a host name, "a\' firewall", '
            "use letters, digits, `-` and `.`, at most 63 characters\n  fix: change these names",
        ),
    ]
    for hosts, config, cluster, expected in cases:
        assert error_text(UsageError, init_text, hosts, config, cluster) == expected


def test_init_writes_the_file_once_and_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    text = init(path, hosts=["a", "b"], cluster="reef")
    assert path.read_text() == text
    assert load_all(path)[1] == []
    assert error_text(UsageError, init, path) == f"{path} exists already\n  fix: edit it, or name another file"
    assert path.read_text() == text
    with pytest.raises(UsageError, match=r"cannot write .*No such file or directory"):
        init(tmp_path / "none" / "shoal.yaml")


RENTALS = {
    "aws:p5.48xlarge": "file:~/.aws/credentials",
    "digitalocean:gpu-h100x1-80gb": "env:DIGITALOCEAN_TOKEN",
    "gcp:a2-highgpu-1g": "file:~/service-account.json",
    "lambda:gpu_1x_a10": "env:LAMBDA_API_KEY",
    "nebius:gpu-h100-sxm 1gpu-16vcpu-200gb": "file:~/.nebius/credentials.json",
    "paperspace:A4000": "env:PAPERSPACE_API_KEY",
    "runpod:NVIDIA H200": "env:RUNPOD_API_KEY",
    "vast:8x H100 SXM": "env:VAST_API_KEY",
}
PAGES = Path(__file__).parents[3] / "docs"


def test_clusters_that_rent_get_one_slurm_for_all_hosts() -> None:
    for hosts in (["desktop"], ["desktop", "gpu01"]):
        for rent, key in RENTALS.items():
            spec, findings = load_text_all(init_text(hosts, None, "reef", rent), "s.yaml")
            provider, _, machine = rent.partition(":")
            assert not findings and spec.slurm.source == "shoal" and spec.auth == "slurm"
            assert spec.nodesets["rented"].type == machine and spec.providers[provider].key == key
            assert "rented" in spec.partitions["main"].nodesets and spec.budget is not None
            assert spec.network.kind == ("lan" if provider in ("runpod", "vast") else "wireguard")
    spec, _ = load_text_all(init_text(["desktop", "gpu01"], None, "reef"), "s.yaml")
    assert spec.slurm.source == "packages" and "# slurm: {from: shoal}" in init_text(["a", "b"], None, "reef")
    with pytest.raises(UsageError, match="'lambda' names no machine to rent"):
        init_text(["desktop"], None, "reef", "lambda")
    with pytest.raises(UsageError, match="machines are rented for a cluster of hosts"):
        init_text(None, None, "reef", "lambda:gpu_1x_a10")


def test_key_of_every_provider_is_the_one_on_its_page() -> None:
    keys = {rent.partition(":")[0]: key for rent, key in RENTALS.items()}
    assert {*keys} == {*KINDS} - {"sandbox"}
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for provider, key in keys.items():
        assert re.search(rf"{provider}:\s+(\{{)?key: {re.escape(key)}", pages), (provider, key)


async def test_line_of_one_slurm_is_the_one_that_check_prints_for_a_mix() -> None:
    commented = next(line for line in init_text(["a", "b"], None, "reef").splitlines() if "slurm:" in line)
    world = lab(c1={"packages": slurm_package("26.05.5-1")})
    found = [finding for finding in await check(context_of(world)) if finding.level == "error"]
    assert {finding.host for finding in found} == {"n1", "n2"}
    assert all(f"write `{commented.removeprefix('# ')}` into the file" in finding.fix for finding in found)
