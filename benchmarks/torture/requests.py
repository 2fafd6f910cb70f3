"""Fuzzed requests to a running server. It must answer each with a status below 500, and go on answering others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.torture.files import Case
from benchmarks.torture.fixtures import Material

PATHS = (
    "/",
    "/predict",
    "/model",
    "/operating-point",
    "/health",
    "/docs",
    "/openapi.json",
    "/nowhere",
    "/../x",
    "/%00",
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
METHODS = ("GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "BREW")


class Server:
    """`branchout serve` in a process of its own, on a free port of this machine."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        words = [sys.executable, "-m", "branchout", "serve", str(model), "--port", str(self.port)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
        for _ in range(600):
            if self.ask(HEALTH).startswith(b"HTTP/1.1 200"):
                return
            time.sleep(0.1)
        raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')}")

    def ask(self, request: bytes, patience: float = 8.0) -> bytes:
        """The first bytes of the answer; nothing if the server closed the connection without one."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), patience) as line:
            line.settimeout(patience)
            line.sendall(request)
            return line.recv(4096)
        return b""

    def resident(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def fuzzed_requests(material: Material, seed: int) -> Iterator[Case]:
    server = Server(material / "v2", material / "server.log")
    first = server.resident()
    image = material.photo.read_bytes()
    try:
        for number in range(10**6):
            rng = np.random.default_rng([seed, 6, number])
            name, request = _request(rng, server.port, image)
            yield name, lambda request=request: _asked(server, request, first)  # type: ignore[misc]
    finally:
        server.stop()


def _asked(server: Server, request: bytes, first: int) -> str | None:
    answer = server.ask(request, patience=1.0)  # an unfinished request is given up
    status = re.match(rb"HTTP/1\.1 (\d+)", answer)
    if status and int(status[1]) >= 500 and int(status[1]) != 503:  # 503: busy, try again
        return f"status {status[1].decode()}"
    start = time.monotonic()
    health = server.ask(HEALTH)
    if not health.startswith(b"HTTP/1.1 200"):
        return "the server stopped answering"
    if time.monotonic() - start > 5:
        return "others had to wait"
    if server.resident() - first > 1 << 30:
        return "memory"
    if b"Traceback" in server.log.read_bytes()[-20000:]:
        server.log.write_bytes(b"")
        return "traceback"
    return None


def _request(rng: np.random.Generator, port: int, image: bytes) -> tuple[str, bytes]:
    """One request: a valid upload with something wrong, a malformed request line or header, or random bytes."""

    def pick(words: tuple[str, ...]) -> str:
        return words[rng.integers(len(words))]

    kind = int(rng.integers(7))
    if kind == 0:
        return "random bytes", rng.integers(0, 256, int(rng.integers(1, 3000)), dtype=np.uint8).tobytes()
    method, path = pick(METHODS), pick(PATHS)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    if kind == 1:
        return f"{method} {path}", f"{head}\r\n".encode()
    if kind == 2:
        header = f"X-{'a' * int(rng.integers(1, 40000))}: {'b' * int(rng.integers(0, 40000))}\r\n"
        return f"{method} {path}, long header", f"{head}{header}\r\n".encode()
    if kind == 3:
        body = pick(
            ('{"goal": 1}', '{"goal": "' + "x" * 10000 + '"}', "[]", "{", "null", '{"b": NaN}', "[" * 5000)
        ).encode()
        head += f"Content-Type: application/json\r\nContent-Length: {len(body) + int(rng.integers(-2, 3))}\r\n"
        return f"{method} {path}, JSON", f"{head}\r\n".encode() + body
    if kind == 4:
        lie = pick(("-1", "99999999999999", "abc", "0x10", ""))
        return f"{method} {path}, length {lie!r}", f"{head}Content-Length: {lie}\r\n\r\n".encode() + image[:100]
    content = bytearray(image)
    if kind == 5 and len(content):
        content[int(rng.integers(len(content)))] ^= 255
    boundary = pick(("b", "b" * 300, '"b', "é"))
    field = pick(("files", "file", "image", ""))
    part = f'--b\r\nContent-Disposition: form-data; name="{field}"; filename="x.png"\r\n\r\n'
    body = part.encode() + bytes(content) + b"\r\n--b" + (b"--" if rng.random() < 0.5 else b"") + b"\r\n"
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: multipart/form-data; boundary={boundary}\r\nContent-Length: {len(body)}\r\n"
    return "upload", f"{head}\r\n".encode() + body
