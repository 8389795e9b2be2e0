"""The faults of `tests/matrix/test_doctor_faults.py`: how each is made, what is found, and how it ends."""

import shlex
from collections.abc import Callable

from tests.matrix.doctor_scene import MOUNT_FROZEN, THAW, Case, Fault, Scene, now_us

from shoal.slurm.conf import SPOOL_DIRECTORY, STATE_DIRECTORY

Step = Callable[[Scene], object]


def conf(script: str) -> Step:
    """Other words in slurm.conf, which slurmctld compares with what the nodes report.

    From 23.02 on a node that was resumed keeps its old reason, also when its next registration is rejected: `play`
    waits for what the doctor finds.
    """

    def make(scene: Scene) -> None:
        scene.edit_conf(script)
        scene.wait("the registration of fish1 is rejected", lambda: "INVALID_REG" in scene.node())

    return make


def on_node(text: str, host: str = "fish1") -> Step:
    return lambda scene: scene.sh(host, text)


def fail_script(name: str) -> Step:
    def make(scene: Scene) -> None:
        scene.sh("fish1", f"touch /run/fail-{name}")
        scene.submit("--wrap", "true")
        scene.await_reason(f"{name.capitalize()} error")
        if name == "prolog":
            scene.wait("the job is held", lambda: "held" in scene.sh("controller", "squeue -h -o %r"))

    return make


def rename_gpu(scene: Scene) -> None:
    """Slurm compares types only where a node reports several records of GPUs."""
    split = r"s/^\(NodeName=.* Name=gpu .*File=.dev.nvidia\)\[0-1\]/\10\n\11/"
    scene.edit_conf(split, "gres.conf")
    for name in ("fish1", "fish2"):
        scene.sh(name, "systemctl restart slurmd")
    scene.wait("the nodes are idle", scene.is_idle)
    conf(r"s/Gres=gpu:\([^:]*\):2/Gres=gpu:\1:1,gpu:h100:1/")(scene)


def lose_device(scene: Scene) -> None:
    """A card that fell off the bus: no device file, and nvidia-smi does not have it."""
    scene.sh("fish1", "touch /run/lost1; mount --bind /dev/nvidia1 /run/lost1; umount /dev/nvidia1; rm /dev/nvidia1")
    scene.sh("fish1", "cp /etc/shoal-gpus /etc/shoal-gpus.all; sed -i 2d /etc/shoal-gpus")
    scene.sh("fish1", "systemctl restart slurmd", check=False)


RETURN_DEVICE = (
    "touch /dev/nvidia1; mount --bind /run/lost1 /dev/nvidia1; umount /run/lost1; "
    "mv /etc/shoal-gpus.all /etc/shoal-gpus"
)


def return_device(scene: Scene) -> None:
    scene.sh("fish1", RETURN_DEVICE)
    scene.cluster.json("up")


def cancel_jobs(scene: Scene) -> None:
    scene.sh("controller", "scancel -u root; scancel -u alice", check=False)
    scene.wait("no job is left", lambda: scene.sh("controller", "squeue -h") == "")


def start_stuck_job(scene: Scene) -> str:
    """A job whose process waits for the frozen file system."""
    scene.sh("fish1", MOUNT_FROZEN)
    job = scene.submit("--wrap", "exec stat /mnt/frozen/file")
    scene.wait("it waits", lambda: scene.sh("fish1", "pgrep -x stat", check=False) != "")
    return job


def fail_to_kill(scene: Scene) -> None:
    scene.sh("controller", f"scancel {start_stuck_job(scene)}")
    scene.await_reason("Kill task failed")


def thaw(scene: Scene) -> None:
    scene.sh("fish1", THAW)
    scene.wait("no step is left", lambda: not scene.sh("fish1", "pgrep slurmstepd", check=False))
    scene.wait("no job is left", lambda: scene.sh("controller", "squeue -h") == "")


def fill_spool(scene: Scene) -> None:
    # A directory takes no space of a tmpfs, but an inode: there slurmstepd gets the error that Slurm drains for.
    fill = "touch $(seq 16) 2> /dev/null; true"
    scene.sh("fish1", f"mount -t tmpfs -o nr_inodes=16 tmpfs {SPOOL_DIRECTORY} && cd {SPOOL_DIRECTORY} && {fill}")
    scene.submit("--wrap", "true")
    scene.await_reason("SlurmdSpoolDir is full")


def empty_spool(scene: Scene) -> None:
    scene.sh("fish1", f"umount -l {SPOOL_DIRECTORY}")
    cancel_jobs(scene)


def require_missing_plugin(scene: Scene) -> None:
    """slurmstepd ends with an error that slurmctld does not know as harmless."""
    keep = "cd /run/slurm/conf; [ ! -e plugstack.conf ] || mv plugstack.conf plugstack.kept"
    scene.sh("fish1", f"{keep}; echo 'required /usr/lib/missing-plugin.so' > plugstack.conf")
    scene.submit("--wrap", "true")
    scene.await_reason("batch job complete failure")


def drop_missing_plugin(scene: Scene) -> None:
    restore = "[ ! -e plugstack.kept ] || mv plugstack.kept plugstack.conf"
    scene.sh("fish1", f"cd /run/slurm/conf; rm plugstack.conf; {restore}")
    cancel_jobs(scene)


def lose_state_of_jobs(scene: Scene) -> None:
    """slurmctld without its record of jobs gives out the number of one that still runs."""
    scene.edit_conf("s/UnkillableStepTimeout=.*/UnkillableStepTimeout=900/")
    scene.sh("fish1", "systemctl restart slurmd")
    scene.wait("fish1 is idle", scene.is_idle)
    job = start_stuck_job(scene)
    lose = f"rm -f {STATE_DIRECTORY}/job_state*; echo FirstJobId={job} >> /etc/slurm/slurm.conf"
    scene.sh("controller", f"systemctl stop slurmctld; {lose}; systemctl start slurmctld")
    scene.wait("fish1 is idle", lambda: scene.node().startswith("IDLE"))
    assert scene.submit("--wrap", "true") == job
    scene.await_reason("Duplicate jobid")


def end_old_step(scene: Scene) -> None:
    scene.sh("fish1", f"{THAW}; pkill -9 slurmstepd; systemctl restart slurmd", check=False)
    cancel_jobs(scene)
    scene.cluster.json("up", status=None)


def lose_names(scene: Scene) -> None:
    scene.edit_conf("s/ NodeAddr=/ NodeAddr=lost-/")
    scene.await_reason("NO NETWORK ADDRESS FOUND")


RETURN = ("HealthCheckInterval: 3", "HealthCheckInterval: 3\n    ReturnToService: 0")


def reboot_unasked(scene: Scene) -> None:
    """A container has the uptime of its machine; with -b slurmd reports that the host has booted just now."""
    scene.cluster.edit(*RETURN)
    scene.cluster.json("up")
    scene.wait("fish1 is idle", scene.is_idle)
    scene.sh("fish1", "systemctl stop slurmd; sleep 2; sed -i 's/SLURMD_OPTIONS=[\"]*/&-b /' /etc/default/slurmd")
    scene.sh("fish1", "systemctl start slurmd")
    scene.await_reason("Node unexpectedly rebooted")


def return_to_service(scene: Scene) -> None:
    scene.cluster.edit(*reversed(RETURN))
    repair_by_up(scene)


def repair_by_up(scene: Scene) -> None:
    scene.cluster.json("up", status=None)
    for name in ("fish1", "fish2"):
        scene.sh(name, "systemctl reset-failed slurmd 2> /dev/null; systemctl restart slurmd")


CLOUD = (
    "NodeName=cloud1 CPUs=1 State=CLOUD\\n"
    "PartitionName=cloud Nodes=cloud1 SuspendTime=600\\n"
    "SuspendProgram=/bin/true\\nResumeProgram=/bin/true\\nSuspendExcNodes=fish[1-2]\\n"
    "SuspendTime=600\\nResumeTimeout=15\\n"
)


def order_cloud_node(scene: Scene) -> None:
    scene.sh("controller", f"printf '{CLOUD}' >> /etc/slurm/slurm.conf && systemctl restart slurmctld")
    scene.wait("slurmctld answers", lambda: "cloud1" in scene.sh("controller", "scontrol show node cloud1"))
    scene.sh("controller", "sbatch --chdir=/ -o /dev/null -p cloud --wrap true")
    scene.await_reason("ResumeTimeout reached", "cloud1")


def give_up_cloud_node(scene: Scene) -> None:
    cancel_jobs(scene)
    repair_by_up(scene)


def reboot_in_vain(scene: Scene) -> None:
    """The host is told to reboot, and its slurmd is not heard of again: with ReturnToService=2 it would be forgiven."""
    scene.sh("controller", "scontrol reboot ASAP fish1")
    scene.wait("the reboot is issued", lambda: "REBOOT_ISSUED" in scene.node())
    scene.sh("fish1", "systemctl kill -s STOP slurmd")
    scene.await_reason("reboot timed out", seconds=240)


def set_clock_ahead(scene: Scene) -> None:
    """By hand, and chrony has ended: it would correct it within a minute or so."""
    scene.sh("fish1", "systemctl stop chrony; date -s @$(($(date +%s) + 420)) > /dev/null")


def lose_cgroups(scene: Scene) -> None:
    """The hosts of the sandbox have no cgroups of their own unless asked for."""
    scene.sh("controller", "sed -i 's/CgroupPlugin=.*/CgroupPlugin=cgroup\\/v2/' /etc/slurm/cgroup.conf")
    scene.edit_conf("s/ProctrackType=.*/ProctrackType=proctrack\\/cgroup/")
    scene.wait("fish2 has registered", lambda: scene.node("fish2").startswith("IDLE"))
    scene.sh("fish1", "systemctl restart slurmd", check=False)


def hang_epilog(scene: Scene) -> None:
    scene.sh("fish2", "touch /run/hang-epilog")
    scene.submit("--wrap", "true", node="fish2")


def break_daemons(scene: Scene) -> None:
    fill = "head -c 2m /dev/zero > /var/tmp/core; true"
    scene.sh("fish1", f"systemctl stop slurmd munge; userdel alice; mount -t tmpfs -o size=1m tmpfs /var/tmp; {fill}")


def break_configuration(scene: Scene) -> None:
    """A file system that is read-only takes the node out of service, too."""
    scene.sh("fish1", "head -c 1024 /dev/urandom > /etc/munge/munge.key; echo '# edited' >> /run/slurm/conf/slurm.conf")
    scene.sh("fish1", "systemctl restart munge; mount -t tmpfs -o ro tmpfs /var/tmp")


def umount(scene: Scene) -> None:
    scene.sh("fish1", "umount /var/tmp")
    scene.check_node()  # its timer may have found it, too


def break_release(scene: Scene) -> None:
    scene.sh("fish1", "mount -t tmpfs -o nr_inodes=10 tmpfs /var/tmp; cd /var/tmp; touch $(seq 10); true")
    scene.check_node(runs=2)
    scene.await_reason("shoal: health: inodes-full")
    scene.sh("fish1", f"printf '{OTHER_RELEASE}' > /usr/local/sbin/slurmd; chmod 755 /usr/local/sbin/slurmd")


def repair_release(scene: Scene) -> None:
    scene.sh("fish1", "rm /usr/local/sbin/slurmd; umount /var/tmp")
    scene.check_node()


def hang_share(scene: Scene) -> None:
    scene.sh("fish1", f"{MOUNT_FROZEN}; systemd-run -q --unit=stuck stat /mnt/frozen/file")
    scene.sh("fish1", "sleep 1; systemctl kill -s KILL stuck")
    scene.check_node(runs=2)
    scene.await_reason("share-hangs")


def thaw_share(scene: Scene) -> None:
    scene.sh("fish1", f"{THAW}; systemctl reset-failed stuck 2> /dev/null; true")
    scene.check_node()


def heal(scene: Scene) -> None:
    scene.check_node(runs=2)


def log(*texts: str) -> str:
    """A kernel log with messages of a minute ago."""
    lines = "\n".join(f"3,100,{now_us() - 60_000_000},-;{text}" for text in texts)
    there = "[ -e /dev/kmsg ] || : > /dev/kmsg"
    return f"{there}; echo {shlex.quote(lines)} > /run/kmsg; mount --bind /run/kmsg /dev/kmsg"


def break_host_parts(scene: Scene) -> None:
    """Errors in the kernel's log and files, which its health program reads. First the link is fast and memory free."""
    scene.check_node(mounts=f"{CLASSES}; echo 10000 > net/eth9/speed")
    scene.check_node(runs=2)
    mounts = (log("I/O error, dev sda, sector 8 op 0x0"), f"{CLASSES}; {SENSORS}", EDAC, MEMINFO)
    scene.check_node(runs=2, mounts="; ".join(mounts))
    scene.await_reason("shoal: health: memory-errors")


def break_gpus(scene: Scene) -> None:
    scene.sh("fish1", "systemd-run -q --uid=alice --unit=left sleep 900")
    pid = scene.sh("fish1", "systemctl show -p MainPID --value left").strip()
    ill = {
        "ecc": 2,
        "remap_pending": 1,
        "links": 17,
        "link_errors": 208,
        "throttle": 0x40,
        "width": 8,
        "persistence": 0,
    }
    scene.check_node({"pid": pid}, {"recovery": 4}, runs=2)
    scene.check_node({"pid": pid}, {**ill, "recovery": 4})
    scene.await_reason("gpu-recovery")


def heal_gpus(scene: Scene) -> None:
    """A reset of the GPU: what was learned of its lanes and links stays."""
    scene.sh("fish1", "systemctl stop left")
    scene.check_node({}, {"links": 17, "width": 8, "persistence": 0})


def lose_gpus(scene: Scene) -> None:
    """One GPU is gone; another has retired pages, rows that cannot be remapped, and an XID."""
    ill = {"remap_failed": 1, "recovery": None}
    scene.check_node(ill, mounts=log("NVRM: Xid (PCI:0000:41:00): 79, pid=7"))
    scene.await_reason("gpu-xid")


def retire_pages(scene: Scene) -> None:
    scene.check_node({}, {"remap_pending": None, "retired": 1})


def mismatch(scene: Scene) -> None:
    scene.check_node(init=18)
    scene.await_reason("gpu-driver-mismatch")


CLASSES = "mount -t tmpfs tmpfs /sys/class; cd /sys/class; mkdir -p net/eth9/device; echo 1000 > net/eth9/speed"
EDAC = (
    "mount -t tmpfs tmpfs /sys/devices/system; cd /sys/devices/system; mkdir -p edac/mc/mc0 clocksource/clocksource0; "
    "echo 2 > edac/mc/mc0/ue_count; echo 0 > edac/mc/mc0/ce_count; "
    "echo shaky > clocksource/clocksource0/current_clocksource"
)
SENSORS = "mkdir -p hwmon/hwmon0; echo nct6775 > hwmon/hwmon0/name; echo 1 > hwmon/hwmon0/fan1_alarm"
MEMINFO = (
    "sed 's/^MemAvailable:.*/MemAvailable: 1000 kB/' /proc/meminfo > /run/meminfo; "
    "mount --bind /run/meminfo /proc/meminfo"
)
LARGE = "CPUs=64 Sockets=8 CoresPerSocket=8 ThreadsPerCore=1"
OTHER_RELEASE = "#!/bin/sh\\necho slurm 26.05.1\\n"
REGISTERED = ("conf-differs",)
"""The nodes still have the files that slurmctld has no longer."""
HEALTH = ("health-drain",)


def sim(number: int, finding: str, evidence: str, *, fix: bool = False) -> Fault:
    return Fault(number, finding, evidence, fix, how="simulated")


def fixed(number: int, finding: str, evidence: str) -> Fault:
    return Fault(number, finding, evidence, fix=True)


CASES = (
    Case((sim(41, "disk-errors", "dev sda"), sim(43, "memory-held", "MB in use without a job"),
          sim(45, "memory-errors", "2 errors that could not be corrected"),
          sim(46, "link-slow", "eth9: 1000 Mbit/s, before 10000"), sim(47, "clock-source", "shaky, before "),
          sim(48, "sensors", "alarm: nct6775 fan1")), break_host_parts, also=HEALTH, repair=heal),
    Case((sim(44, "gpu-process-left", "sleep .pid"), sim(52, "gpu-recovery", "then reset the GPU"),
          sim(54, "gpu-ecc", "2 errors"), sim(55, "gpu-remap-pending", "replaced at the next reset"),
          sim(58, "gpu-nvlink", "17 NVLinks, before 18", fix=True), sim(59, "gpu-nvlink-errors", "rose by 201"),
          sim(60, "gpu-clock", "much too hot"), sim(61, "gpu-pcie", "8 lanes, before 16", fix=True),
          sim(62, "gpu-persistence", "persistence mode is off", fix=True)), break_gpus, also=HEALTH, repair=heal_gpus),
    Case((sim(51, "gpu-lost", "GPU-1 is gone", fix=True), sim(53, "gpu-xid", "XID 79"),
          sim(56, "gpu-remap-failed", "could not be replaced")), lose_gpus, also=HEALTH,
         repair=lambda scene: scene.check_node({}), after=heal),
    Case((sim(57, "gpu-remap-pending", "pages are retired"),), retire_pages, repair=heal),
    Case((sim(49, "gpu-driver-mismatch", "version mismatch"),), mismatch, also=(*HEALTH, "gpu-lost"), repair=heal),
    Case((fixed(31, "munge-stopped", "munge is inactive"), fixed(35, "user-missing", "alice has no account"),
          fixed(50, "slurmd-stopped", "slurmd is inactive"), Fault(37, "disk-full", "/var/tmp is full")), break_daemons,
         also=HEALTH, repair=umount),
    Case((fixed(29, "munge-key", "Invalid credential"), fixed(33, "conf-differs", "slurm.conf"),
          Fault(39, "read-only", "Read-only file system")), break_configuration, also=HEALTH,
         repair=umount),
    Case((sim(32, "version-skew", "slurmd 26.05.1, slurmctld on "), Fault(38, "inodes-full", "0 of 10 inodes free")),
         break_release, also=HEALTH, repair=repair_release),
    Case((Fault(40, "share-hangs", "/mnt/frozen .fuse. does not answer"),
          Fault(42, "processes-stuck", "stat .pid|python3")),
         hang_share, also=HEALTH, repair=thaw_share),
    Case((fixed(14, "prolog-error", "prolog"),), fail_script("prolog"), repair=on_node("rm /run/fail-prolog"),
         more_fixes=("job-launch-failed",), after=cancel_jobs),
    Case((fixed(16, "epilog-error", "epilog"),), fail_script("epilog"), repair=on_node("rm /run/fail-epilog")),
    Case((fixed(17, "kill-task-failed", "Kill task failed"),), fail_to_kill, repair=thaw),
    Case((fixed(19, "spool-full", "SlurmdSpoolDir is full"),), fill_spool,
         also=("inodes-full", "job-launch-failed"), repair=empty_spool),
    Case((fixed(5, "gpu-missing", "can't stat gres.conf file /dev/nvidia1"),), lose_device, after=return_device),
    Case((fixed(6, "gpu-type-missing", r"gres/gpu:\S* count too low"),), rename_gpu,
         also=(*REGISTERED, "gpu-missing")),
    Case((Fault(23, "not-responding", "(?i)not.responding"),), on_node("systemctl kill -s STOP slurmd"),
         repair=on_node("systemctl kill -s CONT slurmd"), patience_s=240),
    Case((fixed(22, "no-address", "NO NETWORK ADDRESS FOUND"),), lose_names, also=REGISTERED),
    Case((Fault(34, "cgroups", "cgroup"),), lose_cgroups, also=("slurmd-stopped", "not-responding", *REGISTERED),
         repair=repair_by_up),
    Case((Fault(26, "reboot-timeout", "reboot timed out"),), reboot_in_vain, patience_s=240,
         repair=on_node("systemctl kill -s CONT slurmd")),
    Case((Fault(25, "resume-timeout", "ResumeTimeout reached"),), order_cloud_node, host="cloud1",
         also=(*REGISTERED, "job-waits-for-node"), repair=give_up_cloud_node),
    Case((fixed(20, "batch-complete-failure", "batch job complete failure"),), require_missing_plugin,
         also=(*REGISTERED, "job-launch-failed"), repair=drop_missing_plugin),
    Case((fixed(21, "duplicate-job", "Duplicate jobid"),), lose_state_of_jobs, also=REGISTERED, repair=end_old_step),
    Case((fixed(24, "unexpected-reboot", "Node unexpectedly rebooted"),), reboot_unasked,
         after=return_to_service),
    Case((Fault(36, "job-completing", "on fish2 ended"),), hang_epilog, host="", patience_s=300,
         repair=on_node("rm /run/hang-epilog; pkill -x -f 'sleep 900'", "fish2")),
    Case((fixed(1, "low-memory", r"Low RealMemory \(reported:"),
          fixed(2, "low-cores", r"Low socket\*core\*thread count"), fixed(3, "low-cpus", "Low CPUs"),
          fixed(4, "low-tmpdisk", "Low TmpDisk")),
         conf(f"s/CPUs=.* RealMemory=[0-9]*/{LARGE} TmpDisk=99999999 RealMemory=99999999/"),
         also=REGISTERED),
    Case((fixed(5, "gpu-missing", "gres/gpu count .*2 < 4"),),
         conf(r"s/Gres=gpu:\([^:]*\):2/Gres=gpu:\1:4/"), also=REGISTERED),
)  # fmt: skip
CLOCK_CASE = Case(
    (fixed(30, "clock", r"(?s)4\d\d s ahead of controller.*Rewound credential"),),
    set_clock_ahead,
    also=("not-responding",),
)
"""Containers have the clock of their machine."""
