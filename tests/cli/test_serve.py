"""`branchout serve` as it is typed: ports, messages, and an end without fuss."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from serving import Caller, File, glyph_files, wait_for

from branchout import api, cli
from branchout.cli.serve import _open, _token
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.serve.server import address, listen

SCRIPT = Path(sys.executable).parent / "branchout"


@pytest.fixture
def file(val: Samples) -> File:
    return glyph_files(val, 1)[0]


@contextmanager
def typed(*words: str | Path) -> Iterator[tuple[subprocess.Popen[str], Caller, str]]:
    """The real command in a process of its own, once it says where it is."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    process = subprocess.Popen(
        [SCRIPT, "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        place = re.search(r"http://(?:127\.0\.0\.1|localhost):(\d+)", said)
        assert place, said + (process.communicate()[1] if process.poll() is not None else "")
        yield process, Caller(int(place[1])), said
    finally:
        process.kill()
        process.communicate()


def leaves_quietly(process: subprocess.Popen[str], how: signal.Signals = signal.SIGINT) -> None:
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 0


def test_it_says_where_it_is_answers_and_leaves_quietly(extended: api.Model, file: File) -> None:
    with typed(extended.folder, "--port", "0") as (process, caller, said):
        assert said.startswith(f"{extended.folder}: 11 classes, at http://127.0.0.1:")
        assert caller.predict([file]).status == 200
        assert caller.predict([("bad.png", b"x")]).status == 415
        assert caller.ask("POST", "/predict", b"--", Content_Type="multipart/form-data; boundary=q").status == 400
        leaves_quietly(process)
        with pytest.raises(ConnectionRefusedError):
            caller.get("/health")


def test_labelled_images_are_read_beside_it(extended: api.Model, val: Samples, tmp_path: Path) -> None:
    for number, (_, data) in enumerate(glyph_files(val.of_classes(extended.classes[:1]), 3)):
        (tmp_path / extended.classes[0]).mkdir(exist_ok=True)
        (tmp_path / extended.classes[0] / f"{number}.png").write_bytes(data)
    with typed(extended.folder, tmp_path, "--port", "0") as (process, caller, _):
        wait_for(lambda: caller.get("/report-data?brief=true").json["state"] == "ready")
        assert caller.get("/report-data").json["data"]["labels"] == [0, 0, 0]
        leaves_quietly(process)


def test_a_run_is_watched_until_ctrl_c_even_by_someone_who_listens(tmp_path: Path, file: File) -> None:
    out = tmp_path / "v2"
    api.work_folder(out).mkdir()
    with typed(out, "--port", "0") as (process, caller, said):
        assert said.startswith(f"waiting for {out}, at http://127.0.0.1:")
        assert caller.get("/progress").json["state"] == "running"
        assert caller.predict([file]).status == 503
        line = HTTPConnection("127.0.0.1", caller.port, timeout=20)
        line.request("GET", "/progress/events")
        events = line.getresponse()
        assert json.loads(events.readline()[6:])["state"] == "running"
        leaves_quietly(process)  # although someone still listens
        assert events.read() == b"\n"
        line.close()


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["branchout", "serve", *map(str, words)])
        patch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return said


def test_ctrl_c_while_it_loads_is_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("branchout.cli.serve._open", interrupted)
    monkeypatch.setattr(sys, "argv", ["branchout", "serve", "v2", "--port", "0"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0


def test_a_port_that_is_taken_is_answered_with_a_free_one(
    capsys: pytest.CaptureFixture[str], extended: api.Model
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, extended.folder, "--port", str(port))
    assert f"Port {port} of 127.0.0.1 is already in use" in said
    advice = re.search(r"(\d+) is free: branchout serve (\S+) --port (\d+)", said)
    assert advice
    assert advice[1] == advice[3]
    assert advice[2] == str(extended.folder)
    with listen("127.0.0.1", int(advice[1])):
        pass  # it is


def test_what_cannot_be_served_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "branchout serve MODEL" in refused(capsys, "--port", "0")
    assert "no saved model" in refused(capsys, tmp_path / "nothing", "--port", "0")
    assert "branchout.json" in refused(capsys, tmp_path, "--port", "0")
    assert f"There is no folder {tmp_path / 'nothing'}" in refused(
        capsys, tmp_path, tmp_path / "nothing", "--port", "0"
    )
    assert "there is no such file" in refused(capsys, tmp_path, tmp_path / "no.tar", "--port", "0")
    with tarfile.open(tmp_path / "test.tar", "w") as archive:
        for name, content in (("a.jpg", b"not read yet"), ("a.cls", b"robin")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert "branchout.json" in refused(capsys, tmp_path, tmp_path / "test.tar", "--port", "0")


def test_listening_beyond_this_machine_needs_a_flag_and_a_token(
    capsys: pytest.CaptureFixture[str], extended: api.Model
) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", ""):
        said = refused(capsys, extended.folder, "--host", host, "--port", "0")
        assert "--public" in said
        assert "token" in said
    assert "12" in refused(capsys, extended.folder, "--token", "short")
    assert _token("127.0.0.1", False, None) is None
    assert _token("127.0.0.1", False, "a long secret") == "a long secret"
    assert _token("0.0.0.0", True, "a long secret") == "a long secret"
    made = {_token("0.0.0.0", True, None) for _ in range(3)}
    assert len(made) == 3
    assert all(len(token or "") >= 32 for token in made)


def test_a_public_server_prints_its_token_and_asks_for_it(extended: api.Model, file: File) -> None:
    with typed(extended.folder, "--port", "0", "--host", "0.0.0.0", "--public") as (process, caller, _):
        assert process.stdout is not None
        link = re.search(r"/\?token=([\w-]+)", process.stdout.readline())
        assert link
        assert caller.predict([file]).status == 401
        assert caller.predict([file], Authorization=f"Bearer {link[1]}").status == 200
        leaves_quietly(process)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.9"])
def test_an_address_that_is_not_ours_is_said(host: str) -> None:
    with pytest.raises(BranchoutError, match="Leave out --host"):
        listen(host, 0)


def test_addresses_are_such_as_browsers_take() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert address(sock, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert address(sock, "0.0.0.0") == f"http://localhost:{port}"
        assert address(sock, "::1") == f"http://[::1]:{port}"


def test_who_calls_before_the_server_runs_is_kept_waiting() -> None:
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname(), timeout=5):
        pass


def test_what_is_opened_and_what_is_watched(extended: api.Model, tmp_path: Path) -> None:
    assert extended.folder is not None
    out = tmp_path / "v3"
    opened, watched = _open(str(extended.folder), out, "cpu")
    assert opened is not None
    assert opened.classes == extended.classes
    assert watched == out
    assert _open(None, out, None) == (None, out)  # nothing has begun yet
    finished, _ = _open(None, extended.folder, None)
    assert finished is not None
    api.work_folder(out).mkdir()
    assert _open(str(out), None, None) == (None, out)
    with pytest.raises(BranchoutError, match="Leave out --watch"):
        _open(str(out), extended.folder, None)
    with pytest.raises(BranchoutError, match="has no name"):
        _open(None, Path("/"), None)
