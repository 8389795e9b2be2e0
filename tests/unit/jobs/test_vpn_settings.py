"""The settings of NCCL and Gloo for a job on several nodes, by the network of their addresses."""

import subprocess
from pathlib import Path

from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.jobs.script import sbatch_script
from shoal.network import tailscale, wireguard


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


def test_single_node_job_has_no_vpn_settings() -> None:
    assert "SHOAL_VPN" not in sbatch_script(resolved("train.py"), SHIPPED)
