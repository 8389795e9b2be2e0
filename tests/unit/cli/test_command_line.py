"""The `shoal` command as a person runs it: help, exit codes, JSON, Ctrl-C."""

import contextlib
import getpass
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.sshd_server import Sshd, needs_sshd, running_sshd
from tests.support.waiting import wait_for
from typer.main import get_command
from typer.testing import CliRunner

from shoal.cli.app import main, make_app
from shoal.cli.help import placeholder

BAD = "cluster: reef\ncontroler: {host: c1}\nnodesets:\n  lab: {hosts: [n1, n1]}\n"
ON_A_CLUSTER = [
    *(["check"], ["plan"], ["up"], ["status"], ["down"], ["ssh", "n1"], ["exec", "--", "true"]),
    *(["node", verb, "n1"] for verb in ("drain", "resume", "remove")),
]


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without a shoal.yaml, and without the environment of the person who runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SHOAL_CLUSTER", "SHOAL_FILE", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


APP: Any = get_command(make_app())


def shoal(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run([sys.executable, "-m", "shoal", *words], text=True, timeout=60, **{**pipes, **more})


def call(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What `shoal` prints and returns, without a process of its own."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["shoal", *words])
        for name, value in environ.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main()
    printed = [stream.seek(0) or stream.read() for stream in (out, err)]
    return subprocess.CompletedProcess(words, int(end.value.code or 0), *printed)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(make_app(*words[:1]), list(words))


def with_json(words: list[str]) -> list[str]:
    at = 2 if words[0] == "node" else 1
    return [*words[:at], "--json", *words[at:]]


def commands(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in (group or APP).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


ALL = dict(commands())


def test_command_list_is_complete() -> None:
    assert {" ".join(words) for words in ALL} == {
        *("init", "schema", "check", "plan", "up", "status", "doctor", "down", "ssh", "exec"),
        *("node drain", "node resume", "node remove"),
        *("join", "run", "jobs", "logs", "fetch", "cancel", "prove", "bench links", "validate"),
        *("env build", "env list", "env remove", "env clean", "ui"),
        *("image pull", "image push", "image build", "image save", "image bundle", "image login", "image logout"),
        *("image list", "image remove", "image prune"),
        *("usage", "restore", "keys rotate", "offers", "cost", "try", "reap", "simulate"),
    }


@cases("words", *ALL, ids=" ".join)
def test_help_describes_the_command_and_every_option_with_examples(words: tuple[str, ...]) -> None:
    assert ALL[words].help
    assert all(parameter.help for parameter in ALL[words].params)
    assert any("--json" in parameter.opts for parameter in ALL[words].params)
    shown = invoke(*words, "--help")
    assert shown.exit_code == 0
    for parameter in ALL[words].params:
        name = max(parameter.opts, key=len)
        assert (name if name.startswith("-") else placeholder(parameter)) in shown.output
    short = invoke(*words, "-h")
    assert short.exit_code == 0 and "Usage: " in short.output
    assert f"Examples:\n    shoal {' '.join(words)}" in short.output


def test_h_shows_help() -> None:
    shown = invoke("-h")
    assert shown.exit_code == 0 and "Usage: " in shown.output


def test_help_and_version_are_printed() -> None:
    done = shoal()
    assert done.returncode == 2
    assert "Usage: shoal" in done.stdout + done.stderr
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", shoal("--version").stdout)
    assert "..." not in invoke("--help").output.replace("[ARGS]...", ""), "no list is truncated"


@cases("words", ("run", "--help"), ("node", "--help"), ("node", "drain", "--help"), ("rnu",))
def test_command_loaded_alone_prints_the_same_output(words: tuple[str, ...]) -> None:
    alone, among_all = call(*words), CliRunner().invoke(make_app(), list(words))
    assert alone.returncode == among_all.exit_code
    assert alone.stdout.split() == among_all.stdout.split()


# ---- your mistakes: exit 2


@cases("words", *ON_A_CLUSTER, ids=" ".join)
def test_invalid_file_is_reported_with_line_and_column_by_every_command(words: list[str]) -> None:
    Path("shoal.yaml").write_text(BAD)
    done = invoke(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        'shoal.yaml:2:1: unknown key, found "controler", did you mean `controller`?',
        'shoal.yaml:4:21 nodesets.lab.hosts[1]: duplicate host, found "n1", '
        "it is named at nodesets.lab.hosts[0] already",
    ]
    done = invoke(*with_json(words))
    assert done.exit_code == 2
    told = json.loads(done.stdout)
    assert told["error"] == "SpecError"
    places = [(finding["line"], finding["path"]) for finding in told["findings"]]
    assert places == [(2, ""), (4, "nodesets.lab.hosts[1]")]


@cases(
    "words, message, fix",
    (["up", "--bogus"], "No such option: --bogus", "see --help"),
    (
        ["run", "--gres=gpu:1", "train.py"],
        "No such option: --gres",
        "if it is an option of sbatch, put --sbatch before it: --sbatch --gres=VALUE",
    ),
    (["exec"], "Missing argument", "see --help"),
    (["up", "--drain-timeout", "soon"], "Invalid value for '--drain-timeout'", "see --help"),
    (["status", "--cluster", "a b"], "'a b' is not a cluster name", "use lower-case letters, digits and -"),
    (["exec", "-w", "x", "true"], "cluster sandbox has no host x", "use one of controller, fish1, fish2"),
    (["node", "drain", "controller"], "not a compute node: controller", "name a node that `shoal status` lists"),
    (["node", "remove", "fish1"], "cannot remove fish1: the cluster has no file", "write one with `shoal init`"),
    (["ssh", "fish1", "--forget-key"], "--forget-key is after the host", "put --forget-key before the host"),
    (["ssh", "fish1", "-L", "80:a:80"], "-L is after the host", "`shoal ssh --json fish1` prints"),
    (["init", "--hosts", "a,a"], "cannot make a spec of this", "change these names"),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_command_line_exits_2_with_the_fix(words: list[str], message: str, fix: str) -> None:
    done = call(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    told = call(*with_json(words))
    assert told.returncode == 2
    said = json.loads(told.stdout)
    assert said["error"] == "UsageError"
    assert message in said["message"]
    assert fix in said["fix"]


def test_init_writes_a_file_once() -> None:
    done = invoke("init", "--hosts", "desktop,gpu[01,03]")
    assert (done.exit_code, done.stdout) == (0, "wrote shoal.yaml; review it, run `shoal check`, then `shoal up`\n")
    text = Path("shoal.yaml").read_text()
    assert "      - gpu[01,03]\n" in text or "      - 'gpu[01,03]'\n" in text
    again = invoke("init", "--json")
    assert again.exit_code == 2
    assert json.loads(again.stdout) == {
        "error": "UsageError",
        "message": "shoal.yaml exists already",
        "fix": "edit it, or name another file",
    }
    assert json.loads(invoke("init", "--json", "-f", "other.yaml").stdout) == {"file": "other.yaml"}


def test_schema_is_json() -> None:
    assert json.loads(invoke("schema").stdout)["required"] == ["cluster", "controller"]


def test_down_of_existing_hosts_needs_yes() -> None:
    Path("shoal.yaml").write_text("cluster: reef\ncontroller: {host: c1, compute: true}\n")
    done = shoal("down", "--json", stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"error": "UsageError", "message": "this stops Slurm on c1", "fix": "use --yes"}


# ---- what failed out there: exit 1 and 3


def loopback(server: Sshd, *more: str) -> None:
    """A file whose controller is this machine's own sshd."""
    Path("shoal.yaml").write_text(
        "cluster: loop\n"
        f"controller: {{host: {{name: c1, address: 127.0.0.1, port: {server.port}, user: {getpass.getuser()}, "
        f"identity: {server.identity}}}, compute: true}}\n" + "".join(more)
    )


NOBODY_THERE = "nodesets: {lab: {hosts: [{name: n1, address: 127.0.0.1, port: 1}]}}\n"


def test_refused_connection_is_an_error_with_a_fix() -> None:
    Path("shoal.yaml").write_text(
        "cluster: r\ncontroller: {host: {name: c1, address: 127.0.0.1, port: 1}, compute: true}\n"
    )
    done = call("status")
    assert done.returncode == 1
    assert done.stderr.startswith("error: c1: ")
    assert "\n  fix: " in done.stderr
    told = json.loads(call("status", "--json").stdout)
    assert told["error"] == "Unreachable"
    assert told["fix"]


@needs_sshd
def test_exec_keeps_the_exit_status_and_reports_unreachable_hosts(empty_place: Path) -> None:
    with running_sshd(empty_place / "sshd") as server:
        loopback(server, NOBODY_THERE)
        wide = "x" * 300
        good = shoal("exec", "-w", "c1", "--user", "--", "sh", "-c", f"printf '{wide}\\t.\\n[red]no[/red]\\n'")
        assert (good.returncode, good.stdout) == (0, f"c1 (1)\n{wide}\t.\n[red]no[/red]\n")
        assert shoal("exec", "-w", "c1", "--user", "--", "sh", "-c", "exit 5").returncode == 5
        partly = shoal("exec", "--json", "--user", "--", "true")
        assert partly.returncode == 3
        told = json.loads(partly.stdout)
        assert [group["hosts"] for group in told["groups"]] == [["c1"]]
        assert told["failures"]["n1"]["error"] == "Unreachable"


@needs_sshd
def test_ssh_uses_the_keys_of_the_cluster(empty_place: Path) -> None:
    with running_sshd(empty_place / "sshd") as server:
        loopback(server)
        done = shoal("ssh", "c1", "echo", "hello")
        assert (done.returncode, done.stdout) == (0, "hello\n")
        told = json.loads(shoal("ssh", "--json", "c1", "echo", "hello").stdout)
        assert told["command"][0] == "ssh"
        assert told["command"][-3:] == ["127.0.0.1", "echo", "hello"]
        assert (empty_place / "state/shoal/loop/known_hosts").exists()
        without = shoal("ssh", "c1", env={**os.environ, "PATH": "/nowhere"})
        assert without.returncode == 1
        assert without.stderr == "error: this machine has no ssh command\n  fix: install openssh-client\n"
        assert shoal("ssh", "--forget-key", "c1").stdout == "forgot the key of c1\n"
        assert json.loads(shoal("ssh", "--forget-key", "--json", "c1").stdout) == {"host": "c1", "forgotten": False}


STOPPED = (
    "\nstopping: each host finishes its current step; Ctrl-C again exits at once\n"
    "stopped\n  run the same command again to continue\n"
)


@needs_sshd
@cases("number, options", (signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGINT, ("--json",)))
def test_ctrl_c_stops_the_command_and_shows_how_to_continue(
    empty_place: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    with running_sshd(empty_place / "sshd") as server:
        loopback(server)
        mark = empty_place / "begun"
        words = ["exec", *options, "--user", "--", "sh", "-c", f"echo $$ > {mark}; exec sleep 600"]
        line = [sys.executable, "-m", "shoal", *words]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: mark.exists() and mark.read_text().endswith("\n"))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert json.loads(out)["error"] == "Interrupted" if options else (out, err) == ("", STOPPED)
        wait_for(lambda: not Path(f"/proc/{int(mark.read_text())}").exists())


@cases(
    "words, both",
    (["schema"], False),
    (["check", "--cluster", "t-reader"], False),
    (["check", "--cluster", "t-reader"], True),
    ids=["printed by hand", "printed by rich", "errors as well"],
)
def test_closed_pipe_ends_the_command_quietly_with_sigpipe_status(words: list[str], both: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = shoal(*words, stdout=writer, stderr=writer if both else subprocess.PIPE)
    os.close(writer)
    told = [line for line in (done.stderr or "").splitlines() if not line.startswith("  ")]
    assert (done.returncode, told) == (141, []), "lines with blanks before them say how far it is"


# ---- terminals and files of all kinds


@cases("encoding", "ascii", "latin-1")
def test_terminal_without_utf_8_gets_words_for_marks(encoding: str) -> None:
    done = shoal("check", "--cluster", "t-marks", env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.splitlines()[-1].startswith(("ok no errors", "FAILED"))


def test_json_is_valid_without_utf_8() -> None:
    Path("shoal.yaml").write_text("cluster: reef\ncontroller: {host: c1, fö: 1}\n", encoding="utf-8")
    done = shoal("check", "--json", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert any("fö" in finding["found"] for finding in json.loads(done.stdout)["findings"]), done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk_is_reported_and_not_called_a_bug() -> None:
    with Path("/dev/full").open("w") as full:
        done = shoal("schema", stdout=full)
    assert done.returncode == 1
    assert done.stderr == (
        "error: on this machine: No space left on device\n"
        "  fix: free space on this machine's disk, then run the same command again\n"
    )


def completed(line: str) -> list[str]:
    """What bash offers at the end of a line."""
    variables = {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return call(**variables).stdout.split()


@cases(
    "line, offered",
    ("shoal stat", ["status"]),
    ("shoal ssh gpu", ["gpu01", "gpu02"]),
    ("shoal node drain gpu02", ["gpu02"]),
    ("shoal run --launcher s", ["srun", "spawn"]),
    ("shoal keys rotate m", ["munge"]),
)
def test_completion_offers_commands_hosts_and_values(line: str, offered: list[str]) -> None:
    Path("shoal.yaml").write_text("cluster: r\ncontroller: {host: c1}\nnodesets: {lab: {hosts: ['gpu[01-02]']}}\n")
    assert completed(line) == offered
    Path("shoal.yaml").write_text(BAD)
    assert completed(line) == [word for word in offered if not word.startswith("gpu")], "it is silent about the file"
