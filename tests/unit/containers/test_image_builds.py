"""What `shoal image build` sends to a node, and what the node keeps of an image that is damaged."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.containers.test_image_store import ask

from shoal.containers.build import base_names, build_command, requirements_containerfile
from shoal.containers.images import StoredImage
from shoal.errors import UsageError
from shoal.jobs.bundle import archive
from shoal.remote.runner import image_build
from shoal.remote.runner.build_place import remove_place
from shoal.remote.runner.image_build import local_name, read_context
from shoal.slurm.state import NodeState
from shoal.verbs.image_build import build_place, read_source


def names_of(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return sorted(member.name for member in tar)


def test_containerfile_is_sent_with_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("Containerfile", "src/a.c", ".git/config"):
        (tmp_path / name).write_text("FROM mini\n")
    (tmp_path / "link").symlink_to("src")
    for source in (tmp_path, tmp_path / "Containerfile"):
        request = read_source(str(source), None)
        assert request is not None and names_of(request.pack(archive)) == ["Containerfile", "link", "src/a.c"]


def test_list_of_packages_becomes_a_containerfile_that_installs_them(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy  # fast\n-c limits.txt\n")
    (tmp_path / "limits.txt").write_text("numpy<3\n")
    request = read_source(str(tmp_path / "requirements.txt"), "mini")
    assert request is not None and request.text == requirements_containerfile("mini", is_locked=False)
    assert request.texts == {"requirements.txt": "numpy\n", "constraints.txt": "numpy<3\n"}
    assert names_of(request.pack(archive)) == ["Containerfile", "constraints.txt", "requirements.txt"]


@cases(
    "source, base, words",
    ("requirements.txt", None, "an image needs a base"),
    ("train.py", None, "neither a Containerfile nor a list of packages"),
    ("empty", None, "empty has no Containerfile"),
    ("nowhere", None, "there is no nowhere"),
    ("/srv/root", "mini", "--from is for a Containerfile"),
)
def test_source_that_cannot_be_built_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, base: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("requirements.txt", "train.py"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=words):
        read_source(source, base)


def test_root_file_system_is_built_where_the_user_logs_in() -> None:
    assert read_source("/srv/nowhere/root", None) is None


@cases(
    "text, names",
    ("ARG BASE=mini\nFROM $BASE AS one\nFROM --platform=linux/arm64 r.org/x:12\nFROM One\n", ["mini", "r.org/x:12"]),
    ("FROM $X\n", []),
    ('ARG BASE="debian:12"\nFROM $BASE\n', ["debian:12"]),
    ("ARG BASE='debian:12'\nFROM \"${BASE}\"\n", ["debian:12"]),
    ("FROM ${BASE:-mini}\n", ["mini"]),
    ("ARG BASE=maxi\nFROM ${BASE:-mini}${SUFFIX:+-x}\n", ["maxi"]),
    ("ARG A=lab/x B=2\nARG C=$A:$B\nFROM \\\n  ${C} AS two\n", ["lab/x:2"]),
    ("ARG BASE=mini\nFROM $BASE AS one\nARG BASE=maxi\nFROM $BASE\n", ["mini"]),
    ("FROM mini\nRUN echo 'it is \\\n FROM \"\n", ["mini"]),
    ("FROM mini\n# FROM maxi\nFROM 'open\n", ["mini"]),
)
def test_bases_of_a_containerfile_are_found(text: str, names: list[str]) -> None:
    assert base_names(text) == names


def test_base_of_the_command_line_replaces_the_first_of_a_containerfile() -> None:
    assert base_names("FROM debian\nFROM mini AS two\nFROM debian\n", "maxi") == ["maxi", "mini", "debian"]


def test_node_is_told_where_the_bases_are() -> None:
    base = StoredImage("mini", layout="/shared/x", source="docker://r/mini@sha256:1", bytes=7)
    words = build_command("new", "Containerfile", "mini", {"mini": base}, {"http_proxy": "http://p"}, "/a/auth.json")
    settings = json.loads(words[-2])
    assert settings["bases"] == {"mini": {"name": "mini", "layout": "/shared/x", "source": "docker://r/mini@sha256:1"}}
    assert (settings["from"], settings["proxy"], settings["auth"]) == (
        "mini",
        {"http_proxy": "http://p"},
        "/a/auth.json",
    )


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no filters")
def test_links_of_a_context_may_lead_anywhere_with_the_filter_of_python_3_14(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("/etc/hosts")
    data = archive({"Containerfile": Path(__file__), "link": tmp_path / "link"})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(tarfile.data_filter))
    read_context(str(tmp_path / "context"))
    assert sorted(path.name for path in (tmp_path / "context").iterdir()) == ["Containerfile", "link"]
    assert (tmp_path / "context/link").readlink() == Path("/etc/hosts")


def test_build_rents_a_node_only_where_no_permanent_one_can_build() -> None:
    rented = NodeState(
        "burst1", ("IDLE", "CLOUD", "POWERED_DOWN"), features=("images", "images-amd64"), partitions=("b",)
    )
    lab = NodeState("n1", ("IDLE",), features=("images", "images-arm64"), partitions=("main",))
    down, amd64 = replace(lab, state=("DOWN",)), StoredImage("x", architecture="amd64")
    assert build_place([lab, rented], (), named=False) == (
        "--constraint=images",
        "--partition=main",
        "--exclude=burst1",
    )
    assert build_place([down, rented], (), named=False) == ("--constraint=images", "--partition=b,main")
    assert build_place([lab, rented], [amd64], named=False) == ("--constraint=images-amd64", "--partition=b")
    assert build_place([rented], (), named=True) == ("--nodelist=burst1", "--partition=b")
    assert build_place([lab], [amd64], named=False) == ("--constraint=images", "--partition=main")


@cases(
    "name, local",
    ("mini", "localhost/mini"),
    ("debian:12", "localhost/debian:12"),
    ("lab/mini:2", "localhost/lab/mini:2"),
    ("docker.io/library/debian:12", "docker.io/library/debian:12"),
    ("controller:5000/ann/mini", "controller:5000/ann/mini"),
)
def test_base_has_the_name_that_buildah_looks_for_first(name: str, local: str) -> None:
    assert local_name(name) == local


@pytest.mark.skipif(os.getuid() != 0, reason="mounts: run it as root")
def test_mounts_that_a_build_of_root_left_are_no_hindrance(tmp_path: Path) -> None:
    place = tmp_path / "build.7"
    merged = place / "storage/overlay/merged"
    merged.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", merged], check=True)
    remove_place(str(place))
    assert not place.exists() and str(place) not in Path("/proc/self/mounts").read_text()


def test_image_whose_content_is_not_that_of_its_digest_is_not_kept(tmp_path: Path) -> None:
    name = f"blobs/sha256/{hashlib.sha256(b'right').hexdigest()}"
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 5
        tar.addfile(info, io.BytesIO(b"wrong"))
    program = ("sh", "-c", f"echo step 1 >&2; cat {tmp_path}/x.tar")
    (tmp_path / "names").mkdir()
    text = ask("receive", str(tmp_path), "x", "0", *program, status=3)
    assert "has other content than its digest says" in text and ask("list", str(tmp_path)) == "[]\n"


def test_base_is_read_from_a_path_that_buildah_takes_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, place, programs = tmp_path / ".shoal/Ann/layout", tmp_path / "place", tmp_path / "bin"
    for directory in (layout, place, programs):
        directory.mkdir(parents=True)
    (layout / "mark").write_text("of the layout")
    (programs / "buildah").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$last" >> asked\n'
        'case $last in oci:*) path=${last#oci:}; cat "${path%%:*}/mark";; esac\n'
    )
    (programs / "buildah").chmod(0o755)
    monkeypatch.setattr(image_build, "environment", lambda _: {"PATH": f"{programs}:/usr/bin:/bin"})
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    settings = {"proxy": {}, "auth": ""}
    image_build.load_base(str(place), settings, "train", {"layout": str(layout)}, 0)
    assert (place / "asked").read_text().splitlines() == ["oci:base.0:image", "localhost/train"]
