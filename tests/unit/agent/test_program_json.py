"""The agent's JSON equals that of the standard library, with and without its private modules."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases

from shoal.remote.agent.fast_stdlib import dumps, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_values_round_trip(value: Any) -> None:
    assert loads(dumps(value)) == json.loads(dumps(value)) == loads(json.dumps(value, indent=1)) == value
    assert "\n" not in dumps(value)


@cases("text", "", "{", "nope", "{} {}", '{"a" 1}', '"\n"')
def test_invalid_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_unserializable_value_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^bytes has no place in JSON$"):
        dumps({"key": b"secret"})


WITHOUT = "sys.modules.update(dict.fromkeys(['_json', '_signal', '_socket']))\n"
OTHER = "import _json\n_json.{} = lambda *words: 1 / 0\n"


@cases("change", WITHOUT, OTHER.format("make_scanner"), OTHER.format("make_encoder"))
def test_fallback_without_private_stdlib_modules_behaves_the_same(change: str) -> None:
    script = (
        f"import json, signal, socket, sys\n{change}"
        "from shoal.remote.agent import fast_stdlib\n"
        "assert (fast_stdlib.signal.SIGTERM, fast_stdlib.socket.AF_UNIX) == (signal.SIGTERM, socket.AF_UNIX)\n"
        'assert fast_stdlib.dumps(fast_stdlib.loads(\' {"a": [1, 2.5, null, "\\u00e9"]} \')) == sys.argv[1]\n'
        "for text in ('', '{} {}', 'nope'):\n"
        "    try: fast_stdlib.loads(text)\n"
        "    except ValueError: continue\n"
        "    raise SystemExit(text)\n"
    )
    whole = dumps({"a": [1, 2.5, None, "é"]})
    done = subprocess.run([sys.executable, "-c", script, whole], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
