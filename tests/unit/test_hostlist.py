"""Hostlists have Slurm's meaning: checked by examples, by properties, and against a real scontrol."""

import contextlib
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases

from shoal.hostlist import MAX_NAMES, compress, expand, fold

EXPANSIONS = {
    "": [],
    ",": [],
    "a": ["a"],
    "a,,b,": ["a", "b"],
    "a b\tc\nd": ["a", "b", "c", "d"],
    "gpu[01-03,07]": ["gpu01", "gpu02", "gpu03", "gpu07"],
    "a[98-101]": ["a98", "a99", "a100", "a101"],
    "a[08-10]": ["a08", "a09", "a10"],
    "a[01-3]": ["a01", "a02", "a03"],
    "a[1-2]b[01-02]": ["a1b01", "a1b02", "a2b01", "a2b02"],
    "a[1-2]b[1-2]c[1-2]": ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"],
    "rack[1-2]-node[3-4]": ["rack1-node3", "rack1-node4", "rack2-node3", "rack2-node4"],
    "a[1-2][3-4]": ["a13", "a14", "a23", "a24"],
    "[1-2]": ["1", "2"],
    "a[1,1]": ["a1", "a1"],
    "a[1-2]-ib": ["a1-ib", "a2-ib"],
    "r[01-02]n[5-6]-ib": ["r01n5-ib", "r01n6-ib", "r02n5-ib", "r02n6-ib"],
    "a1-2": ["a1-2"],
}

REFUSALS = {
    "a[0-8/2]": "hostlist 'a[0-8/2]': '0-8/2' is not a number or a range like 01-16 "
    "(Slurm has no stepped ranges: name the hosts one by one)",
    "tux[0-7:2]": "hostlist 'tux[0-7:2]': '0-7:2' is not a number or a range like 01-16 "
    "(Slurm has no stepped ranges: name the hosts one by one)",
    "a[]": "hostlist 'a[]': '' is not a number or a range like 01-16",
    "a[1,]": "hostlist 'a[1,]': '' is not a number or a range like 01-16",
    "a[x]": "hostlist 'a[x]': 'x' is not a number or a range like 01-16",
    "a[1-]": "hostlist 'a[1-]': '1-' is not a number or a range like 01-16",
    "a[ 1-2]": "hostlist 'a[ 1-2]': ' 1-2' is not a number or a range like 01-16",
    "a[1-٣]": "hostlist 'a[1-٣]': '1-٣' is not a number or a range like 01-16",
    "a[3-1]": "hostlist 'a[3-1]': the range '3-1' runs backwards",
    "a[1-2": "hostlist 'a[1-2': a bracket at character 2 has no partner",
    "b,a]": "hostlist 'b,a]': a bracket at character 4 has no partner",
    "a[[1-2]]": "hostlist 'a[[1-2]]': a bracket at character 2 has no partner",
    "a[1-65537]": "hostlist 'a[1-65537]': the range '1-65537' has more than 65536 names",
    "a[1-400]b[1-400]": "hostlist 'a[1-400]b[1-400]': stands for more than 100000 names",
    "a[1-60000],b[1-60000]": "hostlist 'b[1-60000]': stands for more than 100000 names",
    "a[9999999999999999999]": "hostlist 'a[9999999999999999999]': the number '9999999999999999999' "
    "is too large for Slurm",
    "a\x0b": "hostlist 'a\\x0b': an unsupported blank at character 2",
}


@cases("text", *EXPANSIONS)
def test_expand_returns_names_in_slurm_order(text: str) -> None:
    assert expand(text) == EXPANSIONS[text]


@cases("text", *REFUSALS)
def test_invalid_hostlist_is_rejected_with_its_reason(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        expand(text)
    assert str(refused.value) == REFUSALS[text]


@cases("text", "a" * 300, "a[" + "0" * 300 + "1-2]", "[1-2]" * 30 + "a[1]", "a" + "9" * 5000)
def test_oversized_names_and_products_are_rejected_before_expansion(text: str) -> None:
    with pytest.raises(ValueError, match=r"more than|too large"):
        expand(text)


def test_list_of_exactly_the_limit_is_accepted() -> None:
    assert len(expand("a[1-50000],b[1-50000]")) == MAX_NAMES
    with pytest.raises(ValueError, match="stands for more than"):
        expand("a[1-50000],b[1-50000],c")


@cases(
    "names, text",
    ([], ""),
    (["b", "a"], "a,b"),
    (["a2", "a1", "a1"], "a[1-2]"),
    (["a9", "a10", "a11"], "a[9-11]"),
    (["a09", "a9", "a10"], "a[9,09-10]"),
    (["a", "a3", "a1", "a02", "a2"], "a,a[1-3,02]"),
    (["r10n1", "r2n1", "r02n1", "r2n2"], "r02n1,r2n[1-2],r10n1"),
    (["2", "1"], "[1-2]"),
)
def test_compress_sorts_and_folds(names: list[str], text: str) -> None:
    assert compress(names) == text


def test_fold_keeps_order_and_duplicates() -> None:
    assert fold(["a10", "a9", "b", "b", "a1", "a2"]) == "a[10,9],b,b,a[1-2]"


@cases("name", "", "a b", "a,b", "a[1]", "a\n")
@cases("function", compress, fold)
def test_invalid_host_name_is_rejected(function: object, name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a host"):
        function([name])  # type: ignore[operator]


NAMES = st.lists(st.from_regex(r"[a-z0-9.-]{0,4}[0-9]{1,3}|[a-z][a-z0-9-]{0,5}", fullmatch=True), max_size=30)


@given(NAMES)
def test_expand_undoes_fold(names: list[str]) -> None:
    assert expand(fold(names)) == names


@given(NAMES)
def test_expand_undoes_compress_up_to_order(names: list[str]) -> None:
    assert sorted(expand(compress(names))) == sorted(set(names))


@given(NAMES, st.randoms(use_true_random=False))
def test_compress_does_not_depend_on_the_order(names: list[str], dice: random.Random) -> None:
    shuffled = list(names)
    dice.shuffle(shuffled)
    assert compress(shuffled) == compress(names)


@given(st.text(alphabet="ab01289[]-,/: \n", max_size=40) | st.text(max_size=40))
def test_any_text_gives_names_or_a_value_error(text: str) -> None:
    try:
        names = expand(text)
    except ValueError as refused:
        assert str(refused).startswith(("hostlist ", "the name "))
    else:
        assert expand(fold(names)) == names


# ---- against Slurm itself

RANDOM_LISTS = 10_000


@pytest.fixture(scope="module")
def random_lists() -> list[str]:
    dice = random.Random(20261115)
    return [_random_list(dice) for _ in range(RANDOM_LISTS)]


@pytest.fixture(scope="module")
def expanded(random_lists: list[str]) -> dict[str, list[str]]:
    """Those of the lists that we take, with the names they stand for: a million names, made once."""
    found = {}
    for text in random_lists:
        with contextlib.suppress(ValueError):
            found[text] = expand(text)
    return found


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed (apt-get install slurm-client)")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\n")
    return conf


def test_ten_thousand_random_lists_expand_as_in_slurm(
    slurm: Path, random_lists: list[str], expanded: dict[str, list[str]]
) -> None:
    answers = _ask(slurm, "hostnames", random_lists)
    for text, answer in zip(random_lists, answers, strict=True):
        if "]x" in text:  # newer releases accept it
            assert "Invalid" in answer, text
        elif text in expanded:
            assert "\n".join(expanded[text]) == answer, text
        else:
            assert "Invalid" in answer, f"we refuse {text}, Slurm says {answer}"


def test_ten_thousand_random_lists_compress_as_in_slurm(slurm: Path, expanded: dict[str, list[str]]) -> None:
    # Slurm keeps `][` apart, and loses names where some are twice in a mix of paddings.
    texts = [
        text for text, names in expanded.items() if len(set(names)) == len(names) and not re.search(r"\]\[|\]x", text)
    ]
    mixed = {text for text in texts if _mixes_paddings(expanded[text])}
    # Slurm's order of a mix of a1 and a01 depends on the order of the question.
    questions = [",".join(sorted(expanded[text])) if text in mixed else text for text in texts]
    short = [(text, question) for text, question in zip(texts, questions, strict=True) if len(question) < 2000]
    answers = _ask(slurm, "hostlistsorted", [question for _, question in short])
    for (text, _), answer in zip(short, answers, strict=True):
        assert compress(expanded[text]) == answer, text
    assert len(short) > 0.4 * len(expanded) and sum(text in mixed for text, _ in short) > 0.02 * len(expanded)
    # What we write for any of them, Slurm reads back.
    ours = [text for text in (compress(names[:200]) for names in expanded.values()) if len(text) < 500]
    assert len(ours) > 0.8 * len(expanded)
    for text, answer in zip(ours, _ask(slurm, "hostnames", ours), strict=True):
        assert answer.split() == expand(text)


def test_ten_thousand_random_lists_fold_as_in_slurm(slurm: Path, expanded: dict[str, list[str]]) -> None:
    texts = [",".join(names[:30]) for names in expanded.values()]
    for text, answer in zip(texts, _ask(slurm, "hostlist", texts), strict=True):
        assert fold(text.split(",")) == answer


def _ask(conf: Path, question: str, texts: list[str]) -> list[str]:
    """Put every list to one scontrol, which echoes each question before it answers."""
    questions = "".join(f"show {question} {text}\n" for text in texts)
    # A terminal wider than any question, or the echo is wrapped and full of cursor movements.
    terminal = {"TERM": "dumb", "COLUMNS": "32000"}
    done = subprocess.run(
        ["scontrol"],
        input=questions,
        env={**os.environ, **terminal, "SLURM_CONF": str(conf)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
    answers = done.stdout.split(f"scontrol: show {question} ")[1:]
    answers[-1] = answers[-1].removesuffix("scontrol: \n")
    assert [answer.partition("\n")[0].rstrip() for answer in answers] == texts
    return [answer.partition("\n")[2].rstrip("\n") for answer in answers]


def _random_list(dice: random.Random) -> str:
    return ",".join(_random_item(dice) for _ in range(dice.choice((1, 1, 2, 3, 5))))


def _random_item(dice: random.Random) -> str:
    prefix = dice.choice(("a", "b", "gpu", "n-", "r1x", "r02x", "r10x", "x.y", "A", ""))
    brackets = dice.choice((0, 1, 1, 1, 2, 2, 3))
    if brackets == 0:
        return (prefix or "z") + dice.choice(("", str(dice.randint(0, 120)), f"{dice.randint(0, 120):03}"))
    text = prefix
    for number in range(brackets):
        text += dice.choice(("", "b", "-c")) if number else ""
        text += (
            "["
            + ",".join(_random_range(dice, 12 if brackets == 1 else 4) for _ in range(dice.choice((1, 1, 2, 3))))
            + "]"
        )
    return text + dice.choice(("",) * 60 + ("x",))


def _random_range(dice: random.Random, longest: int) -> str:
    low = dice.choice((dice.randint(0, 12), dice.randint(90, 110)))
    high = low + dice.choice((0, 1, 2, longest))
    width = dice.choice((0, 0, 0, 2, 3))
    if dice.random() < 0.01:
        return dice.choice((f"{low}-{high}/2", f"{high + 1}-{low}", "x", "", f"-{low}", f"{low}-{high}x2"))
    return f"{low:0{width}}" if low == high and dice.random() < 0.5 else f"{low:0{width}}-{high:0{width}}"


def _mixes_paddings(names: list[str]) -> bool:
    """Whether some prefix has numbers of more than one padding, such as a1 and a01."""
    series: dict[str, set[str]] = {}
    for name in names:
        digits = name[len(name.rstrip("0123456789")) :]
        if digits:
            series.setdefault(name.removesuffix(digits), set()).add(digits)
    for numbers in series.values():
        padded = {len(digits) for digits in numbers if digits[0] == "0" and len(digits) > 1}
        if len(padded) > 1 or (padded and any(len(digits) < max(padded) for digits in numbers)):
            return True
    return False
