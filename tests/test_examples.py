"""The examples run as they stand, on little."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import NEW, class_folders

from branchout import api
from branchout.data.samples import Samples

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str, *words: str | Path, status: int = 0) -> tuple[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words], capture_output=True, encoding="utf-8", env=environment, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_api_in_15_lines() -> None:
    told, _ = example("api_in_15_lines.py")
    assert "800 classes, now 805" in told
    right = [float(share) for share in re.findall(r"(\d+)% of the", told)]
    assert len(right) == 4
    assert min(right) > 50
    code = (EXAMPLES / "api_in_15_lines.py").read_text(encoding="utf-8").split('"""')[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15


def test_extend_timm(base: api.Model, train: Samples, tmp_path: Path) -> None:
    """With a base of ours: a real one takes a minute, and goes the same way."""
    class_folders(train, tmp_path / "new", NEW, 6)
    told, _ = example(
        "extend_timm.py", tmp_path / "new", "--base", base.folder, "--out", tmp_path / "v2", "--epochs", "2"
    )
    assert "now 11 classes" in told
    assert "Training the new branch: 2/2  loss " in told
    assert "balanced: all " in told
    assert set(api.load(tmp_path / "v2").classes) == {*base.classes, *NEW}


class Stub(BaseHTTPRequestHandler):
    """Answers as the server does, and keeps what it was sent."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        form = BytesParser(policy=HTTP).parsebytes(head + body)
        self.received.clear()
        for part in form.iter_parts():
            assert part.get_param("name", header="content-disposition") == "files"
            self.received.append((str(part.get_filename()), part.get_payload(decode=True)))
        if self.path != "/predict" or not any(content for _, content in self.received):
            return self.answer(400, {"detail": "empty file"})
        answers = [
            {"class": "robin", "probability": 0.931, "new": True},
            {"class": "owl", "probability": 0.05, "new": False},
        ]
        told = [
            {"file": name, "answers": answers} if content else {"file": name, "error": f"{name}: empty file"}
            for name, content in self.received
        ]
        return self.answer(200, {"predictions": told})

    def answer(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Stub.received = []
    with HTTPServer(("127.0.0.1", 0), Stub) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_call_http_api(server: str, tmp_path: Path) -> None:
    files = [tmp_path / 'a "robin", грач.png', tmp_path / "b.jpg"]
    contents = [bytes(range(256)) + b"\r\n--", b"\r\n\r\n"]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    told, _ = example("call_http_api.py", *files, "--server", server)
    assert [content for _, content in Stub.received] == contents
    assert told.splitlines()[1] == "b.jpg: robin 93.1% (new), owl 5.0%"
    files[1].write_bytes(b"")
    told, _ = example("call_http_api.py", *files, "--server", server)
    assert told.splitlines()[1] == "b.jpg: empty file"
    _, error = example("call_http_api.py", files[1], "--server", server, status=1)
    assert "the server refused: 400" in error
    assert "empty file" in error


def test_call_http_api_says_when_nobody_serves(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"x")
    _, error = example("call_http_api.py", tmp_path / "x.jpg", "--server", "http://127.0.0.1:9", status=1)
    assert "no server answers at http://127.0.0.1:9" in error
    assert "branchout serve v2/" in error
    assert "Traceback" not in error
