"""Errors that a user can fix, and text that is safe to print."""

from __future__ import annotations

import errno
import os
import shlex
import unicodedata
from collections.abc import Iterable
from difflib import SequenceMatcher
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class BranchoutError(Exception):
    """Something the user can fix.

    The message says what was found, what was expected and, where there is one, what to type next. The command line
    prints it without a traceback and exits with status 1.
    """


class LostProcess(BranchoutError):  # noqa: N818 – not a fault of this one
    """Another process of the same run has ended."""


class DoesNotApply(BranchoutError):  # noqa: N818 – not a fault
    """A method that cannot be used with what it was given, such as adapters for a transformer and a ResNet."""


class UnreachableGoal(BranchoutError):  # noqa: N818 – not a fault
    """A goal that no operating point reaches, or that no image measures."""


def unknown(what: str, name: str, known: Iterable[str]) -> BranchoutError:
    """The error for a name that is none of the known ones, with the nearest of them, and all if they are not many."""
    from difflib import get_close_matches

    names = [printable(each) for each in known]
    many = len(names) > 60
    near = get_close_matches(name, names, n=3 if many else 1)
    hint = f"did you mean {' or '.join(near)}? Known" if near else "known"
    listed = f"{len(names):,} {'others' if near else 'names'}" if many else ", ".join(names)
    return BranchoutError(f"no {what} is called {printable(name)!r}; {hint} are: {listed}")


MOST = (1 << 63) - 1
"""The largest whole number that a setting may have: that of 64 bits, as for a seed."""


def whole_number(name: str, value: object, least: int) -> int:
    """A setting as an int; 1.5, "3" and True are errors."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= MOST:
        return int(value)  # numpy's numbers cannot be saved as JSON
    limit = f" and at most {MOST:,}" if isinstance(value, Integral) and int(value) > MOST else ""
    raise BranchoutError(f"{name} must be a whole number of at least {least}{limit}, found {shortened(value)}")


LIST_CLASSES = " To list the names: branchout classes MODEL"


def did_you_mean(names: Iterable[str], known: Iterable[str], most: int = 5) -> str:
    """A question for the end of a message about the first unknown names: which known ones are like them."""
    from difflib import get_close_matches

    by_letters = {name.casefold(): name for name in known}
    near = {name: get_close_matches(name.casefold(), by_letters, n=1, cutoff=0.75) for name in list(names)[:most]}
    meant = [f"{by_letters[found[0]]!r} for {name!r}" for name, found in near.items() if found]
    return f" Did you mean {printable(', '.join(meant))}?" if meant else ""


def no_saved_model(folder: Path) -> BranchoutError:
    """The error for a model folder that does not exist, with the saved models beside it, similar names first."""
    if folder.is_file():
        onnx = "An exported ONNX file cannot be opened: give the folder that it was exported from. "
        return BranchoutError(
            f"{printable(folder)} is a file, not a saved model. {onnx if folder.suffix.lower() == '.onnx' else ''}"
            "A saved model is a folder that contains branchout.json; weights of a network are a file that ends with "
            ".pth, .pt, .bin or .safetensors"
        )
    nearby = sorted(str(file.parent) for file in folder.parent.glob("*/branchout.json"))
    nearby.sort(key=lambda name: SequenceMatcher(None, name, str(folder)).ratio(), reverse=True)
    found = f"Found: {some(nearby)}" if nearby else "A saved model is a folder that contains branchout.json"
    return BranchoutError(f"There is no saved model {printable(folder)}. {found}")


def no_operating_points(folder: Path | None) -> BranchoutError:
    """The error for a base model where one that was extended is needed; None if the model is in no folder."""
    base = "MODEL" if folder is None else shlex.quote(str(folder))
    return BranchoutError(
        "A base model has no operating points. Extend it first: "
        f"branchout extend NEW/ --base {base} --memory OLD/ --out v2/"
    )


def some(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    names = [printable(name) for name in names]
    return (", ".join(names[:most]) or "nothing") + (f" and {len(names) - most:,} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of another library's message, which may have many; its type if it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


_OVERRIDES = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""Characters that change the direction of the text after them: a name could rewrite the line it is printed on."""


def printable(text: str | os.PathLike[str], *, newlines: bool = False) -> str:
    r"""A name or message with control characters and invalid Unicode shown as escapes, such as `\x1b`.

    `newlines` keeps line breaks and tabs, for messages of several lines; a file name has none.
    """
    text = os.fspath(text)
    if text.isprintable():
        return text
    return "".join(letter if newlines and letter in "\n\t" else _escaped(letter) for letter in text)


def canonical(name: str) -> str:
    """The name of a class or file as it is kept: printable, and in one Unicode form (NFC)."""
    return unicodedata.normalize("NFC", printable(name))


def _escaped(letter: str) -> str:
    if 0xDC80 <= ord(letter) <= 0xDCFF:  # how Python keeps a byte of a file name that is not valid UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    control = unicodedata.category(letter) in {"Cc", "Cs", "Zl", "Zp"} or ord(letter) in _OVERRIDES
    return ascii(letter)[1:-1] if control else letter


_OS_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose another folder, or change its permissions",
    errno.EPERM: "the operation is not permitted",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter one",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder; a file was expected",
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "it already exists",
    errno.ELOOP: "a symbolic link points to itself",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n 4096`",
    errno.EIO: "the disk reports an input/output error",
}


def explain_os_error(error: BaseException) -> str:
    """A sentence without a full stop for an OSError, a SafetensorError or a MemoryError: what to do about it."""
    if isinstance(error, MemoryError):
        return "not enough memory; use fewer or smaller images, a smaller batch, or a machine with more memory"
    if not isinstance(error, OSError):  # safetensors reports what the system said as text: "… (os error 28)"
        number = next((code for code in _OS_ERRORS if f"(os error {code})" in str(error)), None)
        return printable(str(error) or type(error).__name__) if number is None else _OS_ERRORS[number]
    found = _OS_ERRORS.get(error.errno or 0, error.strerror or str(error) or type(error).__name__)
    return printable(f"{error.filename}: {found}" if isinstance(error.filename, str) else found)


def explain_invalid(error: ValidationError) -> str:
    """The first three errors of a validation: where, what was expected, what was found."""
    found = error.errors(include_url=False, include_context=False)
    sentences = []
    for each in found[:3]:
        place = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if each["type"] == "value_error":
            sentences.append(f"{place}: {message}" if place else message)
        elif each["type"] == "missing":
            sentences.append(f"{place} is missing")
        else:
            sentences.append(f"{place}: expected {message}, found {shortened(each['input'])}")
    more = f" (and {len(found) - 3} more errors)" if len(found) > 3 else ""
    return printable("; ".join(sentences) + more)


def shortened(value: object) -> str:
    """A value as it is shown in a message; of a long one the first 80 characters."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
