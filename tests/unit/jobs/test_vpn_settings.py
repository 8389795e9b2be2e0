"""Parts of a batch script: the settings for a VPN, and copies of shares before and after the ranks."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.jobs.script import sbatch_script
from shoal.network import tailscale, wireguard
from shoal.storage.stage import PROGRAM


def variables(folder: Path, address_line: str, **options: object) -> dict[str, str]:
    """The variables that the network lines export for this output of `ip`."""
    text = sbatch_script(resolved("train.py", nodes=2, **options), SHIPPED)
    begin, end = text.index("SHOAL_VPN="), text.index("export PYTHONPATH")
    program = folder / "ip"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '-o address show to 100.64.0.7' ] && printf '%s\\n' '{address_line}'\n")
    program.chmod(0o755)
    script = "MASTER_ADDR=100.64.0.7\n" + text[begin:end] + "env | grep -E '^(NCCL|GLOO|TP|OMPI|PRTE|UCX)_'\ntrue\n"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@cases("interface", wireguard.INTERFACE, tailscale.INTERFACE)
def test_vpn_interface_is_used_with_many_sockets_and_without_infiniband(tmp_path: Path, interface: str) -> None:
    line = f"7: {interface}    inet 100.64.0.7/32 scope global {interface}\\       valid_lft forever"
    assert variables(tmp_path, line) == {
        **{"NCCL_SOCKET_IFNAME": f"={interface}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
        **{"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES"), interface),
        **{f"{name}_tcp_if_include": interface for name in ("OMPI_MCA_btl", "OMPI_MCA_oob", "PRTE_MCA_oob")},
        **{"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib,ofi,uct", "OMPI_MCA_osc": "^ucx"},
    }


@cases("line", "2: eth0    inet 100.64.0.7/24 scope global eth0", "3: shoal01    inet 100.64.0.7", "")
def test_nccl_is_not_configured_on_a_plain_network(tmp_path: Path, line: str) -> None:
    assert variables(tmp_path, line) == {}


def test_user_settings_override(tmp_path: Path) -> None:
    found = variables(
        tmp_path, "7: shoal0    inet 100.64.0.7/32", export={"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "eth1"}
    )
    assert (found["NCCL_NET"], found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("IB", "eth1", "shoal0")


def script(copies: bool) -> str:
    return sbatch_script(resolved(requeue=False), replace(SHIPPED, copies=copies))


@cases(
    "failing, status, steps",
    ("", 0, ["in", "rank", "out"]),
    ("in", 1, ["in"]),
    ("out", 1, ["in", "rank", "out"]),
    ("rank", 3, ["in", "rank", "out"]),
)
def test_shares_are_copied_around_the_ranks(tmp_path: Path, failing: str, status: int, steps: list[str]) -> None:
    """The lines from the first step on, with a stand-in for srun that writes down what it is to start."""
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\ncase "$*" in *"{PROGRAM} in"*) step=in;; *"{PROGRAM} out"*) step=out;; *) step=rank;; esac\n'
        f"echo $step >> {tmp_path}/steps\n[ $step != '{failing}' ] || exit 3\n"
    )
    srun.chmod(0o755)
    text = script(copies=True)
    [pipe] = [line for line in text.splitlines() if line.startswith("exec {SHOAL_WARNINGS}")]
    steps_text = text[text.index("srun --overlap") :].partition("# srun may leave")[0]
    body = f'{pipe}\n{steps_text}exit "$status"\n'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", body], env=env, capture_output=True, text=True)
    assert (tmp_path / "steps").read_text().split() == steps, done.stderr
    assert done.returncode == status
