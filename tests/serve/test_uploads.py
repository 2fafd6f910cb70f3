"""Reading a request: names, limits, and how little is held in memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import form
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from branchout.serve.limits import BodyLimits, Limits, Refused
from branchout.serve.uploads import safe_name, uploaded_files

XYZ = "multipart/form-data; boundary=xyz"
LIMITS = Limits(file_bytes=100, files=3)


Files = list[tuple[str, bytes, int]]
"""Name, content and size of every file."""


def received(receive: Any, kind: str, limits: Limits = LIMITS, **headers: str) -> Files:
    """The files of a request whose body comes from `receive`, behind the limits."""
    found: Files = []

    async def app(scope: Scope, receive: Receive, _: Send) -> None:
        async with uploaded_files(Request(scope, receive), limits) as files:
            found.extend([(file.filename or "", await file.read(), file.size or 0) for file in files])

    given_ = {"content-type": kind, **headers}
    listed = [(name.encode(), value.encode("latin-1")) for name, value in given_.items()]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": listed}
    asyncio.run(BodyLimits(app, limits)(scope, receive, None))  # type: ignore[arg-type]
    return found


def read(chunks: Iterable[bytes], kind: str, limits: Limits = LIMITS, **headers: str) -> Files:
    pieces = iter(chunks)

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    return received(receive, kind, limits, **headers)


def refused(chunks: Sequence[bytes], kind: str, limits: Limits = LIMITS, **headers: str) -> Refused:
    with pytest.raises(Refused) as refusal:
        read(chunks, kind, limits, **headers)
    return refusal.value


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_files_come_whole_and_in_order_however_the_body_is_cut(size: int) -> None:
    files = [("a.png", b"\r\n--xy\r\n--xyzz" * 4), ("b.png", b""), ("a.png", bytes(range(100)))]
    kind, body = form(files)
    found = read([body[n : n + size] for n in range(0, len(body), size)], kind)
    assert found == [(name, data, len(data)) for name, data in files]


def test_an_image_as_the_body_is_kept_up_to_the_limit() -> None:
    assert read([b"x" * 60, b"x" * 40], "image/png") == [("image", b"x" * 100, 100)]
    ((name, data, size),) = read([b"x" * 60, b"x" * 41, b"x"], "image/png")
    assert (name, size) == ("image", 102)
    assert len(data) <= 100


def test_200_megabytes_are_never_held_in_memory() -> None:
    megabyte = b"\0" * 1_000_000
    head, tail = form([("big.png", b"SPLIT")])[1].split(b"SPLIT")
    limits = Limits(files=20)
    uploaded: list[int] = []

    async def app(scope: Scope, receive: Receive, _: Send) -> None:
        async with uploaded_files(Request(scope, receive), limits) as (file,):
            uploaded.append(file.size or 0)
            assert bodies.bytes > 200_000_000
            assert bodies.open == 1

    bodies = BodyLimits(app, limits)
    pieces = iter([head, *[megabyte] * 200, tail])

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [(b"content-type", XYZ.encode())]}
    tracemalloc.start()
    try:
        asyncio.run(bodies(scope, receive, None))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert uploaded == [200_000_000]
    assert peak < 20_000_000
    assert (bodies.open, bodies.bytes) == (0, 0)


def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    read_on: list[bytes] = []

    def chunks() -> Iterable[bytes]:
        read_on.append(b"")
        yield b""

    with pytest.raises(Refused) as refusal:
        read(chunks(), "image/png", **{"content-length": "2000000"})
    assert refusal.value.status_code == 413
    assert read_on == []


def test_a_body_that_goes_on_and_on_is_given_up() -> None:
    sent = 0

    def endless() -> Iterable[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield b"\0" * 1000

    with pytest.raises(Refused) as refusal:
        read(endless(), "image/png")
    assert refusal.value.status_code == 413
    assert sent <= LIMITS.body_bytes + 2000


def trickled(limits: Limits, pause: float, chunk: bytes) -> Refused | None:
    """The refusal of a body that sends one chunk after each pause, ten times."""
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        await asyncio.sleep(pause)
        sent += 1
        return {"type": "http.request", "body": chunk, "more_body": sent < 10}

    try:
        received(receive, "image/png", limits)
    except Refused as refusal:
        return refusal
    return None


def test_a_body_that_arrives_too_slowly_is_refused() -> None:
    assert trickled(Limits(body_seconds=0.05), 60, b"").status_code == 408  # nothing at all
    assert trickled(Limits(body_grace=0.1, body_rate=1000), 0.05, b"x").status_code == 408  # 20 bytes per second
    assert trickled(Limits(body_grace=1, body_rate=1000), 0.2, b"x" * 400) is None  # 2,000 bytes per second
    assert trickled(Limits(body_seconds=0.3, body_rate=1), 0.1, b"x" * 200).status_code == 408  # fast, but too long


def test_too_many_files_are_refused_at_the_first_too_many() -> None:
    kind, body = form([(f"{n}.png", b"x") for n in range(4)])
    refusal = refused([body], kind)
    assert refusal.status_code == 413
    assert "at most 3" in refusal.detail


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        (b"{}", "application/json", 415, "application/json"),
        (b"x", "", 415, "missing"),
        (b"a=b", "application/x-www-form-urlencoded", 415, "--data-binary"),
        (b"x", "multipart/form-data", 400, "boundary"),
        (b"x", f"multipart/form-data; boundary={'y' * 500}", 400, "cannot be read"),
        (b"no boundary here", XYZ, 400, "cannot be read"),
        (form([("a.png", b"abc")])[1][:-8], XYZ, 400, "truncated"),
        (form([("a.png", b"abc")], field="photo")[1], XYZ, 400, "'photo'"),
        (b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--\r\n", XYZ, 400, "name"),
        (b"--xyz\r\n\r\nx\r\n--xyz--\r\n", XYZ, 400, "name"),
        (
            b'--xyz\r\nContent-Disposition: form-data; name="files"\r\n\r\nx\r\n--xyz--\r\n',
            XYZ,
            400,
            "text, not a file",
        ),
        (b"--xyz\r\n" + b"X: y\r\n" * 1000 + b"\r\n", XYZ, 400, "cannot be read"),
        (b"--xyz\r\nX: " + b"y" * 50_000, XYZ, 400, "cannot be read"),
    ],
)
def test_a_request_that_is_none_is_answered_in_a_sentence(body: bytes, kind: str, status: int, words: str) -> None:
    refusal = refused([body], kind, Limits(files=3))
    assert refusal.status_code == status
    assert words in refusal.detail


def test_an_empty_form_has_no_files() -> None:
    assert read([b"--xyz--\r\n"], XYZ) == []


def test_a_caller_who_hangs_up_is_noticed() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        received(gone, "image/png")


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        ("robin.jpg", "robin.jpg"),
        ("../../etc/passwd", "passwd"),
        ("/etc/shadow", "shadow"),
        ("C:\\Users\\me\\robin.jpg", "robin.jpg"),
        ("..", "image"),
        ("a/..", "image"),
        ("", "image"),
        ("a/", "image"),
        ("nul\0l\r\nSet-Cookie: x.png", "nullSet-Cookie: x.png"),
        ("\u202egpj.exe", "gpj.exe"),
        ("\ud800.png", ".png"),
        ("Ω – große Möwe.png", "Ω – große Möwe.png"),
        ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
    ],
)
def test_a_name_is_its_last_part_and_nothing_unseen(given_: str, kept: str) -> None:
    assert safe_name(given_) == kept


@given(st.text(max_size=300))
def test_no_name_leads_anywhere(name: str) -> None:
    kept = safe_name(name)
    assert 0 < len(kept) <= 120
    assert not set(kept) & {"/", "\\", "\0", "\n", "\r"}
    assert kept not in {".", ".."}
    kept.encode()  # and it can be sent
