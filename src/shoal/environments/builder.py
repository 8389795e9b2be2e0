"""Makes one environment on a host: one program of the standard library, for Python 3.8 and later.

It reads one JSON object from standard input and writes one a line: progress, and `done` or `failed` at the end.

    DIRECTORY/wheels/SOURCE/*.whl    every package of a source, gathered once
    DIRECTORY/ID                     an environment, named by what is in it; LOCAL/ID where nodes have copies
    DIRECTORY/archives/ID.tar        the same as one file, for those copies

An environment counts from the moment its mark is there: what a killed run left without one is made again. It works
wherever it is copied to, which is seen to by the program `relocatable.py`, sent along.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARK = "shoal-environment.json"
MADE_LIKE_THIS = "relocatable"
"""Part of an environment's name: one of the same packages that was made in another way is another one."""
ASK = (
    "import json, sys, sysconfig; "
    "print(json.dumps(['%d.%d' % sys.version_info[:2], sys.implementation.cache_tag, sysconfig.get_platform()]))"
)
ASK_WHETHER = (
    "import platform, sys; from pip._vendor.packaging.specifiers import SpecifierSet; "
    "print(SpecifierSet(sys.argv[1]).contains(platform.python_version(), prereleases=True))"
)


class Failed(Exception):
    """What went wrong, and what to do about it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def main() -> int:
    asked = json.loads(sys.stdin.readline())
    try:
        tell("done", **build(asked))
    except Failed as failure:
        tell("failed", what=failure.what, fix=failure.fix)
    except OSError as error:
        what = "%s: %s" % (error.filename or asked["directory"], error.strerror)
        tell("failed", what=what, fix="is the disk full, the share not mounted, or its root not this one?")
    return 0


def build(asked: dict[str, Any]) -> dict[str, Any]:
    """Make what is missing, and say what there is now."""
    directory = asked["directory"]
    refuse_planted(directory)
    for place in (directory, directory + "/wheels", directory + "/archives", directory + "/names", asked["local"]):
        os.makedirs(place, 0o755, exist_ok=True)
    with open(directory + "/.lock", "w") as lock:
        if not took(lock):
            tell("progress", text="waiting for another one that builds here")
            fcntl.flock(lock, fcntl.LOCK_EX)
        version, tag, platform = python_facts(asked["python"])
        source = digest(asked["requirements"], asked["constraints"], str(asked["locked"]), tag, platform)
        tools = pip_tools(asked, tag)
        refuse_python(asked["for_python"], version, tools)
        wheels = gather(asked, source, tools)
        resolved = sorted(
            "%s sha256:%s" % (name, file_digest(os.path.join(wheels, name))) for name in wheel_names(wheels)
        )
        number = digest("\n".join(resolved), tag, platform, MADE_LIKE_THIS)
        place = os.path.join(asked["local"] if asked["place"] == "local" else directory, number)
        made = not os.path.exists(os.path.join(place, MARK))
        if made:
            install(
                asked, place, tools, wheels, {"id": number, "python": version, "platform": platform, "source": source}
            )
        if asked["place"] == "local":
            pack(place, "%s/archives/%s.tar" % (directory, number))
    with open(os.path.join(place, MARK)) as file:
        found: dict[str, Any] = json.load(file)
    return dict(found, path=place, source=source, made=made)


def refuse_planted(directory: str) -> None:
    """Where everybody may write, what somebody else put in the way is not built in: jobs would run what is there."""
    try:
        above, found = os.stat(os.path.dirname(directory)), os.lstat(directory)
    except OSError:
        return
    foreign = found.st_uid not in (0, os.geteuid())
    if above.st_mode & 0o002 and foreign:
        raise Failed(
            "%s is user %d's, and so would be all that jobs run from it" % (directory, found.st_uid),
            "move it away, or name another `directory`",
        )


def took(lock: Any) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def python_facts(python: str) -> list[str]:
    try:
        done = subprocess.run([python, "-I", "-c", ASK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    except OSError:
        raise Failed("there is no %s here" % python, "install it, or name another with `python`") from None
    if done.returncode != 0:
        raise Failed("%s does not run: %s" % (python, last_lines(done.stderr)), "name another with `python`")
    found: list[str] = json.loads(done.stdout)
    return found


def pip_tools(asked: dict[str, Any], tag: str) -> str:
    """A Python with pip, which no environment needs to have itself."""
    place = "%s/.tools-%s" % (asked["local"], tag)
    if not os.path.exists(place + "/" + MARK):
        tell("progress", text="pip")
        fresh_venv(asked["python"], place, [])
        write(place + "/" + MARK, "{}\n")
    return place + "/bin/python"


def refuse_python(wanted: str, version: str, tools: str) -> None:
    """A project and a lock may say which Pythons they are for, in the words of packages (`>=3.12`)."""
    line = [tools, "-I", "-c", ASK_WHETHER, wanted]
    if wanted and subprocess.run(line, stdout=subprocess.PIPE, check=False).stdout.strip() != b"True":
        raise Failed("it is for Python %s, and this is %s" % (wanted, version), "name another with `python`")


def fresh_venv(python: str, place: str, options: list[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    done = subprocess.run(
        [python, "-I", "-m", "venv", *options, place], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        if b"ensurepip" in done.stdout:
            raise Failed("%s has no venv" % python, "run `shoal up`, which installs python3-venv")
        raise Failed("%s -m venv failed: %s" % (python, last_lines(done.stdout)), "see what is wrong with its Python")


def gather(asked: dict[str, Any], source: str, tools: str) -> str:
    """The wheels of everything that the source names and needs, as pip resolves it, once."""
    place = "%s/wheels/%s" % (asked["directory"], source)
    if os.path.isdir(place):
        return place
    fresh = place + ".new"
    shutil.rmtree(fresh, ignore_errors=True)
    os.makedirs(fresh)
    write(fresh + "/requirements.txt", asked["requirements"])
    line = [tools, "-I", "-m", "pip", "wheel", "--wheel-dir", fresh, "-r", fresh + "/requirements.txt"]
    if asked["constraints"]:
        write(fresh + "/constraints.txt", asked["constraints"])
        line += ["-c", fresh + "/constraints.txt"]
    pip(asked, line + (["--no-deps"] if asked["locked"] else []), "gather the packages")
    if not wheel_names(fresh):
        raise Failed("nothing is in it", "name a package")
    os.rename(fresh, place)
    return place


def install(asked: dict[str, Any], place: str, tools: str, wheels: str, about: dict[str, Any]) -> None:
    tell("progress", text="install")
    fresh_venv(asked["python"], place, ["--without-pip"])
    inside = [tools, "-I", "-m", "pip", "--python", place + "/bin/python"]
    files = [os.path.join(wheels, name) for name in wheel_names(wheels)]
    pip(asked, [*inside, "install", "--no-index", "--no-deps", "--no-compile", *files], "install the packages")
    done = subprocess.run([*inside, "check"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise Failed("the packages do not fit together: %s" % last_lines(done.stdout), "correct the list of them")
    bound = relocate(asked["relocatable"], place)
    tell("progress", text="compile")
    # Otherwise the first job does it, on every node at once, if it may write there at all.
    line = [place + "/bin/python", "-I", "-m", "compileall", "-qq", "-j0", place + "/lib"]
    subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["chmod", "-R", "a+rX,go-w", place], check=True)
    torch, cuda = torch_facts(place)
    packages = sorted("==".join(name.split("-")[:2]).replace("_", "-") for name in wheel_names(wheels))
    about = dict(about, packages=packages, torch=torch, cuda=cuda, bound=bound, made_at=int(time.time()))
    about["place"] = asked["place"]
    write(place + "/" + MARK, json.dumps(about) + "\n")


def relocate(program: str, place: str) -> list[list[str]]:
    """Let it work in other places, too. Files that cannot, each with what it is bound to."""
    line = [place + "/bin/python", "-I", "-c", program, place]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise Failed("cannot make it relocatable: %s" % last_lines(done.stderr), "see what is wrong with its Python")
    return [json.loads(text) for text in done.stdout.splitlines()]


def torch_facts(place: str) -> list[str | None]:
    """The version of torch and of the CUDA it is for, read without importing it: that needs its libraries."""
    for folder, _, names in os.walk(place + "/lib"):
        if folder.endswith("/torch") and "version.py" in names:
            with open(folder + "/version.py") as file:
                text = file.read()
            found = []
            for name in ("__version__", "cuda"):
                match = re.search(r"^%s\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]" % name, text, re.MULTILINE)
                found.append(match.group(1) if match else None)
            return found
    return [None, None]


def pack(place: str, archive: str) -> None:
    """The environment as one file: one is quickly read over a link that takes long for many."""
    if os.path.exists(archive):
        return
    tell("progress", text="pack")
    fresh = archive + ".new"
    folder, name = os.path.split(place)
    done = subprocess.run(
        ["tar", "-c", "--owner=0", "--group=0", "-f", fresh, "-C", folder, name], stderr=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        raise Failed("cannot pack it: %s" % last_lines(done.stderr), "is the disk full?")
    os.rename(fresh, archive)


def pip(asked: dict[str, Any], line: list[str], what: str) -> None:
    """Run pip, and tell which package it is at."""
    room = asked["local"] + "/.pip"  # packages have gigabytes, and /tmp is often a part of the memory
    shutil.rmtree(room, ignore_errors=True)
    os.makedirs(room, mode=0o700)
    own = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", TMPDIR=room, **asked["proxy"])
    child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=own)
    said: list[str] = []
    assert child.stdout
    for raw in child.stdout:
        text = raw.decode("utf-8", "replace").rstrip()
        said = [*said, text][-40:]
        match = re.match(r"\s*(Collecting|Downloading|Building|Installing collected|WARNING: Retrying)\s?(\S*)", text)
        if match:
            tell("progress", text=" ".join(match.groups()).strip()[:60])
    child.stdout.close()
    status = child.wait()
    shutil.rmtree(room, ignore_errors=True)
    if status != 0:
        raise Failed("pip could not %s: %s" % (what, hidden(reason(said))), remedy("\n".join(said), asked["proxy"]))


def reason(said: list[str]) -> str:
    """What pip says of it: its errors and what follows them, and before them the last word of what builds a package."""
    first = next((number for number, line in enumerate(said) if line.lstrip().startswith("ERROR")), -5)
    text = re.sub(r" \(from line \d+ of [^)]*\)", "", "\n".join(said[first:]).strip())
    silent = re.findall(r"WARNING: Retrying .*['\"]([^'\"]+)['\"]\)", "\n".join(said))
    if silent and "from versions: none" in text:
        return "no package index answers: %s" % re.sub(r".*: |\[Errno \S+\] ", "", silent[-1])
    inner = [line.strip() for line in said if re.match(r"\s+(\w*Error|error): (?!subprocess-exited)", line)]
    return "\n".join([*inner[-1:], text])


def remedy(said: str, proxy: dict[str, str]) -> str:
    if "Connection" in said or "Name or service not known" in said or "Max retries" in said or "Retrying" in said:
        if proxy:
            return "does the proxy %s answer on this host?" % proxy["https_proxy"]
        return "this host needs a way to a package index: see `proxy`"
    if "hashes" in said.lower():
        return "make a new lock"
    if "No space left" in said:
        return "free some space"
    if "subprocess-exited-with-error" in said:
        return "choose a version that there is a wheel of, or install on this host what it is built with"
    return "correct the list of packages"


def hidden(text: str) -> str:
    """What pip says, without the user and password that an address in its own configuration may have."""
    return re.sub(r"://[^/\s@]*@", "://...@", text)


def wheel_names(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".whl"))


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def file_digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def write(path: str, text: str) -> None:
    """Whole or not at all."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def last_lines(said: bytes) -> str:
    return hidden("\n".join(said.decode("utf-8", "replace").strip().splitlines()[-5:]))


def tell(event: str, **rest: Any) -> None:
    print(json.dumps(dict(rest, event=event)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
