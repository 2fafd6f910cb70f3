"""Messages that a user can act on, and text that is safe to print."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from branchout.errors import explain_os_error, printable, unknown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("robin", "robin"),
        ("грач 鷽 👩‍🔬 é", "грач 鷽 👩‍🔬 é"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\nc\x07\x9b2J\x7f", "a\\rb\\nc\\x07\\x9b2J\\x7f"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
        ("line\u2028break", "line\\u2028break"),
        (os.fsdecode(b"caf\xe9"), "caf\\xe9"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown_as_escapes(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert printable(Path(name)) == shown
    shown.encode()


def test_a_message_keeps_its_lines_and_nothing_else() -> None:
    assert printable("one\n\ttwo\x1b]0;title\x07", newlines=True) == "one\n\ttwo\\x1b]0;title\\x07"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x"), "disk is full"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (OSError(errno.ENAMETOOLONG, "x"), "too long"),
        (OSError(errno.ENOTDIR, "x"), "a file, not a folder"),
        (PermissionError(errno.EACCES, "x", "out/v2"), "out/v2: permission denied"),
        (OSError(errno.ENOTTY, "Inappropriate"), "Inappropriate"),
        (OSError("no number"), "no number"),
        (OSError(), "OSError"),
        (MemoryError(), "not enough memory"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "disk is full"),
        (SafetensorError("InvalidHeader\x1b"), "InvalidHeader\\x1b"),
    ],
)
def test_system_errors_become_sentences(error: BaseException, words: str) -> None:
    assert words in explain_os_error(error)


def test_what_safetensors_really_raises_is_understood(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as raised:
        save_file({}, tmp_path / ("n" * 300))
    assert "too long" in explain_os_error(raised.value)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert "did you mean robin" in str(unknown("class", "robn", ["robin", "owl"]))
