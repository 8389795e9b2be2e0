"""Builds one environment on a host with uv: one program of the standard library, for Python 3.8 and later.

uv installs torch with CUDA in 120 s, where pip took 319 s. Its relocatable environments (0.13.7) still need a repair: a
program with an import from `__future__` ends with a SyntaxError, and dash cannot read `activate`.

It reads one JSON object from standard input and writes one per line: progress, and `done` or `failed` at the end.

    DIRECTORY/wheels/SOURCE          uv's cache of a source's packages, and resolved.txt: what uv chose, once
    DIRECTORY/ID                     an environment, named by its content; LOCAL/ID where nodes have copies
    DIRECTORY/archives/ID.tar        the same as one file, for those copies

An environment counts from the moment its mark is there: the next run builds again what a killed run left without one.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

MARK = "shoal-environment.json"
UV = "uv>=0.8"
METHOD = "uv"
"""Part of an environment's id: the same packages installed by another method are another environment."""
QUERY_PYTHON = """
import json, os, platform, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
program = getattr(sys, "_base_executable", sys.executable)
named = os.path.join(os.path.dirname(program), "python" + version)
if os.path.exists(named) and os.path.samefile(named, program):
    program = named  # python3 may be another version on another host
facts = [version, platform.python_version(), program, sys.implementation.cache_tag, sysconfig.get_platform()]
print(json.dumps(facts))
"""
QUERY_SPECIFIER = (
    "import sys; from pip._vendor.packaging.specifiers import SpecifierSet; "
    "print(SpecifierSet(sys.argv[1]).contains(sys.argv[2], prereleases=True))"
)
INDEX_OPTION = re.compile(r"(-i|-f|--(index-url|extra-index-url|find-links|no-index|trusted-host|pre))\b")
PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
"""uv does not read pip's configuration. These of its settings reach uv by variables of the environment."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SYSTEM_CERTIFICATES = ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS")
"""Make uv trust whom the host trusts, as Debian's pip does; the second is the name in older releases."""
GIT = re.compile(r"(?:^|[\s@])git\+\w+://", re.MULTILINE)
"""A requirement that git fetches."""


class BuildError(Exception):
    """What went wrong, and what to do about it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix


def main() -> int:
    request = json.loads(sys.stdin.readline())
    try:
        emit("done", **build(request))
    except BuildError as error:
        emit("failed", what=error.what, fix=error.fix)
    except OSError as error:
        what = "%s: %s" % (error.filename or request["directory"], error.strerror)
        emit("failed", what=what, fix="check for a full disk, a share that is not mounted, or a share owned by others")
    return 0


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Build what is missing, and return the environment's description."""
    directory, local = request["directory"], request["local"]
    check_owner(directory)
    for path in (directory, directory + "/wheels", directory + "/archives", directory + "/names", local):
        os.makedirs(path, 0o755, exist_ok=True)
    with open(directory + "/.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            emit("progress", text="waiting for another build in %s" % directory)
            fcntl.flock(lock, fcntl.LOCK_EX)
        version, full_version, python, tag, platform = query_python(request["python"])
        check_git(request)
        source = digest(request["requirements"], request["constraints"], str(request["locked"]), tag, platform)
        cache = "%s/wheels/%s" % (directory, source)
        uv = Uv(request, cache)
        uv.check_python(request["for_python"], full_version)
        files = json.dumps(request["files"], sort_keys=True)
        id = digest(resolve(request, uv, cache, python), tag, platform, METHOD, files)
        path = os.path.join(local if request["place"] == "local" else directory, id)
        missing = not os.path.exists(os.path.join(path, MARK))
        if missing:
            about = {"id": id, "python": version, "platform": platform, "source": source, "place": request["place"]}
            about["shoal"] = request["shoal"]
            install(request, uv, cache, python, path, about)
        if request["place"] == "local":
            pack(path, "%s/archives/%s.tar" % (directory, id))
    with open(os.path.join(path, MARK)) as file:
        description: dict[str, Any] = json.load(file)
    return dict(description, path=path, source=source, made=missing)


def check_owner(directory: str) -> None:
    """Refuse a directory that another user put where everybody may write: jobs would run what is in it."""
    if not os.path.lexists(directory):
        return
    parent, status = os.stat(os.path.dirname(directory)), os.lstat(directory)
    if parent.st_mode & 0o002 and status.st_uid not in (0, os.geteuid()):
        what = "%s belongs to user %d, who could change what jobs run from it" % (directory, status.st_uid)
        raise BuildError(what, "move it away, or set another `directory`")


def check_git(request: dict[str, Any]) -> None:
    """Name what is missing before uv fails at it."""
    needed = GIT.search(request["requirements"]) or GIT.search(request["constraints"])
    if needed and shutil.which("git") is None:
        raise BuildError("a requirement comes from a git repository, and this host has no git", request["git_fix"])


def query_python(python: str) -> list[str]:
    """Its version, full version, path, cache tag and platform."""
    try:
        result = subprocess.run([python, "-I", "-c", QUERY_PYTHON], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError:
        raise BuildError("there is no %s on this host" % python, "install it, or set another `python`") from None
    if result.returncode != 0:
        raise BuildError("%s does not run: %s" % (python, last_lines(result.stderr)), "set another `python`")
    facts: list[str] = json.loads(result.stdout)
    return facts


class Uv:
    """uv in a venv of its own, with pip's settings of this host."""

    def __init__(self, request: dict[str, Any], cache: str) -> None:
        self.proxy: dict[str, str] = request["proxy"]
        self.tools = "%s/.uv-%s" % (request["local"], sys.implementation.cache_tag)
        self.temporary = request["local"] + "/.tmp"  # packages have gigabytes, and /tmp is often in memory
        self.variables: dict[str, str] = {}
        self.options = [line for line in request["requirements"].splitlines() if INDEX_OPTION.match(line)]
        if not os.path.exists(self.tools + "/" + MARK):
            self._install()
        settings = self._pip_settings()
        self.no_index = settings.pop("no-index", "").lower() in ("1", "true", "yes", "on")
        if any(re.match(r"(-i|--index-url)\b", line) for line in self.options):
            settings.pop("index-url", None)  # the requirements file overrides pip's settings
        self.variables = {
            "NO_COLOR": "1",
            "UV_NO_PROGRESS": "1",
            "UV_CACHE_DIR": cache,
            "UV_LINK_MODE": "hardlink",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_COMPILE_BYTECODE_TIMEOUT": "0",
            "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's: the best version of all indexes
            **(dict.fromkeys(SYSTEM_CERTIFICATES, "1") if os.path.exists(CERTIFICATES) else {}),
            **{PIP_SETTINGS[name]: value for name, value in settings.items() if name in PIP_SETTINGS},
        }

    def _install(self) -> None:
        """pip installs uv: from where the requirements file says, else as pip is configured on this host."""
        emit("progress", text="uv")
        make_venv(sys.executable, self.tools)
        line = [self.tools + "/bin/python", "-I", "-m", "pip", "install", "--no-input", "-r", self.tools + "/uv.txt"]
        for options in [self.options, []] if self.options else [[]]:
            write(self.tools + "/uv.txt", "\n".join([*options, UV]) + "\n")
            status, output = self._execute(line)
            if status == 0:
                write(self.tools + "/" + MARK, "{}\n")
                return
        errors = [line for line in output if line.startswith("ERROR")] or output[-3:]
        fix = "let this host reach a package index (see `proxy`), or put a wheel of uv where `--find-links` points"
        raise BuildError("pip cannot install uv: %s" % redact("\n".join(errors)), fix)

    def _pip_settings(self) -> dict[str, str]:
        """pip's settings on this host by name: files first, then its variables of the environment."""
        result = subprocess.run([self.tools + "/bin/python", "-m", "pip", "config", "list"], stdout=subprocess.PIPE)
        settings: dict[str, str] = {}
        lines = re.findall(r"^(global|install|:env:)\.([\w-]+)=(.*)$", result.stdout.decode(), re.MULTILINE)
        for _, name, value in sorted(lines, key=lambda line: ("global", "install", ":env:").index(line[0])):
            values = str(ast.literal_eval(value)).split()
            settings[name] = ("," if name == "find-links" else " ").join(values)
        return settings

    def check_python(self, specifier: str, version: str) -> None:
        """A project and a lock may name the Pythons they support, such as `>=3.12`."""
        line = [self.tools + "/bin/python", "-I", "-c", QUERY_SPECIFIER, specifier, version]
        if specifier and subprocess.run(line, stdout=subprocess.PIPE).stdout.strip() != b"True":
            raise BuildError("it requires Python %s, and this is %s" % (specifier, version), "set another `python`")

    def run(self, *words: str, action: str) -> None:
        """Run uv, and report which package it is working on."""
        status, output = self._execute([self.tools + "/bin/uv", *words])
        if status != 0:
            text = "\n".join(output)
            raise BuildError("uv cannot %s: %s" % (action, redact(reason(text))), remedy(text, self.proxy))

    def read(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run uv for its output."""
        line = [self.tools + "/bin/uv", *words]
        return subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environment())

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": self.temporary, **self.variables, **self.proxy}

    def _execute(self, line: list[str]) -> tuple[int, list[str]]:
        """The status and the last lines."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        os.makedirs(self.temporary, mode=0o700)
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._environment()
        )
        output: list[str] = []
        assert child.stdout
        for raw in child.stdout:
            text = raw.decode("utf-8", "replace").rstrip()
            output = [*output, text][-40:]
            if re.match(r"\s*(Resolved|Downloading|Building|Prepared|Installed)\b", text):
                emit("progress", text=text.strip()[:60])
        child.stdout.close()
        status = child.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
        return status, output


def make_venv(python: str, path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    result = subprocess.run([python, "-I", "-m", "venv", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        if b"ensurepip" in result.stdout:
            raise BuildError("%s has no venv" % python, "let the operator run `shoal up`, which installs python3-venv")
        raise BuildError("%s -m venv failed: %s" % (python, last_lines(result.stdout)), "repair this host's Python")


def resolve(request: dict[str, Any], uv: Uv, cache: str, python: str) -> str:
    """Every package that the source names and needs, with version and hashes, as uv resolved it once."""
    result = cache + "/resolved.txt"
    if not os.path.exists(result):
        os.makedirs(cache, 0o700, exist_ok=True)  # an index may have a password in its address
        write(cache + "/requirements.txt", ("--no-index\n" if uv.no_index else "") + request["requirements"])
        write(cache + "/constraints.txt", request["constraints"])
        form = ["--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--output-file", result + ".new"]
        form += ["--no-deps"] if request["locked"] else []
        files = [cache + "/requirements.txt", "--constraints", cache + "/constraints.txt"]
        uv.run("pip", "compile", *form, "--python", python, *files, action="resolve the packages")
        os.rename(result + ".new", result)
    with open(result) as file:
        text = file.read()
    if not text.strip():
        raise BuildError("the source names no package", "name a package")
    return text


def install(request: dict[str, Any], uv: Uv, cache: str, python: str, path: str, about: dict[str, Any]) -> None:
    emit("progress", text="install")
    uv.run("venv", "--quiet", "--relocatable", "--clear", "--python", python, path, action="make a virtual environment")
    inside = ["--python", path + "/bin/python"]
    # The requirements again, for the hashes that they give; the constraints keep what was resolved.
    line = ["pip", "install", *inside, "--compile-bytecode", "--requirements", cache + "/requirements.txt"]
    line += ["--constraints", cache + "/resolved.txt", *(["--no-deps"] if request["locked"] else [])]
    complete = cache + "/complete"
    uv.run(*line, *(["--offline"] if os.path.exists(complete) else []), action="install the packages")
    write(complete, "")
    check = uv.read("pip", "check", *inside)
    if check.returncode != 0:
        problems = [line for line in check.stderr.decode().splitlines() if line.startswith("The package")]
        raise BuildError("packages are incompatible: %s" % "\n".join(problems), "correct the list of packages")
    packages = json.loads(uv.read("pip", "list", *inside, "--format", "json").stdout)
    about = dict(about, packages=["%s==%s" % (package["name"], package["version"]) for package in packages])
    about.update(finish(path, request["finish"], request["files"]), made_at=int(time.time()))
    subprocess.run(["chmod", "-R", "a+rX,go-w", path], check=True)
    write(path + "/" + MARK, json.dumps(about) + "\n")


def finish(path: str, program: str, files: dict[str, str]) -> dict[str, Any]:
    """Run the program that completes an environment, with the files that Shoal adds to it."""
    line = [path + "/bin/python", "-I", "-c", program, path]
    result = subprocess.run(line, input=json.dumps(files).encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if result.returncode != 0:
        raise BuildError("cannot complete it: %s" % last_lines(result.stderr), "free some space")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def pack(path: str, archive: str) -> None:
    """The environment as one file: over a slow link one large file is faster than many small ones."""
    if os.path.exists(archive):
        return
    emit("progress", text="pack")
    directory, name = os.path.split(path)
    line = ["tar", "-c", "--owner=0", "--group=0", "-f", archive + ".new", "-C", directory, name]
    result = subprocess.run(line, stderr=subprocess.PIPE)
    if result.returncode != 0:
        raise BuildError("cannot pack it: %s" % last_lines(result.stderr), "free some space")
    os.rename(archive + ".new", archive)


def reason(output: str) -> str:
    """uv's error without what came before it. Of a failed request only the first and the last cause say something."""
    error = output[max(output.rfind("\nerror: ") + 1, 0) :]
    if "Failed to fetch" in error:
        return "no answer from the package index: %s" % error.rpartition("cause: ")[2]
    return re.sub(r"^error: |(?<=\n)\s*cause: ", "", error)


def remedy(output: str, proxy: dict[str, str]) -> str:
    if "Failed to fetch" in output:
        if proxy:
            return "check that the proxy %s answers on this host" % proxy["https_proxy"]
        return "let this host reach a package index: see `proxy`"
    if "Hash mismatch" in output or "no overlapping hashes" in output:
        return "make a new lock"
    if "No space left" in output:
        return "free some space"
    if "Git operation failed" in output:
        return "check that this host reaches the repository, and may read it"
    if "Failed to build" in output:
        return "choose a version that has a wheel, or install the build tools on this host"
    return "correct the list of packages"


def redact(text: str) -> str:
    """Text without the user and password that an address in pip's configuration may have."""
    return re.sub(r"://[^/\s@]*@", "://...@", text)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def write(path: str, text: str) -> None:
    """Write the whole file, or nothing."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def last_lines(output: bytes) -> str:
    return redact("\n".join(output.decode("utf-8", "replace").strip().splitlines()[-5:]))


def emit(event: str, **values: Any) -> None:
    print(json.dumps(dict(values, event=event)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
