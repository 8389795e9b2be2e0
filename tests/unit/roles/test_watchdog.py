"""The programs that run on a rented machine by themselves, with stand-ins for what they call."""

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.agent.document import Document, File, Service
from shoal.remote import program_text, python_command
from shoal.roles.rented import (
    CONTROLLER_TIMEOUT_S,
    NOTICE,
    NOTICE_REASON,
    RELEASE_TIMEOUT_S,
    TIMER,
    end_program,
    notice_watcher,
    script,
    spot_notice,
    watchdog,
)

IDLE = "NodeName=cloud1 State=IDLE+CLOUD ThreadsPerCore=1"
ASLEEP = "NodeName=cloud1 State=IDLE+CLOUD+POWERED_DOWN ThreadsPerCore=1"
GOING = "NodeName=cloud1 State=IDLE+CLOUD+POWERING_DOWN ThreadsPerCore=1"
UNKNOWN = "Node cloud1 not found"
SILENT = "Unable to contact slurm controller (connect failure)"


class Machine:
    """A machine whose clock, scontrol and systemctl are ours."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "bin").mkdir()
        self._program("date", 'cat "$PLACE/now"')
        self._program("scontrol", 'cat "$PLACE/answer"; exit "$(cat "$PLACE/status")"')
        self._program("systemctl", 'echo "$@" >> "$PLACE/asked"')

    def look(self, now: int, answer: str, until: int = 0) -> str:
        """Its requests to systemd."""
        failed = answer in (UNKNOWN, SILENT)
        for name, text in (("now", str(now)), ("answer", answer), ("status", "1" if failed else "0")):
            (self.place / name).write_text(text + "\n")
        asked = self.place / "asked"
        asked.unlink(missing_ok=True)
        environment = {"PATH": f"{self.place}/bin:{os.environ['PATH']}", "PLACE": str(self.place)}
        text = script("cloud1", until, marks=str(self.place / "marks"))
        done = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return asked.read_text().strip() if asked.exists() else ""

    def _program(self, name: str, text: str) -> None:
        path = self.place / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


RELEASED, SILENCED = 1000 + RELEASE_TIMEOUT_S, 1000 + CONTROLLER_TIMEOUT_S
"""What begins at 1000 has lasted long enough."""


@cases(
    "looks, until, asked",
    ([(1000, IDLE), (5000, IDLE), (90_000, IDLE)], 0, ""),
    ([(1000, IDLE), (1001, IDLE)], 1001, "poweroff"),
    *(([(1000, gone), (RELEASED - 1, gone), (RELEASED, gone)], 0, "poweroff") for gone in (ASLEEP, GOING, UNKNOWN)),
    ([(1000, ASLEEP), (1500, IDLE), (RELEASED, ASLEEP)], 0, ""),
    ([(1000, SILENT), (SILENCED - 1, SILENT), (SILENCED, SILENT)], 0, "poweroff"),
    ([(1000, SILENT), (2000, IDLE), (SILENCED, SILENT)], 0, ""),
    ids=[
        "in use",
        "past its lifetime",
        "asleep",
        "going",
        "unknown",
        "back in time",
        "no controller",
        "controller back",
    ],
)
def test_machine_that_nobody_needs_powers_off_in_time(
    machine: Machine, looks: list[tuple[int, str]], until: int, asked: str
) -> None:
    *before, last = [machine.look(now, answer, until) for now, answer in looks]
    assert (set(before), last) == ({""}, asked)


def test_watchdog_runs_every_minute() -> None:
    document = watchdog("cloud1", 1_800_000_000)
    assert Service(TIMER) in document
    [timer] = [item for item in document if isinstance(item, File) and item.path.endswith(TIMER)]
    assert "OnUnitActiveSec=60\n" in timer.content


# The end of a pod


@cases("status, ended", (204, 0), (403, 1))
def test_pod_ends_its_bill_with_its_own_key_where_it_may(tmp_path: Path, status: int, ended: int) -> None:
    asked: list[tuple[str, str | None]] = []

    class Api(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "environ").write_text("PATH=/bin\0RUNPOD_POD_ID=pod1\0RUNPOD_API_KEY=k-1\0")
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/v2"
        line = [sys.executable, "-I", "-c", program_text("end_pod"), base, str(tmp_path / "environ")]
        assert subprocess.run(line, timeout=60).returncode == ended
        server.shutdown()
    assert asked == [("/v2/pods/pod1", "Bearer k-1")]


def test_container_is_ended_by_its_provider_first_and_then_by_itself() -> None:
    document = watchdog("pods1", 0, systemd=False, end=("end_pod", "https://api.runpod.io/v2", "/proc/1/environ"))
    [text] = [item.content for item in document if isinstance(item, File) and item.path.endswith("watchdog")]
    end = "python3 -I -B /usr/local/lib/shoal/end-machine https://api.runpod.io/v2 /proc/1/environ || kill -TERM 1\n"
    assert end in str(text)


MIXED = """
cluster: reef
controller: {host: c1}
providers:
  pods: {kind: runpod, key: env:A}
  own: {kind: runpod, url: "http://10.0.0.1:8080", key: env:A}
  google: {kind: gcp, project: reefs}
  amazon: {kind: aws, key: env:A}
nodesets:
  lab: {hosts: [n1]}
  burst: {max: 1, offers: [{provider: google, type: a2-highgpu-1g}, {provider: amazon, type: g6.xlarge}]}
"""


def test_program_that_ends_a_pod_asks_the_address_of_its_account() -> None:
    spec = spec_of(MIXED)
    assert end_program(spec, "pods") == ("end_pod", "https://api.runpod.io/v2", "/proc/1/environ")
    assert end_program(spec, "own") == ("end_pod", "http://10.0.0.1:8080/v2", "/proc/1/environ")
    assert end_program(spec, "amazon") == ()


# The notice of preemption


def unit_of(document: Document) -> str:
    """The unit of the notice in a machine's document."""
    [unit] = [item for item in document if isinstance(item, File) and item.path.endswith("shoal-notice.service")]
    return unit.content


def test_spot_machine_learns_that_it_is_taken_away_as_its_provider_says_it() -> None:
    spec = spec_of(MIXED)
    assert "http://169.254.169.254/" in unit_of(spot_notice(spec, "google", "cloud1"))
    shutdown = unit_of(spot_notice(spec, "amazon", "cloud1"))
    assert f"ExecStop=/usr/bin/python3 -I -B {NOTICE} cloud1 '{NOTICE_REASON}' 120\n" in shutdown
    assert "TimeoutStopSec=150\n" in shutdown
    assert " slurmd.service slurmstepd.scope " in shutdown.replace("After=", "After= ")
    assert spot_notice(spec, "pods", "cloud1") == (), "it gives no notice"


@cases(
    "system, answers, asked",
    ("running", [], ""),
    ("stopping", [""], "squeue -h -o %i -w cloud1"),
    ("stopping", ["-", "7", "7", "7", ""], "squeue squeue scontrol squeue scontrol squeue squeue"),
    ids=["the service alone is stopped", "no job", "a job that saves, and slurmctld silent for a while"],
)
def test_shutdown_waits_for_the_jobs_of_the_machine(
    tmp_path: Path, system: str, answers: list[str], asked: str
) -> None:
    programs = {
        "systemctl": f"echo {system}; exit 1",
        "squeue": f'echo squeue "$@" >> {tmp_path}/asked; n=$(grep -c ^squeue {tmp_path}/asked); '
        f'a=$(sed -n "${{n}}p" {tmp_path}/answers); test "$a" != - || exit 1; test -z "$a" || echo "$a"',
        "scontrol": f'printf "%s " scontrol "$@" >> {tmp_path}/asked; echo >> {tmp_path}/asked; '
        f"test $(grep -c ^scontrol {tmp_path}/asked) -gt 1",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    program = [sys.executable, "-I", "-c", program_text("shutdown_notice"), "cloud1", NOTICE_REASON, "60"]
    subprocess.run(program, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60, check=True)
    lines = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    if len(lines) > 1:
        assert f"scontrol update nodename=cloud1 state=drain reason={NOTICE_REASON} " in lines
    assert asked in (" ".join(line.split()[0] for line in lines), "".join(lines))


def test_machine_that_reads_its_notice_drains_its_node(tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"TRUE" if len(asked) > 1 else b"FALSE")

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "scontrol").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/told\n')
    (tmp_path / "scontrol").chmod(0o755)
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/preempted"
        program = [sys.executable, "-I", "-c", program_text("preemption_notice"), url, "cloud1", NOTICE_REASON]
        subprocess.run(program, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60, check=True)
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [("/preempted?wait_for_change=true&timeout_sec=60", "Google")] * 2
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["update", "nodename=cloud1", "state=drain", f"reason={NOTICE_REASON}"]


def test_watcher_is_a_service_that_starts_again() -> None:
    document = notice_watcher("cloud1", "http://169.254.169.254/preempted")
    assert Service("shoal-notice.service") in document and "Restart=on-failure\n" in unit_of(document)


# The check of GPUs

TWO = "0, Simulated GPU, 16384\n1, Simulated GPU, 16384\n"


def health(place: Path, gpus: int, answer: str | None, *, status: int = 0, errors: str | None = None) -> str:
    """The problem reported for this output of nvidia-smi; empty when the machine is healthy."""
    if answer is not None:
        smi = place / "nvidia-smi"
        (place / "cards").write_text(answer)
        (place / "errors").write_text(errors or "")
        second = f'cat "{place}/errors"' if errors is not None else 'echo "Field is not valid"; exit 2'
        smi.write_text(f'#!/bin/sh\ncase "$1" in *ecc*) {second} ;; *) cat "{place}/cards"; exit {status} ;; esac\n')
        smi.chmod(0o755)
    environment = {
        "PATH": f"{place}:/usr/bin:/bin" if answer is not None else str(place),
        "LD_LIBRARY_PATH": str(place),
    }
    command = [sys.executable, *python_command("probes", "gpus", str(gpus))[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr.strip()


@cases(
    "gpus, answer, status, errors, said",
    (2, TWO, 0, None, ""),
    (1, TWO, 0, None, ""),
    (0, None, 0, None, ""),
    (2, TWO, 0, "0, 0\n1, 0\n", ""),
    (2, TWO, 0, "0, [N/A]\n1, [N/A]\n", ""),
    (3, TWO, 0, None, "3 GPUs were promised, and there are 2"),
    (2, TWO, 0, "0, 0\n1, 4\n", "GPU 1 has 4 uncorrected memory errors"),
    (1, "0, NVIDIA A10, [Unknown Error]\n", 0, None, "GPU 0 (NVIDIA A10) tells no memory: [Unknown Error]"),
    (1, "0, NVIDIA A10, 0\n", 0, None, "GPU 0 (NVIDIA A10) tells no memory: 0"),
    (1, "Unable to determine\nthe device handle", 15, None, "nvidia-smi: Unable to determine the device handle"),
)
def test_machine_with_broken_gpus_is_reported(
    tmp_path: Path, gpus: int, answer: str | None, status: int, errors: str | None, said: str
) -> None:
    assert health(tmp_path, gpus, answer, status=status, errors=errors) == said


def test_machine_without_a_driver_is_reported(tmp_path: Path) -> None:
    assert health(tmp_path, 1, None).startswith("nvidia-smi does not run: ")


A10 = "0, NVIDIA A10, 24576\n"
DRIVER = r"""
#include <stddef.h>
#define WELL(name) int name() { return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "system not yet initialized"; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = 0; return CREATE; }
int cuMemGetInfo_v2(size_t *left, size_t *total) { *left = (size_t) FREE << 30; *total = 24ul << 30; return 0; }
WELL(cuCtxDestroy_v2)
"""
"""As much of NVIDIA's driver as is called."""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler to make a driver that fails as wanted")
@cases(
    "values, said",
    ({}, ""),
    ({"INIT": 802}, "cuInit: CUDA error 802, system not yet initialized"),
    ({"COUNT": 0}, "1 GPUs were promised, and CUDA sees 0"),
    ({"CREATE": 2}, "cuCtxCreate_v2: CUDA error 2, system not yet initialized"),
    ({"FREE": 3}, "GPU 0 has only 3072 of 24576 MiB free"),
)
def test_gpu_unusable_by_cuda_is_reported(tmp_path: Path, values: dict[str, int], said: str) -> None:
    all_well = {"INIT": 0, "COUNT": 1, "CREATE": 0, "FREE": 24}
    defined = [f"-D{name}={value}" for name, value in {**all_well, **values}.items()]
    line = ["cc", "-shared", "-fPIC", "-w", *defined, "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(line, input=DRIVER, text=True, check=True)
    assert health(tmp_path, 1, A10) == said


def test_machine_with_an_incomplete_driver_is_reported(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library\n")
    assert health(tmp_path, 1, A10).startswith("nvidia-smi answers, and CUDA's driver cannot be loaded: ")
