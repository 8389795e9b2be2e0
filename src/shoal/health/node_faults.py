"""The faults that the health program on the nodes finds, every five minutes: of hosts and of GPUs."""

from __future__ import annotations

from shoal.health.faults import Fault
from shoal.remote.node_health.gpu_driver import DEBIAN_PACKAGES, UBUNTU_PACKAGES
from shoal.remote.node_health.node import DRAINING
from shoal.spec.finding import Level

FORGET = "forget"
"""What Shoal can do: have a node learn its baseline again."""
_AS_NEW = "; if it is meant to be so, `shoal doctor --fix {id}` has the node learn its baseline again"


def _fault(id: str, what: str, cause: str, fix: str) -> Fault:
    return Fault(id, "error" if id in DRAINING else "warning", what, cause, fix)


def _compared(id: str, what: str, cause: str, fix: str) -> Fault:
    """A node that differs from its own baseline."""
    level: Level = "error" if id in DRAINING else "warning"
    return Fault(id, level, what, cause, fix + _AS_NEW.replace("{id}", id), FORGET, explicit=True)


NODE_FAULTS = (
    Fault(
        "health-stale",
        "warning",
        "the health program of the node does not run",
        "its timer was stopped, or a run hangs in a GPU's driver",
        "read `shoal ssh {host} systemctl status shoal-health.timer shoal-health`; `shoal up` starts it again",
    ),
    _fault(
        "share-hangs",
        "a share does not answer",
        "its server is off, cut off or busy: jobs that use it wait in the kernel, and cannot be ended",
        "start the server; if it is gone for good, `umount -f -l` on the host",
    ),
    _fault(
        "processes-stuck",
        "processes wait in the kernel for minutes, and cannot be ended",
        "a share, a disk or a driver does not answer",
        "see the other findings of the host; if there is none, reboot it",
    ),
    _fault(
        "disk-errors",
        "a disk has errors, or an array has lost a disk",
        "the disk fails, or its cable",
        "read `journalctl -k` on the host; save its files and replace the disk",
    ),
    _fault(
        "memory-errors",
        "memory modules have errors",
        "a module fails: results may be wrong, and the host may stop",
        "read `/sys/devices/system/edac/mc` on the host; replace the module",
    ),
    _compared(
        "link-slow",
        "a network link is down, or slower than it was",
        "a cable, a port, or a switch that was changed",
        "check the cable and the port, then `ethtool` on the host",
    ),
    _compared(
        "clock-source",
        "the kernel uses another clock than before",
        "the processor's time stamp counter drifted: each look at the clock takes longer",
        "reboot the host; if it happens again, update its firmware",
    ),
    _compared(
        "cpu-governor",
        "the processor is governed otherwise than before",
        "an update or a person changed the governor of its frequency",
        "set it again: `cpupower frequency-set -g GOVERNOR`",
    ),
    _compared(
        "sensors",
        "a sensor of the host raises an alarm",
        "a fan stands still, a power supply failed, or a part is too hot",
        "read `sensors` and `ipmitool sel list` on the host; replace the part",
    ),
    _fault(
        "gpu-test",
        "a GPU fails its acceptance check",
        "it does not open, or its memory, a copy or a product is wrong. The check runs when the node joins or has "
        "booted, while no job is there",
        "reset the GPU (`nvidia-smi --gpu-reset -i GPU`) or reboot the host; if it fails again, have it serviced",
    ),
    _compared(
        "gpu-slow",
        "a GPU copies or computes at less than half of its speed",
        "its slot, its power or its cooling is worse than before",
        "check fans, the power supply and the slot of the host",
    ),
    _fault(
        "gpu-driver",
        "the host has an NVIDIA GPU without a driver that works, and Slurm counts none",
        "the driver is not installed, or the kernel was updated and its module was not built",
        "write `driver: nvidia` in its nodeset, and `shoal up`. By hand: on Debian 12 and 13 enable `contrib non-free "
        f"non-free-firmware`, then install `linux-headers-amd64 {' '.join(DEBIAN_PACKAGES)}`; on Ubuntu "
        f"`{' '.join(UBUNTU_PACKAGES)}`; reboot; then `shoal up`",
    ),
    _fault(
        "driver-reboot",
        "the driver of its GPUs is installed, and works after a reboot",
        "`driver: nvidia` in the cluster's file, and `shoal up` has installed it",
        "wait: the node is drained, reboots when its jobs have ended, and is resumed when the driver works; then run "
        "`shoal up`, which adds its GPUs. If it does not work then, `dkms status` and `dmesg` on the host say why",
    ),
    _fault(
        "gpu-driver-mismatch",
        "the driver's library and its kernel module are of different releases",
        "the driver was upgraded while its old module was loaded",
        "drain the node (`shoal node drain {host}`), and reboot it when its jobs have ended",
    ),
    _compared(
        "gpu-lost",
        "a GPU that the node had is gone",
        "it fell off the bus, or it was taken out",
        "reboot the host; if it is still gone, check its power and its slot",
    ),
    _fault(
        "gpu-recovery",
        "a GPU's driver asks for an action",
        "an error from which the GPU does not recover by itself",
        "do just that, when the jobs on it have ended: `nvidia-smi --gpu-reset -i GPU`, or a reboot",
    ),
    _fault(
        "gpu-xid",
        "a GPU had an error that needs an action",
        "the driver reported it in the kernel's log; the number says what it is",
        "do what the evidence says, when the jobs on it have ended: `nvidia-smi --gpu-reset -i GPU`, or a reboot",
    ),
    _fault(
        "gpu-xid-past",
        "a GPU had an error and has recovered",
        "the driver reported it in the kernel's log, and asks for no action now",
        "watch it: if it happens again, have the GPU serviced",
    ),
    _fault(
        "gpu-ecc",
        "a GPU's memory has errors that could not be corrected",
        "bad cells of its memory: results may be wrong, and jobs end",
        "reset the GPU when its jobs have ended: `nvidia-smi --gpu-reset -i GPU`; if it comes back, have it serviced",
    ),
    _fault(
        "gpu-remap-pending",
        "a GPU replaces bad memory at its next reset",
        "errors of its memory; it can be used until then",
        "reset it when its jobs have ended: `nvidia-smi --gpu-reset -i GPU`",
    ),
    _fault(
        "gpu-remap-failed",
        "a GPU cannot replace its bad memory",
        "it has no spare rows left",
        "have the card replaced",
    ),
    _compared(
        "gpu-nvlink",
        "a GPU has fewer NVLinks than before",
        "a link did not train, or a bridge is loose",
        "reset the GPU or reboot the host; check the bridge",
    ),
    _fault(
        "gpu-nvlink-errors",
        "an NVLink of a GPU has more and more errors",
        "a bridge, a cable or a connector is loose or fails",
        "put the bridge or the card in again; if it goes on, have it serviced",
    ),
    _fault(
        "gpu-clock",
        "a GPU is slowed down",
        "it is too hot, or its power supply is too weak",
        "check fans, filters and the power supply of the host",
    ),
    _compared(
        "gpu-pcie",
        "a GPU has fewer PCIe lanes than before",
        "it sits badly in its slot, or the slot is shared",
        "put the card in again",
    ),
    _compared(
        "gpu-persistence",
        "the persistence mode of a GPU was switched off",
        "nvidia-persistenced does not run, or the driver was installed again: programs start seconds later",
        "`systemctl enable --now nvidia-persistenced` on the host, or `nvidia-smi -pm 1`",
    ),
    _fault(
        "fabric-manager",
        "the host has NVSwitches, and their manager does not run: CUDA cannot start",
        "nvidia-fabricmanager is stopped, or of another release than the driver",
        "`systemctl enable --now nvidia-fabricmanager` on the host; its release must be the driver's",
    ),
    _fault(
        "step-left",
        "processes have outlived their job",
        "the job started them beside its steps, or they could not be ended",
        "end them: `kill -9 PID` on the host, or `health: {leftovers: kill}` in the cluster's file",
    ),
    _fault(
        "gpu-process-left",
        "a process computes on a GPU without a job",
        "it has outlived its job, or a person started it without Slurm: the next job shares the GPU with it",
        "end it: `kill -9 PID` on the host, or `health: {leftovers: kill}` in the cluster's file",
    ),
    _fault(
        "memory-held",
        "memory is in use though no job runs",
        "processes or files in /dev/shm that a job left",
        "end the largest process, or delete the files in /dev/shm; if it is meant to be so, `health: {skip: "
        "[memory-held]}` in the cluster's file",
    ),
    _fault(
        "gpu-idle",
        "a job holds GPUs and does not use them",
        "the job waits for data, hangs, or needs no GPU; its log says so, too",
        "ask its user, or cancel it; `health: {idle_gpus: cancel, idle_after: 1h}` does so",
    ),
    _fault(
        "training-hung",
        "a training makes no step",
        "a rank hangs, and the others wait for it; or all of them wait for data or a save",
        "`shoal doctor --job JOB` names the rank that is behind; `health: {hung_jobs: requeue, hung_after: 30m}` "
        "queues such a job again without its node",
    ),
)
"""What the health program finds beside full and read-only file systems."""
