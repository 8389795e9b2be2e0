"""References to secrets: their syntax in a spec, and how a value is resolved."""

from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import UsageError
from shoal.spec.checks import InvalidValue, secret_reference
from shoal.spec.local_files import resolve_secret


@cases("text", "env:TS_KEY", "file:~/.ts", "file:/etc/a b")
def test_reference_names_a_variable_or_a_file(text: str) -> None:
    assert secret_reference(text) == text


@cases("value", "tskey-auth-123", "env:", "env:1A", "file:", 5, None, "file:a\nb")
def test_literal_secret_is_rejected_and_not_shown(value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        secret_reference(value)
    assert "write env:NAME or file:PATH" in str(refused.value)
    assert "tskey" not in str(refused.value) and "tskey" not in refused.value.found


def test_secret_is_read_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_KEY", "one")
    (tmp_path / "key").write_text("two\n")
    assert resolve_secret("env:A_KEY", "network.auth_key") == b"one"
    assert resolve_secret(f"file:{tmp_path}/key", "network.auth_key") == b"two"


def test_missing_secret_is_reported_with_its_key_and_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UsageError, match=r"network.auth_key is env:A_KEY, and A_KEY is not set\n  fix: export A_KEY"):
        resolve_secret("env:A_KEY", "network.auth_key")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        resolve_secret(f"file:{tmp_path}/none", "network.auth_key")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="the file is empty"):
        resolve_secret(f"file:{tmp_path}/empty", "network.auth_key")
