"""Makes the wheel shoal-slurm of a Slurm that scripts/build-slurm has installed in a chroot.

    slurm_wheel.py CHROOT VERSION DIRECTORY

The tree gets every library that a host may lack, then becomes one archive in the wheel: a wheel keeps neither links nor
the modes of files. auditwheel names the oldest glibc that the programs run with, and so the tag of the wheel.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

NAME = "shoal_slurm"
HOST_LIBRARIES = re.compile(
    r"ld-linux.*|lib(c\.so\.6|m\.so\.6|dl\.so\.2|rt\.so\.1|pthread\.so\.0|util\.so\.1|resolv\.so\.2)"  # glibc
    r"|libpam(_misc)?\.so\.0"  # its modules are those of the host
)
PAM = ("libpam.so.0", "libpam_misc.so.0")
MAX_WHEEL_BYTES = 20_000_000
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    root, version, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    prefix = root / f"opt/shoal/slurm-{version}"
    prune(prefix)
    bundled = bundle_libraries(root, prefix)
    programs = elf_files(prefix)
    run_in(root, "strip", "--strip-unneeded", *(inside(root, path) for path in programs))
    for path in programs:
        set_library_path(path, prefix)
    add_licences(root, prefix, version, bundled)
    with tempfile.TemporaryDirectory() as directory:
        tag = audited_tag(prefix, version, Path(directory))
    content = wheel(version, tag, archive(prefix), texts(prefix))
    if len(content) > MAX_WHEEL_BYTES:
        sys.exit(f"the wheel has {len(content)} bytes; the limit is {MAX_WHEEL_BYTES}")
    path = target / f"{NAME}-{wheel_version(version)}-py3-none-{tag}.whl"
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)
    print(path)


# ---- the tree


def prune(prefix: Path) -> None:
    """Remove what only a compiler reads, except the headers for SPANK plugins."""
    for path in [*prefix.rglob("*.la"), *prefix.rglob("*.a")]:
        path.unlink()
    for name in ("lib/pkgconfig", "lib/slurm/src", "share/doc", "share/pmix/pmix-valgrind.supp"):
        path = prefix / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def elf_files(prefix: Path, *, links: bool = False) -> list[Path]:
    files = (path for path in sorted(prefix.rglob("*")) if path.is_file() and (links or not path.is_symlink()))
    return [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]


def bundle_libraries(root: Path, prefix: Path) -> dict[str, Path]:
    """Copy the libraries that the tree needs into its `lib`; their places in the chroot, by name."""
    record = root / "bundled-libraries"
    for name in record.read_text().split() if record.exists() else ():
        (prefix / "lib" / name).unlink(missing_ok=True)  # of an earlier run
    known = library_places(root)
    bundled: dict[str, Path] = {}
    while missing := sorted(needed_libraries(root, prefix) - {path.name for path in prefix.rglob("*.so*")}):
        for name in missing:
            if name not in known:
                sys.exit(f"the chroot has no library {name}")
            bundled[name] = known[name]
            shutil.copyfile(root / str(known[name]).lstrip("/"), prefix / "lib" / name)
            (prefix / "lib" / name).chmod(0o755)
        record.write_text("\n".join(bundled))
    return bundled


def needed_libraries(root: Path, prefix: Path) -> set[str]:
    """The libraries that files of the tree name, without those that every host has."""
    output = run_in(root, "objdump", "-p", *(inside(root, path) for path in elf_files(prefix)))
    names = {line.split()[1] for line in output.splitlines() if line.startswith("  NEEDED")}
    return {name for name in names if not HOST_LIBRARIES.fullmatch(name)}


def library_places(root: Path) -> dict[str, Path]:
    """Where the chroot has each library, with links resolved inside it."""
    places = {}
    for line in run_in(root, "ldconfig", "-p").splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            places.setdefault(name.split()[0], Path(run_in(root, "readlink", "-f", path).strip()))
    return places


def set_library_path(path: Path, prefix: Path) -> None:
    """Let a file find libraries relative to itself: libslurmfull is beside the plugins, all others are in `lib`."""
    up = os.path.relpath(prefix / "lib", path.parent)
    library_path = f"$ORIGIN/{up}/slurm:$ORIGIN/{up}"
    subprocess.run(["patchelf", "--set-rpath", library_path, path], check=True)


# ---- licences and sources


def add_licences(root: Path, prefix: Path, version: str, bundled: dict[str, Path]) -> None:
    """The licence of everything in the tree, and where its sources are."""
    place = prefix / "share/licenses"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("COPYING", "LICENSE.OpenSSL", "DISCLAIMER"):
        shutil.copy(root / "build/slurm" / name, place / f"slurm-{name}")
    pmix = next((root / "build").glob("pmix-*"))
    shutil.copy(pmix / "LICENSE", place / "pmix-LICENSE")
    sources = set()
    for library in bundled.values():
        owner = run_in(root, "bash", "-c", 'dpkg -S "$1" || dpkg -S "${1#/usr}"', "bash", str(library)).split(":")[0]
        form = "${source:Package} ${source:Version}"
        sources.add(run_in(root, "dpkg-query", "-W", f"-f={form}", owner))
        shutil.copy(root / f"usr/share/doc/{owner}/copyright", place / f"{owner}-copyright")
    lines = [f"  debian: {source}" for source in sorted(sources)]
    (place / "SOURCES").write_text(offer(version, pmix.name, lines))


def offer(version: str, pmix: str, debian: Iterable[str]) -> str:
    """The offer of sources that Slurm's licence, the GPL, asks for."""
    return (
        f"This tree is Slurm {version.partition('-')[0]}, build {version.partition('-')[2]}, with {pmix} and libraries "
        "of Debian 11, all unmodified\nexcept for Debian's patches to PMIx.\n\n"
        "Whoever gives you this tree also gives you, for three years and at no more than the cost of copying, the\n"
        f"complete sources: the archive shoal-slurm-{version}-ARCHITECTURE-sources.tar of the same release of Shoal.\n"
        "`scripts/build-slurm --sources` makes it, from these:\n\n"
        f"  slurm: release archive {version.partition('-')[0]} of the Slurm project\n"
        f"  pmix: {pmix}, as in Debian 12\n" + "".join(f"{line}\n" for line in debian)
    )


def texts(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((prefix / "share/licenses").iterdir())}


# ---- the wheel


def archive(prefix: Path) -> bytes:
    """The tree as a .tar.gz, the form that a bare host can unpack. The same tree gives the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in [prefix, *sorted(prefix.rglob("*"))]:
            tar.add(path, Path(prefix.name) / path.relative_to(prefix), recursive=False, filter=_anonymous)
    return packed.getvalue()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    entry.mode &= 0o755
    return entry


def wheel(version: str, tag: str, tree: bytes, licences: dict[str, bytes]) -> bytes:
    """The wheel: the tree and its digest, for the kind of CPU in the tag."""
    digest, name = hashlib.sha256(tree).hexdigest(), f"slurm-{version}-{architecture(tag)}.tar.gz"
    module = (
        '"""Slurm for the hosts of a Shoal cluster, as one archive. Shoal reads it; it is not a library."""\n\n'
        f'VERSION = "{version}"\nARCHIVE = "{name}"\nSHA256 = "{digest}"\n'
    )
    return zip_wheel(version, tag, {f"{NAME}/__init__.py": module.encode(), f"{NAME}/{name}": tree}, licences)


def zip_wheel(version: str, tag: str, files: dict[str, bytes], licences: dict[str, bytes]) -> bytes:
    info = f"{NAME}-{wheel_version(version)}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: shoal-slurm\nVersion: {wheel_version(version)}\n"
        "Summary: One Slurm for every Linux host of a Shoal cluster\nLicense: GPL-2.0-or-later WITH OpenSSL exception\n"
    )
    entries = dict(files)
    entries |= {f"{info}/licenses/{name}": text for name, text in licences.items()}
    entries[f"{info}/METADATA"] = metadata.encode()
    tags = "".join(f"Tag: py3-none-{part}\n" for part in tag.split("."))
    entries[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: false\n{tags}".encode()
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in entries.items())
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, data, zipfile.ZIP_STORED if name.endswith(".gz") else zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def audited_tag(prefix: Path, version: str, directory: Path) -> str:
    """The platform tag that auditwheel gives a wheel with the unpacked tree; ends if a library is missing in it."""
    tag = f"linux_{os.uname().machine}"
    plain = directory / f"{NAME}-{wheel_version(version)}-py3-none-{tag}.whl"
    programs = elf_files(prefix, links=True)  # programs name a library by its link
    files = {f"{NAME}/{path.relative_to(prefix)}": path.read_bytes() for path in programs}
    plain.write_bytes(zip_wheel(version, tag, files, {}))
    exclude = [word for name in PAM for word in ("--exclude", name)]
    command = ["auditwheel", "repair", "--plat", "auto", *exclude, "--wheel-dir", directory / "audited", plain]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    audited = list((directory / "audited").glob("*.whl"))
    if result.returncode or len(audited) != 1:
        sys.exit(f"auditwheel rejects the tree:\n{result.stdout}{result.stderr}")
    grafted = [name for name in zipfile.ZipFile(audited[0]).namelist() if f"{NAME}.libs/" in name]
    if grafted:
        sys.exit(f"the tree lacks libraries: {', '.join(grafted)}")
    return platform_tag(audited[0].name)


def platform_tag(wheel_name: str) -> str:
    """The tag in the name of an audited wheel. Raises SystemExit for one that only this machine can use."""
    tag = wheel_name.removesuffix(".whl").split("-", 4)[4]
    if "manylinux" not in tag:
        sys.exit(f"the tree fits only this machine: {tag}")
    return tag


def wheel_version(version: str) -> str:
    """`24.11.5-1` as Python's packages spell it."""
    return version.replace("-", ".post")


def architecture(tag: str) -> str:
    """The kind of CPU in a platform tag: `manylinux_2_31_x86_64` is x86_64."""
    return next(arch for arch in ("x86_64", "aarch64") if tag.endswith(arch))


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# ---- the chroot


def run_in(root: Path, *command: str) -> str:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    return subprocess.run(
        ["chroot", root, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def inside(root: Path, path: Path) -> str:
    """The path as the chroot names it."""
    return f"/{path.relative_to(root)}"


if __name__ == "__main__":
    main()
