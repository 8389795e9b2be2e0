"""Every bad file gets every finding, word for word, at its place."""

from pathlib import Path

import pytest
from tests.support.cases import cases, read_cases
from tests.support.errors import error_text

from shoal.errors import SpecError
from shoal.spec.loader import load_all, load_text, load_text_all

EMPTY = "s.yaml:1:1: the file is empty, write a spec into it: `shoal init` makes one"
HEAD = "cluster: reef\ncontroller: {host: ctl}\n"
GOOD = HEAD + "nodesets:\n  lab: {hosts: [gpu01, gpu02]}\n"
"""Four lines that load; cases add to them from line 5 on."""

CASES: dict[str, tuple[str, list[str]]] = {
    **read_cases(Path(__file__).with_name("findings.txt"), GOOD=GOOD, HEAD=HEAD),
    "empty file": ("", [EMPTY]),
    "only comments": ("# nothing\n", [EMPTY]),
    "control character": ("cluster: reef\na: \x07\n", ["s.yaml:2:4: not text, found character U+0007, delete it"]),
    "nested too deeply": ("a: " + "[" * 1000, ["s.yaml:1:19: nested too deeply, a spec has at most 16 levels"]),
    "a name that a terminal would not show": (
        GOOD.replace("lab", "\u200blab") + "partitions: {main: {nodesets: [lab]}}\n",
        [
            's.yaml:4:3 nodesets."\\u200blab": not a nodeset name, found "\\u200blab", '
            "use a lower-case letter, then lower-case letters, digits and `-`",
            's.yaml:5:32 partitions.main.nodesets[0]: unknown nodeset, found "lab", did you mean `\\u200blab`?',
        ],
    ),
}


@cases("name", *CASES)
def test_invalid_file_has_exactly_the_expected_findings(name: str) -> None:
    text, expected = CASES[name]
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    assert str(caught.value).split("\n") == expected
    assert caught.value.exit_code == 2


def test_nodeset_in_no_partition_is_a_warning() -> None:
    text = GOOD.replace("ctl}", "ctl, compute: true}") + "  b: {hosts: [x]}\npartitions: {main: {nodesets: [lab]}}\n"
    spec, findings = load_text_all(text, "s.yaml")
    assert list(spec.nodesets) == ["lab", "b"]
    unused = "in no partition: no job can run there, list it in a partition"
    assert [(finding.level, str(finding)) for finding in findings] == [
        ("warning", f"s.yaml:2:34 controller.compute: {unused}"),
        ("warning", f"s.yaml:5:3 nodesets.b: {unused}"),
    ]


def test_short_grace_of_a_preemptable_partition_is_a_warning() -> None:
    text = GOOD + "partitions:\n  low: {nodesets: [lab], grace: 20}\n  high: {nodesets: [lab]PRIORITY}\n"
    assert load_text_all(text.replace("PRIORITY", ""), "s.yaml")[1] == []
    [finding] = load_text_all(text.replace("PRIORITY", ", priority: 10"), "s.yaml")[1]
    assert (finding.level, str(finding)) == (
        "warning",
        "s.yaml:6:33 partitions.low.grace: a preempted job has less time to save than it counts on, found 20 s, "
        "give at least 60",
    )


def test_alias_bomb_or_large_file_is_rejected_before_it_is_read() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    bomb = error_text(SpecError, load_text, "\n".join(lines), "s.yaml")
    assert "s.yaml:2:10 a1[0]: aliases are not supported, found `*a0`, write the value out" in bomb
    large = error_text(SpecError, load_text, "#" * (1024 * 1024 + 1), "s.yaml")
    assert large == "s.yaml:1:1: the file is too large, a spec has at most 1 MiB"


FILES: dict[str, tuple[bytes, str]] = {
    "latin-1": (b"cluster: reef\n# caf\xe9\n", "{}:2:6: not UTF-8 text, found byte 0xe9, save it as UTF-8"),
    "utf-16": ("cluster: reef\n".encode("utf-16"), "{}:1:1: not UTF-8 text, found byte 0xff, save it as UTF-8"),
    "nul": (b"\x00", "{}:1:1: not text, found character U+0000, delete it"),
}


@cases("name", *FILES)
def test_file_that_is_not_text_is_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(FILES[name][0])
    assert error_text(SpecError, load_all, path) == FILES[name][1].format(path)
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_all(path)[0].cluster == "reef", "a byte order mark is no error"


def test_missing_file_or_directory_is_a_finding(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert error_text(SpecError, load_all, missing) == f"{missing}: no such file, `shoal init` writes one"
    assert error_text(SpecError, load_all, tmp_path) == f"{tmp_path}: this is a directory, name the file in it"
    unreadable = error_text(SpecError, load_all, Path("a\0b"))
    assert unreadable.endswith(": cannot read the file, found embedded null byte")


def test_warning_beside_errors_is_labelled() -> None:
    text = "cluster: reef\ncontroller: {host: c1, compute: true}\nnodesets: {lab: {hosts: [n1]}}\n"
    text += "partitions: {main: {nodesets: [lab], grace: no}}\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, "s.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("s.yaml:2:") and ": warning: in no partition" in lines[0], lines
    assert "warning" not in lines[1] and "grace" in lines[1]
    levels = [getattr(finding, "level", "") for finding in caught.value.findings]
    assert levels == ["warning", "error"]
