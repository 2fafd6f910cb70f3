"""A real server in a thread, a client that says exactly what it is told to, and pictures of every kind."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI
from PIL import Image

from branchout.data.samples import Samples
from branchout.serve.server import listen, server_of

File = tuple[str, bytes]


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """Speaks to 127.0.0.1 at a port, one connection for each request."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 30, **headers: str) -> Reply:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def put(self, path: str, wanted: Any) -> Reply:
        return self.ask("PUT", path, json.dumps(wanted), Content_Type="application/json")

    def predict(self, files: Sequence[File], query: str = "", **headers: str) -> Reply:
        kind, body = form(files)
        return self.ask("POST", f"/predict{query}", body, Content_Type=kind, **headers)


def form(files: Sequence[File], field: str = "files") -> tuple[str, bytes]:
    """A multipart form as browsers write it."""
    parts = b"".join(
        f'--xyz\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n'.encode()
        + b"Content-Type: application/octet-stream\r\n\r\n"
        + data
        + b"\r\n"
        for name, data in files
    )
    return "multipart/form-data; boundary=xyz", parts + b"--xyz--\r\n"


@contextmanager
def running(app: FastAPI) -> Iterator[Caller]:
    """The app behind uvicorn, on a port of its own."""
    with listen("127.0.0.1", 0) as sock:
        server = server_of(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Caller(sock.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def png(pixels: np.ndarray, mode: str | None = None, kind: str = "PNG", **how: Any) -> bytes:
    """A picture file of an array, in another mode or format if wanted."""
    picture = Image.fromarray(pixels if pixels.ndim == 2 or pixels.shape[2] > 1 else pixels[:, :, 0])
    file = io.BytesIO()
    (picture.convert(mode) if mode else picture).save(file, kind, **how)
    return file.getvalue()


def glyph_files(samples: Samples, count: int) -> list[File]:
    """The first pictures of some at even distances, as files."""
    rows = np.linspace(0, len(samples) - 1, count).astype(int)
    return [(f"{n}.png", png(samples.read(int(row)))) for n, row in enumerate(rows)]
