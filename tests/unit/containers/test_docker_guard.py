"""The guard before Docker: whose job a process is, and what a job may ask for."""

import os
import pwd
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote.docker_guard import rules
from shoal.remote.docker_guard.caller import Caller, Peer, Rejection, find_job, hard_limits, job_owner
from shoal.remote.docker_guard.job_limits import cgroup_parent, gpu_indexes, job_gpus, remove_groups

GROUP = "/slurm_n1/uid_2001/job_7"
OWN = "/user.slice/user-2001.slice/user@2001.service"
"""A group that a user has."""
CALLER = Caller(os.getuid(), os.getgid(), "7", GROUP)
V1 = f"9:name=systemd:/system.slice/slurmd.service\n6:freezer:{GROUP}/step_0\n5:devices:{GROUP}/step_0/task_0\n0::/\n"


@cases(
    "text, job",
    (V1, ("7", GROUP, 2001)),
    ("4:freezer:/slurm/uid_5/job_8/step_batch\n", ("8", "/slurm/uid_5/job_8", 5)),
    (
        "0::/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0\n",
        ("12", "/system.slice/slurmstepd.scope/job_12", None),
    ),
    ("0::/system.slice/n1_slurmstepd.scope/job_3\n", ("3", "/system.slice/n1_slurmstepd.scope/job_3", None)),
    (f"0::{OWN}/app.slice/slurm.service/job_77\n", None),
    (f"0::{OWN}/system.slice/slurmstepd.scope/job_77\n", None),
    (f"0::{OWN}/a\f0::/system.slice/slurmstepd.scope/job_77\n", None),
    ("0::/slurm/uid_2001/job_77\n", None),
    (f"6:freezer:{OWN}/slurm/uid_2001/job_77\n", None),
    ("0::/user.slice/user-2001.slice/job_3\n", None),
    ("6:freezer:/\n0::/system.slice/ssh.service\n", None),
    ("", None),
)
def test_job_is_found_in_the_cgroup(text: str, job: tuple[str, str, int | None] | None) -> None:
    assert find_job(text) == job


@cases(
    "text, message",
    (f"6:freezer:/slurm/uid_{os.getuid()}/job_7/step_0\n", None),
    (f"6:freezer:/slurm/uid_{os.getuid() + 1}/job_7/step_0\n", "job 7 is another user's"),
    ("0::/system.slice/slurmstepd.scope/job_9/step_0/user\n", None),
    ("0::/system.slice/slurmstepd.scope/job_10/step_0/user\n", "job 10 is another user's"),
    ("0::/system.slice/slurmstepd.scope/job_11/step_0/user\n", "does not say whose job 11 is"),
)
def test_job_is_of_the_user_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str | None
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\ncase $* in *=9) echo {os.getuid()};; *=10) echo {os.getuid() + 1};; esac\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    process = tmp_path / str(os.getpid())
    process.mkdir()
    (tmp_path / "self").symlink_to("/proc/self")
    (process / "cgroup").write_text(text)
    (process / "status").write_text("Gid:\t5\nGroups:\t5 77 \nNStgid:\t1\n")
    (process / "limits").write_text("Max open files            1024                 20000                files     \n")
    ours, theirs = socket.socketpair()
    job_owner.cache_clear()
    with ours, theirs:
        peer = Peer(ours, str(tmp_path))
        if message is None:
            assert list(peer.caller().groups) == [5, 77] and peer.caller().limits == {"nofile": 20000}
        else:
            with pytest.raises(Rejection, match=message):
                peer.caller()
        peer.close()


def confined(body: dict[str, Any], gpus: tuple[str, ...] = ()) -> Any:
    return rules.confine_container(body, CALLER, GROUP, ["/shared"], gpus)


def test_container_is_in_the_cgroup_of_the_job() -> None:
    body = {"Image": "mini", "HostConfig": {"RestartPolicy": {"Name": "always"}, "Memory": 5, "MaskedPaths": []}}
    host = confined(body)["HostConfig"]
    assert host["CgroupParent"] == GROUP and host["RestartPolicy"] == {"Name": "no"} and host["Memory"] == 5
    assert "MaskedPaths" not in host and "UsernsMode" not in host


def test_container_with_files_of_the_node_runs_as_the_user(tmp_path: Path) -> None:
    made = confined({"Image": "mini", "HostConfig": {"Binds": [f"{tmp_path}:/x:ro", "named:/v"]}})
    host = made["HostConfig"]
    assert made["User"] == f"{CALLER.uid}:{CALLER.gid}" and host["UsernsMode"] == "host"
    assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"]
    bind, volume = host["Mounts"]
    assert bind == {"Type": "bind", "Source": str(tmp_path), "Target": "/x", "ReadOnly": True}
    assert volume["Type"] == "volume" and rules.runs_as_user(made)


@pytest.mark.skipif(os.getuid() != 0, reason="files of two users")
def test_mounted_path_is_one_that_the_caller_reaches() -> None:
    caller = Caller(pwd.getpwnam("nobody").pw_uid, 12345, "7", GROUP, [54321])
    with tempfile.TemporaryDirectory() as top:
        home = Path(top, "home")
        project = home / "project"
        project.mkdir(parents=True)
        os.chmod(top, 0o755)
        body = {"Image": "mini", "HostConfig": {"Binds": [f"{project}:/x"]}}
        for mode, group, reached in ((0o700, 0, False), (0o750, 54321, True), (0o755, 0, True)):
            os.chown(home, 0, group)
            home.chmod(mode)
            if reached:
                [mount] = rules.confine_container(body, caller, GROUP, [top], ())["HostConfig"]["Mounts"]
                assert mount["Source"] == str(project)
            else:
                with pytest.raises(Rejection, match="you may not reach it"):
                    rules.confine_container(body, caller, GROUP, [top], ())
        with pytest.raises(Rejection, match="it is not yours"):
            rules.confine_container(body, caller, GROUP, [], ())


def test_mounted_path_that_becomes_a_link_is_rejected(tmp_path: Path) -> None:
    source, other = tmp_path / "d", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    container = confined({"Image": "mini", "HostConfig": {"Binds": [f"{source}:/x", "named:/v"]}})
    rules.check_sources(container, CALLER, [])
    rules.check_sources({"HostConfig": {"Mounts": None}}, CALLER, [])
    source.rmdir()
    with pytest.raises(Rejection, match="no such file"):
        rules.check_sources(container, CALLER, [])
    source.symlink_to(other)
    with pytest.raises(Rejection, match="it has become a link"):
        rules.check_sources(container, CALLER, [])


@cases(
    "host, message",
    ({"Privileged": True}, "--privileged"),
    ({"privileged": True}, "privileged is not available"),
    ({"Binds": ["/nowhere:/x"]}, "this node has no such file"),
    ({"Binds": ["/shared/..:/x"]}, "cannot mount"),
    ({"Binds": ["/shared:/x:shared"]}, "write SOURCE:TARGET"),
    ({"Mounts": [{"Type": "npipe", "Source": "a", "Target": "b"}]}, "type npipe"),
    (
        {"Mounts": [{"Type": "volume", "Target": "b", "VolumeOptions": {"DriverConfig": {"Name": "local"}}}]},
        "VolumeOptions",
    ),
    ({"Mounts": [{"Type": "bind", "Source": "/", "Target": "/x", "source": "/"}]}, "source is not available"),
    ({"IpcMode": "host"}, "--ipc"),
    ({"VolumesFrom": ["x"]}, "--volumes-from"),
    ({"OomScoreAdj": -1000}, "OomScoreAdj"),
    ({"Sysctls": {"a": "b"}}, "Sysctls"),
    ({"LogConfig": {"Type": "syslog", "Config": {}}}, "LogConfig"),
    ({"PortBindings": {"80/tcp": [{"HostPort": "80"}]}}, "below 1024"),
    ({"PortBindings": {"80/tcp": [{"hostport": "80"}]}}, "below 1024"),
    ({"DeviceRequests": [{"Capabilities": [["gpu"]], "Driver": "", "Count": -1}]}, "this job has no GPUs"),
    ({"DeviceRequests": [{"Capabilities": [["tpu"]]}]}, "GPUs only"),
)
def test_settings_that_leave_the_container_are_rejected(host: dict[str, Any], message: str) -> None:
    with pytest.raises(Rejection, match=message.replace("(", r"\(")):
        rules.confine_container({"Image": "x", "HostConfig": host}, Caller(12345, 12345, "7", GROUP), GROUP, [], ())


def test_limits_are_at_most_what_the_job_could_set_itself() -> None:
    limits = hard_limits(Path("/proc/self/limits").read_text())
    assert len(limits) == 15
    text = (
        "Max locked memory         8388608              unlimited            bytes\nMax open files  1024  4096  files\n"
    )
    text += "Max realtime priority     0                    0                    \n"
    assert hard_limits(text) == {"memlock": float("inf"), "nofile": 4096, "rtprio": 0}
    caller = Caller(12345, 12345, "7", GROUP, (), hard_limits(text))

    def host(*asked: dict[str, Any]) -> Any:
        body = {"Image": "x", "HostConfig": {"Ulimits": [*asked]}}
        return rules.confine_container(body, caller, GROUP, [], ())["HostConfig"]

    kept = ({"Name": "memlock", "Soft": -1, "Hard": -1}, {"Name": "nofile", "Soft": 1024, "Hard": 4096})
    assert host(*kept)["Ulimits"] == [*kept] and host()["Ulimits"] == []
    for name, soft, hard, message in (
        ("nofile", 1024, 4097, "--ulimit nofile: your job may have 4096 at most"),
        ("nofile", 1024, -1, "your job may have 4096 at most"),
        ("nofile", -1, 1024, "your job may have 4096 at most"),
        ("nofile", 1024, -2, "--ulimit nofile: not a number"),
        ("nofile", 1024, None, "not a number"),
        ("rtprio", 99, 99, "--ulimit rtprio: your job may have 0 at most"),
        ("core", 0, 0, "--ulimit core is not available in jobs"),
    ):
        with pytest.raises(Rejection, match=message):
            host({"Name": name, "Soft": soft, "Hard": hard})
    with pytest.raises(Rejection, match="hard is not available"):
        host({"Name": "nofile", "Soft": 1, "Hard": 1, "hard": 9999})


def test_settings_of_another_case_are_not_passed_on() -> None:
    with pytest.raises(Rejection, match="hostconfig is not available"):
        confined({"Image": "x", "hostconfig": {"Privileged": True}})
    assert confined({"Image": "x", "NetworkingConfig": {"endpointsconfig": {"host": {}}}})["NetworkingConfig"] == {
        "EndpointsConfig": {}
    }


def test_gpus_are_those_of_the_job() -> None:
    asked = [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}]
    [request] = confined({"Image": "x", "HostConfig": {"DeviceRequests": asked}}, ("1",))["HostConfig"][
        "DeviceRequests"
    ]
    assert request == {"Driver": "", "Count": 0, "DeviceIDs": ["1"], "Capabilities": [["gpu"]]}
    assert gpu_indexes("gpu:h100:3(IDX:0,2-3),shard:0") == [0, 2, 3]
    assert gpu_indexes("") == []


def test_gpus_of_the_job_are_named_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's numbers of devices and NVIDIA's indexes may differ."""
    scontrol, answer, driver = tmp_path / "scontrol", tmp_path / "answer", tmp_path / "gpus"
    scontrol.write_text(f'#!/bin/sh\n[ $2 = hostnames ] && echo "$3" || cat {answer}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config = {"node": "n1", "gpus": ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]}
    line = "JobId=7 JobName={} UserId=ann(2001) Nodes=n0 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)"
    line += " Nodes=n1 CPU_IDs=0-1 Mem=1 GRES=gpu:h100:2(IDX:1-2) MinCPUsNode=1\n"
    answer.write_text(line.format("train"))
    assert job_gpus("7", config, str(driver)) == ["1", "2"]
    for place, minor, uuid in (("0000:01:00.0", 2, "GPU-0a-2"), ("0000:02:00.0", 1, "GPU-????????-????")):
        (driver / place).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        (driver / place / "information").write_text(text)
    assert job_gpus("7", config, str(driver)) == ["1", "GPU-0a-2"]
    answer.write_text(line.format("x Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:3(IDX:0-2)"))
    with pytest.raises(Rejection, match="looks like a list of GPUs"):
        job_gpus("7", config, str(driver))


@cases(
    "request_line, kind",
    ("GET /_ping", "plain"),
    ("POST /v1.41/containers/create", "create"),
    ("POST /v1.41/images/localhost:5000/a/b@sha256:0/push", "plain"),
    ("POST /v1.41/build", "build"),
    ("POST /v1.23/containers/x/start", "too old"),
    ("POST /v1.41/containers/x/update", "may not ask"),
    ("POST /v1.41/containers/x/../create", "may not ask"),
    ("GET /images/../containers/x/json", "may not ask"),
    ("GET /%63ontainers/json", "may not ask"),
    ("POST /plugins/pull", "may not ask"),
    ("POST /v1.41/session", "BuildKit"),
)
def test_only_requests_of_the_table_pass(request_line: str, kind: str) -> None:
    method, path = request_line.split()
    try:
        assert rules.route(method, path) == kind
    except Rejection as error:
        assert kind in str(error)


def test_builds_and_commands_stay_in_the_job() -> None:
    query = [("t", "a"), ("cgroupparent", "/"), ("networkmode", "default"), ("remote", ""), ("version", "1")]
    assert rules.confine_build(query, GROUP) == [("t", "a"), ("cgroupparent", GROUP)]
    offline = [("networkmode", "none")]
    assert rules.confine_build(offline, GROUP) == [*offline, ("cgroupparent", GROUP)]
    for key, value in (("networkmode", "host"), ("remote", "http://x"), ("version", "2"), ("securityopt", '["a"]')):
        with pytest.raises(Rejection):
            rules.confine_build([(key, value)], GROUP)
    with pytest.raises(Rejection, match="--privileged"):
        rules.confine_exec({"Cmd": ["id"], "Privileged": True}, CALLER, {"HostConfig": {}})
    command = rules.confine_exec({"Cmd": ["id"]}, CALLER, {"HostConfig": {"UsernsMode": "host"}})
    assert command == {"Cmd": ["id"], "User": f"{CALLER.uid}:{CALLER.gid}"}
    with pytest.raises(Rejection, match="not from an address"):
        rules.confine_pull([("fromSrc", "http://x")])
    with pytest.raises(Rejection, match="DriverOpts"):
        rules.confine_volume({"Name": "v", "DriverOpts": {"device": "/"}})
    with pytest.raises(Rejection, match="bridge only"):
        rules.confine_network({"Name": "n", "Driver": "macvlan"})
    with pytest.raises(Rejection, match="--network=abc"):
        rules.check_network("abc", {"Driver": "host"})


def test_limits_are_copied_where_the_group_of_the_job_denies_devices(tmp_path: Path) -> None:
    for name, text in {
        "devices/devices.list": "c 195:0 rwm\n", "memory/memory.limit_in_bytes": "900\n",
        "cpuset/cpuset.cpus": "1\n", "cpuset/cpuset.mems": "0\n",
    }.items():  # fmt: skip
        controller, _, file = name.partition("/")
        (tmp_path / f"{controller}{GROUP}").mkdir(parents=True) if not (
            tmp_path / f"{controller}{GROUP}"
        ).exists() else None
        (tmp_path / f"{controller}{GROUP}" / file).write_text(text)
        (tmp_path / controller / file).write_text("0-3\n")
    assert cgroup_parent(CALLER, str(tmp_path)) == "/shoal-docker/job_7"
    assert (tmp_path / "memory/shoal-docker/job_7/memory.limit_in_bytes").read_text() == "900\n"
    assert (tmp_path / "cpuset/shoal-docker/job_7/cpuset.cpus").read_text() == "1\n"
    (tmp_path / f"devices{GROUP}/devices.list").write_text("a *:* rwm\n")
    assert cgroup_parent(CALLER, str(tmp_path)) == GROUP


def test_groups_of_a_job_that_has_ended_are_removed(tmp_path: Path) -> None:
    scope = "system.slice/n1_slurmstepd.scope"
    gone = [f"memory{GROUP}", "cpuset/shoal-docker/job_7", f"{scope}/job_7", "pids/slurm/uid_5/job_7"]
    kept = [f"memory{GROUP}1", f"{scope}/job_17", "user.slice/slurmstepd.scope/job_7", f"freezer{GROUP}/step_0"]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir(parents=True)
    remove_groups("7", str(tmp_path))
    assert [name for name in (*gone, *kept) if (tmp_path / name).exists()] == kept
    (tmp_path / "memory/shoal-docker/job_7/docker").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        remove_groups("7", str(tmp_path))


def test_process_that_has_ended_is_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        child = os.fork()
        if not child:
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(tmp_path / "s"))
            os._exit(0)
        os.waitpid(child, 0)
        accepted, _ = server.accept()
        with accepted, pytest.raises(Rejection, match="inside a job of Slurm only"):
            Peer(accepted).caller()
