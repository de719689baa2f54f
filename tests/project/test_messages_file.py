"""`raises` in tests/support/messages.py compares errors with tests/messages.txt."""

import messages
import numpy as np
import pytest
from messages import check_golden, normalize, raises, read_golden, write_golden
from paths import ROOT

from synkhronos.devices.reduce_op import REDUCE_OPS, ReduceOp, list_collective_ops, list_ops

FILE = "tests/project/test_messages_file.py"


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """Write a file of messages for this test alone; return its path."""
    monkeypatch.setattr(messages, "GOLDEN", tmp_path / "messages.txt")
    monkeypatch.delenv("SYNKHRONOS_MESSAGES", raising=False)
    write_golden(messages.GOLDEN, {FILE: {"ValueError: count: expected 1, got 2"}})
    return messages.GOLDEN


def fail_with(error):
    raise error


def test_raises_accepts_recorded_messages(golden):
    with raises(ValueError, "count") as caught:
        fail_with(ValueError("count: expected 1, got 2"))
    assert caught.type is ValueError


@pytest.mark.parametrize(
    ("error", "argument", "complaint"),
    [
        (ValueError("count: expected one, got 2"), "count", "does not have this message"),
        (ValueError("count: expected 1, got 2"), "size", "'size' is not in"),
        (ValueError("count: expected 1, got 2"), "coun", "'coun' is not in"),
        (UnicodeError("count: expected 1, got 2"), "count", "does not have this message"),
    ],
)
def test_raises_refuses_other_messages_arguments_and_types(golden, error, argument, complaint):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=complaint), raises(ValueError, argument):
        fail_with(error)


def test_raises_fails_without_an_error(golden):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), raises(ValueError):
        pass


def test_raises_adds_messages_only_when_asked(golden, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_MESSAGES", "write")
    check_golden(golden, "tests/other.py", "TypeError: size")
    assert read_golden(golden) == {
        FILE: {"ValueError: count: expected 1, got 2"},
        "tests/other.py": {"TypeError: size"},
    }
    monkeypatch.delenv("SYNKHRONOS_MESSAGES")
    with pytest.raises(pytest.fail.Exception, match="does not have this message"):
        check_golden(golden, "tests/other.py", "TypeError: another")


def test_normalize_replaces_volatile_parts(tmp_path):
    error = RuntimeError(f"rank 1 (process 4711), <f at 0x7f00>, {tmp_path / 'a.npy'}, {ROOT}/b, synk_function_12")
    error.add_note("a note")
    assert (
        normalize(error) == "RuntimeError: rank 1 (process N), <f at 0xN>, TMP/a.npy, ROOT/b, synk_function_N\\na note"
    )


@pytest.mark.parametrize("unsupported_kinds", ["", "b", "biu"])
def test_new_reduction_changes_no_message(monkeypatch, unsupported_kinds):
    def collect_messages():
        *others, last = map(repr, list_collective_ops(np.dtype(int)))
        return [
            f"expected an op ({', '.join(map(repr, list_ops()))}, or None)",
            f"expected one of {list_collective_ops()}",
            f"choose {', '.join(map(repr, list_ops(np.dtype(int))))} or None",
            f"choose {', '.join(others)} or {last}",
        ]

    old = collect_messages()
    normalized = [normalize(ValueError(message)) for message in old]
    assert normalized[0] == "ValueError: expected an op (OPS, or None)"
    assert normalize(ValueError("choose 'sum' or 'max'")) == "ValueError: choose 'sum' or 'max'"
    monkeypatch.setitem(REDUCE_OPS, "new", ReduceOp(np.hypot, unsupported_kinds=unsupported_kinds))
    assert collect_messages() != old
    assert [normalize(ValueError(message)) for message in collect_messages()] == normalized


def test_messages_sections_name_test_files():
    for name in read_golden(ROOT / "tests" / "messages.txt"):
        assert "from messages import" in (ROOT / name).read_text(), name
