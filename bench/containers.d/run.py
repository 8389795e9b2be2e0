"""Times the start of `true` in an image under srun, beside bare srun and other engines, as an ordinary user."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from harness import BenchError, bench_parser, describe_machine, report, run_bench, show_progress
from sandbox import NODE, USER, add_cluster_options, provide_cluster, targets, write_ssh_config

from shoal.local_files import cache_dir
from shoal.remote.runner.unpacked_image import IMAGES
from shoal.roles import pyxis
from shoal.sandbox.layout import Layout

HERE = Path(__file__).parent
SPEC = f"""\
cluster: bench-containers
controller: {{provider: sandbox}}
nodesets:
  fish: {{provider: sandbox, count: 1, memory: 2G}}
users:
  {USER}: {{keys: ["file:KEY.pub"]}}
containers: oci
"""
BARE, IMAGE, NAMED, CRUN, PODMAN, APPTAINER = "srun", "image", "named container", "crun bundle", "podman", "apptainer"
PYXIS = "pyxis, named"
PYXIS_FILES = os.environ.get("SHOAL_TEST_PYXIS", "")
"""A directory with enroot.deb and spank_pyxis.so for the hosts' Slurm, as for tests/e2e/test_pyxis.py."""
LIMIT_S = 0.08
"""How much longer than bare srun the start in a named container may take."""
PLACE = "/shared/bench"
ROOT = f"{PLACE}/root"
# A root file system with a shell and `true`: what starts is measured, not how large its image is.
MAKE_ROOT = rf"""
mkdir -p {ROOT}/bin {ROOT}/etc {ROOT}/tmp {ROOT}/proc {ROOT}/dev {ROOT}/sys
for program in /bin/sh /bin/true; do
    cp $program {ROOT}/bin
    ldd $program | grep -o '/[^ ]*' | while read -r file; do mkdir -p {ROOT}$(dirname $file); cp $file {ROOT}$file; done
done
"""
MAKE_CRUN_BUNDLE = rf"""
mkdir -p {ROOT}-crun/rootfs && cp -r {ROOT}/. {ROOT}-crun/rootfs
cd {ROOT}-crun && srun -w {NODE} crun spec --rootless
sed -i 's/"terminal": true/"terminal": false/' config.json
"""
PODMAN_PACKAGES = ("podman", "uidmap", "slirp4netns", "fuse-overlayfs")
PODMAN_SETTINGS = {
    "containers.conf": "[containers]\nkeyring = false\n[engine]\ncgroup_manager = 'cgroupfs'\nevents_logger = 'file'\n",
    "storage.conf": "[storage]\ndriver = 'overlay'\n"
    "[storage.options.overlay]\nmount_program = '/usr/bin/fuse-overlayfs'\n",
}
IN_JOB = "export XDG_RUNTIME_DIR=/tmp/run-{user}; mkdir -p -m 700 $XDG_RUNTIME_DIR; {command}"
"""slurmd makes no such directory, and podman needs one."""


class Hosts:
    """The hosts of the cluster, by plain ssh."""

    def __init__(self, directory: Path, cluster: str, key: Path) -> None:
        self._directory, self._key = directory, key
        self.shared = Layout(cache_dir(), cluster).shared

    def run(self, host: str, command: str, *, user: str = "root", stdin: str = "") -> str:
        identity = ["-i", str(self._key), "-l", user] if user != "root" else []
        line = ["ssh", "-F", str(self._directory / "ssh_config"), *identity, host, command]
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            raise BenchError(f"{command!r} on {host} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def as_user(self, command: str, stdin: str = "") -> str:
        return self.run("controller", command, user=USER, stdin=stdin)

    def packaged(self, package: str) -> bool:
        return bool(self.run(NODE, f"apt-cache show --no-all-versions {package} 2> /dev/null || true").strip())

    def install(self, *packages: str) -> None:
        self.run(
            NODE, f"DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends {' '.join(packages)}"
        )


def main() -> None:
    options = _parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="containers-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    try:
        with provide_cluster(scratch, SPEC, options) as (cluster, _, key):
            write_ssh_config(scratch, targets(cluster))
            hosts = Hosts(scratch, cluster, key)
            try:
                heading = describe_machine(options, hosts.run("controller", "srun --version").strip())
                commands, notes = _prepare(hosts, small=options.small)
                show_progress(f"timing {', '.join(commands)}, {options.rounds} rounds")
                shutil.copy(HERE / "timer.py", hosts.shared / "timer.py")
                plan = json.dumps({"commands": commands, "rounds": options.rounds})
                times = json.loads(hosts.as_user("python3 /shared/timer.py", stdin=plan))
            finally:
                _clean_up(hosts)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report("containers", options, f"{heading}\n\n{_table(times)}\n{notes}\n{_target(times)}\n")


def _clean_up(hosts: Hosts) -> None:
    hosts.run("controller", f"rm -rf {PLACE} /shared/timer.py /shared/shoal-jobs/{USER}/images")
    hosts.run(NODE, f"rm -rf {IMAGES}/{USER}")


def _prepare(hosts: Hosts, *, small: bool) -> tuple[dict[str, str], str]:
    """The commands to time, and what is said of engines that are not there."""
    hosts.run("controller", f"install -d -o {USER} {PLACE}")
    hosts.as_user(f"set -e; {MAKE_ROOT} {MAKE_CRUN_BUNDLE}")
    hosts.as_user(f"shoal image build tiny {ROOT}")
    bundle = hosts.as_user("shoal image bundle tiny").strip()
    named = hosts.as_user("shoal image bundle tiny --name named --container-name mine").strip()
    srun = f"srun -w {NODE}"
    commands = {
        BARE: f"{srun} true",
        IMAGE: f"{srun} --container={bundle} true",
        NAMED: f"{srun} --container={named} true",
        CRUN: f"{srun} --container={ROOT}-crun true",
    }
    if small:
        return commands, "without podman and apptainer, which take long to install\n"
    commands[PODMAN] = f"{srun} sh -c {shlex.quote(_prepare_podman(hosts))}"
    if PYXIS_FILES:
        commands[PYXIS] = f"{srun} --container-name={_prepare_pyxis(hosts)} true"
    if not hosts.packaged("apptainer"):
        return commands, "apptainer is not packaged for this Debian\n"
    hosts.install("apptainer")
    commands[APPTAINER] = f"{srun} apptainer --silent exec {ROOT} true"
    return commands, ""


def _prepare_podman(hosts: Hosts) -> str:
    """Install podman with the image; the command that runs `true` in it."""
    hosts.install(*PODMAN_PACKAGES)
    for name, text in PODMAN_SETTINGS.items():
        hosts.run(NODE, f"mkdir -p /etc/containers && cat > /etc/containers/{name}", stdin=text)
    load = IN_JOB.format(user=USER, command=f"tar -C {ROOT} -c . | podman import -q - tiny")
    hosts.as_user(f"srun -w {NODE} sh -c {shlex.quote(load)}")
    return IN_JOB.format(user=USER, command="exec podman run --rm --network=host tiny true")


def _prepare_pyxis(hosts: Hosts) -> str:
    """Install enroot and pyxis as `containers: {engine: pyxis}` does; the name of a container that is there."""
    for file in ("enroot.deb", "spank_pyxis.so"):
        shutil.copy(Path(PYXIS_FILES) / file, hosts.shared / file)
    hosts.install(*pyxis.PACKAGES)
    hosts.run(NODE, "dpkg --install --force-confold /shared/enroot.deb")
    hosts.run(NODE, f"mkdir -p {Path(pyxis.SETTINGS).parent} && cat > {pyxis.SETTINGS}", stdin=pyxis.enroot_conf())
    hosts.run(NODE, f"install -d -m 1777 {' '.join(pyxis.PLACES.values())}")
    for host in ("controller", NODE):
        hosts.run(host, "install -D -m 0755 -t /opt/pyxis /shared/spank_pyxis.so")
    line = "required /opt/pyxis/spank_pyxis.so container_scope=global"
    hosts.run("controller", f"echo '{line}' >> /etc/slurm/plugstack.conf && scontrol reconfigure")
    hosts.run(NODE, "systemctl restart slurmd")
    image, name = f"{PLACE}/tiny.sqsh", "tiny"
    hosts.as_user(f"srun -w {NODE} mksquashfs {ROOT} {image} -noappend -quiet -no-progress")
    hosts.as_user(f"srun -w {NODE} --container-image={image} --container-name={name} true")
    return name


def _table(times: dict[str, list[float]]) -> str:
    lines = [f"{'start of `true`':<18}{'median':>10}{'best':>10}{'over srun':>12}"]
    for name, values in times.items():
        over = "" if name == BARE else f"{_difference(times, name):+.3f} s"
        lines.append(f"{name:<18}{median(values):>8.3f} s{min(values):>8.3f} s{over:>12}")
    return "\n".join(lines) + "\n"


def _difference(times: dict[str, list[float]], name: str) -> float:
    """The median of the differences in the same round, so that load affects both."""
    return median(own - bare for own, bare in zip(times[name], times[BARE], strict=True))


def _target(times: dict[str, list[float]]) -> str:
    seconds = _difference(times, NAMED)
    met = "met   " if seconds <= LIMIT_S else "MISSED"
    return f"Target: {met} a named container starts {seconds:+.3f} s over bare srun (at most {LIMIT_S:+.2f})"


def _parse_arguments() -> argparse.Namespace:
    parser = bench_parser("containers", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=20, help="how often each is started")
    add_cluster_options(parser)
    options = parser.parse_args()
    if options.small:
        options.rounds = 1
    return options


if __name__ == "__main__":
    run_bench("containers", main)
