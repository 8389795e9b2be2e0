"""What a test may leave behind on a host: runs there by itself, as root, and prints lines by kind as JSON.

`python3 left_behind.py ROLE`: a controller also says what Slurm, its database and the ledger have. Python 3.8.
"""

import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time

WATCHED = ("/etc", "/shared", "/data", "/usr/local", "/opt", "/root", "/home", "/srv", "/tmp", "/var/tmp", "/dev/shm",
           "/var/lib/shoal/environments")  # fmt: skip
GROWS = (
    # Records, code and output of jobs.
    *(r"/shared/jobs(/.*)?", r"/shared/shoal-jobs/[^/]+/(?!environments/|images/).*", r"/data/jobs(/.*)?"),
    # What `shoal` keeps of a user or of root for the next command, and Slurm's own table of a user's jobs.
    *(r"/root/\.(cache|local|config|ssh/known_hosts.*)(/.*)?", r"/home/[^/]+/\.(cache|local|config|ssh)(/.*)?"),
    # Python compiles what it imports.
    *(r".*/__pycache__(/.*)?", r".*\.pyc"),
    # What torch and its data workers leave of every job.
    *(r"/tmp/torch(inductor|elastic)_[^/]+(/.*)?", r"/tmp/pymp-[^/]+(/.*)?"),
    # What `ssh` needs while the rental service runs, and for the next command.
    *(r"/tmp/shoal-(ssh|connections)-[^/]+(/.*)?",),
    # Copies by useradd, before its last change.
    *(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-",),
    # Rewritten by systemd, by package management or at every `up`, with nothing of a test in it.
    *(r"/etc/(ld\.so\.cache|machine-id|mtab)", r"/tmp/systemd-private-.*", r"/var/tmp/systemd-private-.*"),
    # Packages for all tests: many files, which are hard links.
    *(r"/shared/env(/.*)?",),
)
"""Paths that may come, change and go while tests use a cluster as they should."""
LEDGER = "/var/lib/shoal/elastic/ledger.db"
ENDS_S = 60
"""How long what has been cancelled or has ended may take until Slurm has its nodes back."""


def main():
    found = {
        "user": users(),
        "mount": mounts(),
        "firewall": firewall(),
        "file": sorted(line for top in WATCHED for line in files(top)),
        "service": services(),
    }
    if sys.argv[1:] == ["controller"]:
        wait_for_slurm()
        found.update(slurm())
        found["ledger"] = ledger()
    found["process"] = processes()
    print(json.dumps(found))


def lines(*command):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    return sorted(line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip())


def users():
    return lines("getent", "passwd") + lines("getent", "group")


def mounts():
    with open("/proc/self/mountinfo") as file:
        rows = [row.split() for row in file]
    # A session of a user has a directory of its own while it lasts.
    return sorted(f"{row[4]} {row[row.index('-') + 1]}" for row in rows if not row[4].startswith("/run/user"))


def firewall():
    if not shutil.which("nft"):
        return []
    done = subprocess.run(["nft", "list", "ruleset"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    text = re.sub(r"packets \d+ bytes \d+|expires \S+|# handle \d+", "", done.stdout.decode(errors="replace"))
    # The line of a rule alone does not say which chain has it.
    table, rules = "", []
    for line in text.splitlines():
        if line.startswith("table"):
            table = line.strip(" {")
            rules.append(table)
        elif line.strip(" {}\t"):
            rules.append(f"{table}: {' '.join(line.split())}")
    return rules


def files(top):
    """Each file with its owner, rights and size; below /etc with its content, too."""
    for directory, names, others in os.walk(top):
        names[:] = [name for name in names if not grows(os.path.join(directory, name))]
        for name in names + others:
            path = os.path.join(directory, name)
            if grows(path):
                continue
            try:
                status = os.lstat(path)
                line = f"{path} {status.st_mode:o} {status.st_uid}:{status.st_gid}"
                if os.path.islink(path):
                    line += " -> " + os.readlink(path)
                elif os.path.isfile(path):
                    line += f" {status.st_size}"
                    if top == "/etc":
                        with open(path, "rb") as file:
                            line += " " + hashlib.sha1(file.read()).hexdigest()[:12]
            except OSError:  # it has gone meanwhile
                continue
            yield line
        # Only this file system: a share is looked at where it is mounted.
        names[:] = [name for name in names if not os.path.islink(os.path.join(directory, name))]


GROWING = re.compile("|".join(f"(?:{pattern})" for pattern in GROWS))


def grows(path):
    return GROWING.fullmatch(path) is not None


def services():
    """Services that run or have failed. What a timer starts is over in a moment, and a login has its own."""
    rows = lines("systemctl", "list-units", "--type=service", "--state=running,failed", "--plain", "--no-legend")
    named = [row.split() for row in rows]
    return [f"{row[0]} {row[2]}" for row in named if len(row) > 2 and not row[0].startswith(("user@", "getty"))]


SERVES_LOGINS = re.compile(r"sshd|\(sd-pam|/lib/systemd/systemd|/usr/lib/systemd")


def processes():
    """Programs of people: not what serves their logins, nor what systemd has for each of them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            owner = os.stat("/proc/" + name).st_uid
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").replace("\0", " ").strip()
        except OSError:
            continue
        if 1000 <= owner < 65000 and words and not SERVES_LOGINS.match(words):
            found.append(f"{owner} {words}")
    return sorted(found)


def wait_for_slurm():
    end = time.time() + ENDS_S
    while time.time() < end:
        if not lines("squeue", "-h", "-t", "CG", "-o", "%i") and not lines("sinfo", "-h", "-t", "comp", "-o", "%N"):
            return
        time.sleep(0.3)


def slurm():
    return {
        "job": lines("squeue", "-h", "-o", "%i %u %j %T"),
        # `*`: Slurm waits for the answer of a node that was resumed a moment ago; a silent one becomes down.
        "node": sorted({line.replace("* ", " ") for line in lines("sinfo", "-h", "-N", "-o", "%N %T %E")}),
        "partition": [re.sub(r"(Nodes|TotalNodes|TotalCPUs|TRES)=\S*", "", line)
                      for line in lines("scontrol", "-o", "show", "partition")],
        "reservation": [line for line in lines("scontrol", "-o", "show", "reservation") if line.startswith("Reserv")],
        "setting": [line for line in lines("scontrol", "show", "config")
                    if not re.match(r"Configuration data|BOOT_TIME|NEXT_JOB_ID|Slurmctld\(|HASH_VAL", line)],
        "account": lines("sacctmgr", "-nP", "show", "assoc", "format=cluster,account,user,grptres,maxtres,qos")
        + lines("sacctmgr", "-nP", "show", "qos", "format=name,priority,maxwall"),
    }  # fmt: skip


def ledger():
    if not os.path.exists(LEDGER):
        return []
    with sqlite3.connect(f"file:{LEDGER}?mode=ro", uri=True) as data:
        tables = [row[0] for row in data.execute("select name from sqlite_master where type = 'table'")]
        return sorted(f"{table} {row}" for table in tables for row in data.execute("select * from " + table))


if __name__ == "__main__":
    main()
