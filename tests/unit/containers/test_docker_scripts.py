"""What a job has in its environment for Docker, and how the daemons of users share addresses."""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.remote import program_text
from shoal.roles.job_engines import REMOVE_BRIDGES, containers_conf, daemon_service

IP = """\
#!/bin/sh
# Addresses are files; an answer takes a while, so that two programs at once would get the same one.
cd "$(dirname "$0")/addresses"
case $* in
    *"show dev "*) cat "$6" 2> /dev/null ;;
    "-4 -o address") cat * 2> /dev/null; sleep 0.3 ;;
    "address add "*) echo "2: $5 inet $3" > "$5" ;;
    "link show "*) false ;;
    "link add "*) mkdir -p "../ipv6/conf/$3" ;;
esac
"""


USERMOD = """\
#!/bin/sh
[ "$1 $3" = "--add-subuids --add-subgids" ] || exit 2
for file in subuid subgid; do echo "$5:${2%-*}:$((${2#*-} - ${2%-*} + 1))" >> "$(dirname "$0")/$file"; done
"""


def prolog(place: Path, **variables: str) -> list[str]:
    words = {"JOBS": str(place), "GUARD": str(place), "PODMAN": str(place / "none"), "PROGRAM": ""}
    text = program_text("task_prolog.sh", **words)
    environment = {"PATH": os.environ["PATH"], "HOME": str(place), "SLURM_JOB_ID": "8", **variables}
    done = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_job_that_a_job_submits_has_a_docker_config_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / pwd.getpwuid(os.getuid()).pw_name
    own.mkdir()
    expected = [f"export DOCKER_CONFIG={own}/docker-8", "export DOCKER_BUILDKIT=0"]
    assert prolog(tmp_path) == expected
    assert prolog(tmp_path, DOCKER_CONFIG=f"{own}/docker-7") == expected
    assert (own / "docker-8/config.json").read_text() == "{}\n"
    assert prolog(tmp_path, DOCKER_CONFIG="/home/ann/docker") == [], "the user's own stays"


def test_daemons_that_start_at_once_have_ids_and_addresses_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "addresses").mkdir()
    programs = {"ip": IP, "nft": "#!/bin/sh\ncat > /dev/null\n", "usermod": USERMOD}
    programs |= dict.fromkeys(("mountpoint", "useradd"), "#!/bin/sh\n")
    (tmp_path / "subuid").write_text("ann:100000:65536\nbob:231072:65536\n")
    (tmp_path / "subgid").write_text("ann:100000:65536\nbob:231072:70000\n")
    # A lock that stays with the daemon would keep all others from starting.
    programs["dockerd"] = '#!/bin/sh\n! [ -e /proc/self/fd/9 ] && echo "$@"\n'
    programs["id"] = '#!/bin/sh\necho "${2#user}"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    run = str(tmp_path / "run")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/daemon.json").write_text('{"default-runtime": "nvidia", "mtu": 1400}')
    words = {"DAEMONS": run, "STORE": "/store", "NETWORK": "172.30", "ACCOUNT": "shoal-docker-", "RUNTIME": "/runtime"}
    text = program_text("docker_daemon.sh", **words)
    text = text.replace("PATH=", f"PATH={tmp_path}:", 1).replace("/etc/", f"{tmp_path}/")
    text = text.replace("/proc/sys/net/ipv6", f"{tmp_path}/ipv6")
    (tmp_path / "ipv6").mkdir()
    daemons = [
        subprocess.Popen(["sh", "-c", text, "sh", f"user{number}"], stdout=subprocess.PIPE, text=True)
        for number in (1, 2, 3)
    ]
    for number, daemon in enumerate(daemons, 1):
        output, _ = daemon.communicate(timeout=60)
        assert daemon.returncode == 0 and f"--bridge docker{number} " in output
        assert f"--userns-remap shoal-docker-{number} " in output
        assert (tmp_path / f"ipv6/conf/docker{number}/disable_ipv6").read_text() == "1\n"
        assert (tmp_path / f"run/user{number}/daemon.json").read_text() == '{"mtu": 1400}'
    lines = [path.read_text() for path in (tmp_path / "addresses").iterdir()]
    assert sorted(line.split()[-1] for line in lines) == [f"172.30.{number}.1/24" for number in range(3)]
    for file in ("subuid", "subgid"):
        added = [line.split(":") for line in (tmp_path / file).read_text().splitlines()[2:]]
        assert sorted(name for name, _, _ in added) == [f"shoal-docker-{number}" for number in (1, 2, 3)]
        assert [row[1:] for row in added] == [[str(301072 + number * 65536), "65536"] for number in range(3)]


def test_runtime_takes_devices_from_the_files_of_a_container(tmp_path: Path) -> None:
    for name in ("runc", "mount"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\n')
        (tmp_path / name).chmod(0o755)
    mounts = [
        {"type": "bind", "source": "/dev/shm", "destination": "/shm", "options": ["rbind"]},
        {"type": "bind", "source": str(tmp_path), "destination": "/dev", "options": ["rbind", "ro"]},
        {"type": "tmpfs", "source": "tmpfs", "destination": "/t"},
        {"type": "tmpfs", "source": "tmpfs", "destination": "/dev", "options": ["nosuid"]},
        {"type": "devpts", "source": "devpts", "destination": "/dev/pts", "options": ["newinstance"]},
    ]
    root = tmp_path / "merged"
    root.mkdir()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"root": {"path": str(root)}, "mounts": mounts, "process": {"args": ["x"]}}))
    (tmp_path / "runtime.py").write_text(program_text("docker_runtime"))
    for words in ("state a", f"--root /r create --bundle {tmp_path} --pid-file p a"):
        command = [sys.executable, "-ISB", str(tmp_path / "runtime.py"), *words.split()]
        subprocess.run(command, check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    written = json.loads(config.read_text())
    bound, own, temporary, dev, pts = (mount["options"] for mount in written["mounts"])
    flags = os.statvfs("/dev/shm").f_flag
    kept = {name for name, flag in (("nosuid", os.ST_NOSUID), ("noexec", os.ST_NOEXEC)) if flags & flag}
    assert set(bound) == {"rbind", "nodev", *kept} and own[:2] == ["rbind", "ro"] and "nodev" in own
    assert (temporary, dev, pts) == (["nodev"], ["nosuid"], ["newinstance"])
    assert written["process"] == {"args": ["x"]}
    assert (tmp_path / "log").read_text().splitlines() == [
        "runc state a",
        f"mount -o remount,bind,nodev {root}",
        f"runc --root /r create --bundle {tmp_path} --pid-file p a",
    ]


@cases("proxy", "", "proxy: {http: 'http://proxy%1:3128', no_proxy: [n1, 10.0.0.0/8]}\n")
def test_pulls_go_through_the_proxy(proxy: str) -> None:
    spec = spec_of(f"cluster: reef\ncontroller: {{host: c1, compute: true}}\n{proxy}")
    unit, conf = daemon_service(spec.proxy), containers_conf(spec.proxy)
    if not proxy:
        assert "proxy" not in unit + conf
        return
    assert [line for line in unit.splitlines() if line.startswith("Environment")] == [
        'Environment="http_proxy=http://proxy%%1:3128"',
        'Environment="https_proxy=http://proxy%%1:3128"',
        'Environment="no_proxy=n1,10.0.0.0/8"',
    ]
    variables = '"http_proxy=http://proxy%1:3128", "https_proxy=http://proxy%1:3128", "no_proxy=n1,10.0.0.0/8"'
    assert conf.endswith(f'runtime = "crun"\nenv = [{variables}]\n')


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace with bridges")
def test_removal_leaves_interfaces_of_the_host_with_addresses_like_those_of_docker() -> None:
    make = """
        bridge() { ip link add "$1" type bridge && ip address add "$2/24" dev "$1"; }
        bridge docker2001 172.30.0.1; bridge br-0123456789ab 172.30.1.1
        bridge docker0 172.30.2.1; bridge lan0 172.30.3.1; bridge docker2002 10.0.0.1
        ip link add lan1 type veth peer name lan2 && ip address add 172.30.4.1/24 dev lan1
    """
    show = "ip -o link | sed 's/^[0-9]*: \\([^:@]*\\).*/\\1/' | grep -vx 'lo\\|ifb.*'"
    line = ["unshare", "--net", "sh", "-c", f"{make}\n{REMOVE_BRIDGES}\n{show}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["docker0", "docker2002", "lan0", "lan1", "lan2"]
