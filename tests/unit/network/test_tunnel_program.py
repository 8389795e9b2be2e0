"""The program that keeps a tunnel open, run with stand-ins for Slurm and ssh that record their calls."""

import subprocess
from pathlib import Path

from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal.network.tunnel import program

REGISTERS_WITHIN = 60
"""Seconds in which a rented container must register: the tunnel must be open well before."""
SELDOM = 30
"""Seconds between two queries about a powered-down node: slurmctld may have hundreds of them."""


def played(tmp_path: Path, *states: str) -> list[str]:
    """The program's calls while Slurm reports these states of the node, one per query; then it is ended."""
    (tmp_path / "states").write_text("".join(f"NodeName=pod1 CPUTot=1 State={state} Reason=none\n" for state in states))
    commands = {
        "scontrol": f"cd {tmp_path}; head -n 1 states; sed -i 1d states",
        "sleep": f'echo "sleep $1" >> {tmp_path}/done',
        # The second call of a round lasts as long as the tunnel. The test ends there.
        "ssh": f'for last; do :; done; echo "ssh $last" >> {tmp_path}/done; case $last in hold) kill "$PPID" ;; esac',
    }
    for name, text in commands.items():
        stand_in(tmp_path / name, text)
    (tmp_path / "tunnel").write_text(program())
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", tmp_path / "tunnel", "pod1"], env={"PATH": path}, timeout=120, check=False)
    return (tmp_path / "done").read_text().splitlines()


def test_running_container_is_connected_at_once(tmp_path: Path) -> None:
    assert played(tmp_path, "IDLE+CLOUD") == ["ssh clear", "ssh hold"]


@cases("coming", "ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", "IDLE+CLOUD+POWERING_UP")
def test_released_container_is_polled_and_reconnected_before_registration(tmp_path: Path, coming: str) -> None:
    *waited, clear, hold = played(tmp_path, *["IDLE+CLOUD+POWERED_DOWN"] * 3, coming)
    assert (clear, hold) == ("ssh clear", "ssh hold")
    assert len(waited) == 3 and all(one.startswith("sleep ") for one in waited)
    assert all(SELDOM <= int(one.split()[1]) <= REGISTERS_WITHIN / 2 for one in waited)
