"""The HTTP API, spoken to as clients do: over a socket, or through FastAPI's own test client."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from serving import Caller, File, Reply, form, glyph_files, png, running, wait_for

from branchout import api
from branchout.data.samples import Samples
from branchout.serve import schema
from branchout.serve.app import create_app
from branchout.serve.engine import Engine, Question, Result
from branchout.serve.limits import Limits

SMALL = Limits(file_bytes=200_000, files=5, pixels=1_000_000)


@pytest.fixture(scope="module")
def server(extended: api.Model) -> Iterator[Caller]:
    with running(create_app(extended, limits=SMALL)) as caller:
        yield caller


@pytest.fixture(scope="module")
def files(val: Samples) -> list[File]:
    return glyph_files(val, 5)


@pytest.fixture
def copied(extended: api.Model, tmp_path: Path) -> api.Model:
    """A model whose folder may be written to."""
    assert extended.folder is not None
    return api.load(shutil.copytree(extended.folder, tmp_path / "v2"))


def chances(answers: list[dict[str, Any]]) -> list[float]:
    return [answer["probability"] for answer in answers]


def error_of(reply: Reply, status: int) -> str:
    """The sentence of a refusal."""
    assert reply.status == status, reply
    sentence = reply.json["error"]
    assert isinstance(sentence, str)
    assert len(sentence) > 10
    assert "Traceback" not in sentence
    return sentence


# Asking.


def test_pictures_are_answered_as_the_model_answers_them(
    server: Caller, extended: api.Model, files: list[File]
) -> None:
    reply = server.predict(files, "?top=3")
    assert reply.status == 200
    schema.Predictions.model_validate(reply.json)
    predictions = reply.json["predictions"]
    assert [each["file"] for each in predictions] == [name for name, _ in files]
    for prediction, (_, data) in zip(predictions, files, strict=True):
        expected = extended.predict(np.array(Image.open(io.BytesIO(data)))[:, :, None], top=3)
        assert chances(prediction["answers"]) == pytest.approx([p for _, p in expected], abs=1e-5)
        assert prediction["answers"][0]["class"] == expected[0][0]
        assert [branch["branch"] for branch in prediction["branches"]] == ["base", "step 1"]
        assert sum(branch["share"] for branch in prediction["branches"]) == pytest.approx(1, abs=1e-5)
        assert len(prediction["before"]) == 3
    assert reply.json["operating_point"] == server.get("/operating-point").json["operating_point"]


def test_one_picture_may_be_the_body(server: Caller, files: list[File]) -> None:
    reply = server.ask("POST", "/predict", files[0][1], Content_Type="image/png")
    (raw,) = reply.json["predictions"]
    (sent,) = server.predict(files[:1]).json["predictions"]
    assert raw["file"] == "image"
    assert chances(raw["answers"]) == pytest.approx(chances(sent["answers"]), abs=1e-6)
    assert len(raw["answers"]) == 5


def test_a_base_model_is_served_too(base: api.Model, files: list[File]) -> None:
    with TestClient(create_app(base), base_url="http://127.0.0.1") as client:
        body = client.post("/predict", files=[("files", files[0])]).json()
        schema.Predictions.model_validate(body)
        assert body["operating_point"] is None
        assert body["predictions"][0]["before"] is None
        assert client.get("/operating-point").json() == {"operating_point": None}
        refusal = client.put("/operating-point", json={"goal": "avg"})
        assert refusal.status_code == 422
        assert "branchout extend" in refusal.json()["error"]
        schema.ModelInfo.model_validate(client.get("/model").json())


def test_a_network_that_came_without_a_folder_is_served(extended: api.Model, files: list[File]) -> None:
    model = api.Model(extended.saved, None, extended.device)
    with TestClient(create_app(model), base_url="http://127.0.0.1") as client:
        assert client.post("/predict", files=[("files", files[0])]).status_code == 200
        assert client.get("/model").json()["bytes"] is None
        refusal = client.put("/operating-point", json={"goal": "avg", "save": True})
        assert "no folder" in refusal.json()["error"]


@pytest.mark.parametrize("query", ["?top=0", "?top=-1", "?top=many", "?top=100000", "?flip=perhaps"])
def test_a_setting_that_is_none_is_refused(server: Caller, files: list[File], query: str) -> None:
    error_of(server.predict(files[:1], query), 422)


def test_characters_are_not_mirrored(server: Caller, files: list[File]) -> None:
    assert "mirrored character" in error_of(server.predict(files[:1], "?flip=true"), 422)


def test_more_answers_than_classes_are_all_of_them(server: Caller, files: list[File], extended: api.Model) -> None:
    (told,) = server.predict(files[:1], "?top=1000").json["predictions"]
    assert len(told["answers"]) == len(extended.classes)
    assert sum(chances(told["answers"])) == pytest.approx(1, abs=1e-5)


# Bad uploads, and odd ones that are none.


def rotated(pixels: np.ndarray) -> bytes:
    """The picture on its side, with a note of which way is up."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).rotate(90, expand=True).save(file, "PNG", exif=exif)
    return file.getvalue()


def bomb() -> bytes:
    """A few kilobytes that unfold to more pixels than are taken."""
    return png(np.zeros((2000, 2000), np.uint8))


def claims(width: int, height: int) -> bytes:
    """A PNG whose header promises a size that its data does not have."""
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    rest = png(np.zeros((8, 8), np.uint8))[33:]
    return b"\x89PNG\r\n\x1a\n" + chunk + rest


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
BAD: dict[str, tuple[bytes, int, str]] = {
    "empty.png": (b"", 400, "empty"),
    "text.png": (b"hello, this is no picture at all", 415, "not an image"),
    "page.jpg": (b"<html><script>alert(1)</script>", 415, "not an image"),
    "program.png": (b"MZ" + b"\0" * 100, 415, "not an image"),
    "heic.jpg": (b"\0\0\0\x18ftypheic" + b"\0" * 50, 415, "HEIC"),
    "cut.png": (png(NOISE)[:2000], 422, "truncated"),
    "cut.jpg": (png(NOISE, kind="JPEG")[:900], 422, "truncated"),
    "header.png": (png(NOISE)[:20], 422, ""),
    "broken.png": (png(NOISE)[:60] + b"\xff" * 500 + png(NOISE)[560:], 422, ""),
    "cut.webp": (png(NOISE, kind="WEBP")[:300], 422, "truncated"),
    "bomb.png": (bomb(), 413, "2,000 × 2,000"),
    "huge.png": (claims(100_000, 100_000), 413, "100,000 × 100,000"),
    "lies.png": (claims(900, 900), 422, ""),
    "thin.png": (png(np.zeros((1, 40_000), np.uint8)), 413, "long and thin"),
    "large.png": (png(np.random.default_rng(1).integers(0, 256, (500, 500), dtype=np.uint8)), 413, "0.2 MB a file"),
}
STRANGE: dict[str, bytes] = {
    "animated.gif": png(
        NOISE, kind="GIF", save_all=True, append_images=[Image.fromarray(NOISE[::-1]), Image.fromarray(NOISE)]
    ),
    "cmyk.jpg": png(NOISE, "CMYK", "JPEG"),
    "sixteen.png": png(NOISE[:, :, 0].astype(np.uint16) * 257),
    "palette.png": png(NOISE, "P", transparency=3),
    "alpha.png": png(np.dstack([NOISE, NOISE[:, :, 0]])),
    "grey-alpha.png": png(NOISE, "LA"),
    "bits.png": png(NOISE, "1"),
    "tiff.tif": png(NOISE, kind="TIFF"),
    "bmp.bmp": png(NOISE, kind="BMP"),
    "webp.webp": png(NOISE, kind="WEBP"),
    "one.png": png(np.zeros((1, 1), np.uint8)),
    "wrong-suffix.txt": png(NOISE),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_in_a_sentence(server: Caller, name: str) -> None:
    data, status, words = BAD[name]
    for reply in (server.predict([(name, data)]), server.ask("POST", "/predict", data, Content_Type="image/png")):
        assert words in error_of(reply, status)
        assert reply.json["predictions"][0]["error"] == reply.json["error"]
    assert server.get("/health").json["status"] == "ok"


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_picture_is_answered(server: Caller, name: str) -> None:
    reply = server.predict([(name, STRANGE[name])])
    assert reply.status == 200, reply.body
    assert chances(reply.json["predictions"][0]["answers"])[0] > 0


def test_a_picture_on_its_side_is_turned_upright(server: Caller, val: Samples) -> None:
    upright = val.read(3)
    straight, turned = server.predict([("a", png(upright)), ("b", rotated(upright))]).json["predictions"]
    assert chances(straight["answers"]) == pytest.approx(chances(turned["answers"]), abs=1e-5)


def test_bad_ones_do_not_spoil_the_others(server: Caller, files: list[File]) -> None:
    mixed = [("text.png", b"hello"), files[0], ("empty.png", b""), files[1], ("large.png", BAD["large.png"][0])]
    reply = server.predict(mixed)
    assert reply.status == 200
    schema.Predictions.model_validate(reply.json)
    told = reply.json["predictions"]
    assert ["error" in each for each in told] == [True, False, True, False, True]
    assert [each["file"] for each in told] == [name for name, _ in mixed]
    alone = server.predict([files[1]]).json["predictions"][0]
    assert chances(told[3]["answers"]) == pytest.approx(chances(alone["answers"]), abs=1e-5)


def test_a_batch_of_only_bad_ones_is_refused(server: Caller) -> None:
    same = server.predict([("a.png", b"x"), ("b.png", b"y")])
    assert "None of the 2 images" in error_of(same, 415)
    assert [each["error"] for each in same.json["predictions"]] == ["a.png: not an image", "b.png: not an image"]
    error_of(server.predict([("a.png", b"x"), ("b.png", b"")]), 422)


def test_no_pictures_or_too_many_are_refused(server: Caller, files: list[File]) -> None:
    assert "no image" in error_of(server.predict([]), 400)
    assert "at most 5" in error_of(server.predict(files + files), 413)
    assert server.predict(files).status == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", "video/mp4"])
def test_a_type_that_is_no_picture_is_refused(server: Caller, files: list[File], kind: str) -> None:
    assert "multipart/form-data" in error_of(server.ask("POST", "/predict", files[0][1], Content_Type=kind), 415)


def test_a_broken_form_is_refused(server: Caller) -> None:
    for body in (b"rubbish", b"--xyz\r\n", form([("a", b"b")])[1][:40]):
        error_of(server.ask("POST", "/predict", body, Content_Type="multipart/form-data; boundary=xyz"), 400)


def test_a_name_is_no_path(server: Caller, files: list[File], tmp_path: Path) -> None:
    target = tmp_path / "secret.png"
    target.write_bytes(files[0][1])
    reply = server.predict([(str(target), b"no picture"), ("../../x.png", files[0][1])])
    assert [each["file"] for each in reply.json["predictions"]] == ["secret.png", "x.png"]
    assert "error" in reply.json["predictions"][0]  # what was sent counts, not what lies at that path
    assert str(tmp_path).encode() not in reply.body


def test_a_file_far_beyond_the_limit_is_refused_while_it_streams(server: Caller) -> None:
    megabyte = b"\0" * 1_000_000
    head, tail = form([("big.png", b"SPLIT")])[1].split(b"SPLIT")

    def chunks(count: int) -> Iterator[bytes]:
        yield head
        for _ in range(count):
            yield megabyte
        yield tail

    # Longer than a whole request may be, in chunks that do not say how many there will be.
    kind = "multipart/form-data; boundary=xyz"
    error_of(server.ask("POST", "/predict", chunks(30), Content_Type=kind), 413)
    declared = str(len(head) + 30_000_000 + len(tail))
    error_of(server.ask("POST", "/predict", chunks(30), Content_Type=kind, Content_Length=declared), 413)
    assert server.get("/health").status == 200


def test_a_caller_who_hangs_up_harms_nobody(server: Caller, files: list[File]) -> None:
    for sent in (b"", b"--xyz\r\nContent-Disposition: form-data; name"):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(
                b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000\r\n"
                b"Content-Type: multipart/form-data; boundary=xyz\r\n\r\n" + sent
            )
    assert server.predict(files[:1]).status == 200


# The model, its classes, its dial.


def test_the_model_tells_all_about_itself(server: Caller, extended: api.Model) -> None:
    facts = server.get("/model").json
    schema.ModelInfo.model_validate(facts)
    assert [each["class"] for each in facts["classes"]] == list(extended.classes)
    assert {each["split"] for each in facts["classes"]} == {"base", "step 1"}
    assert facts["frontier"] == extended.frontier.to_dict()
    assert facts["preprocessing"]["size"] == 32
    assert [event["what"] for event in facts["history"]] == ["pretrain", "extend"]
    assert facts["parameters"] == extended.classifier.parameter_counts()
    assert facts["bytes"] == sum(file.stat().st_size for file in extended.folder.glob("*.safetensors"))


def test_overlaps_are_told(val: Samples) -> None:
    from test_engine import two_steps

    with TestClient(create_app(two_steps(["last", "last"])), base_url="http://127.0.0.1") as client:
        found = {each["class"]: each for each in client.get("/classes").json()["classes"]}
    assert found["ampersand"] == {
        "class": "ampersand",
        "split": "overlap",
        "branches": ["base", "step 2"],
        "new": False,
    }
    assert found["infinity"]["split"] == "step 1"
    assert found["number sign"]["new"]
    assert not found["infinity"]["new"]


def test_classes_are_found_by_a_part_of_their_name(server: Caller, extended: api.Model) -> None:
    found = server.get("/classes?search=LETTER").json
    schema.Classes.model_validate(found)
    expected = [name for name in extended.classes if "letter" in name]
    assert [each["class"] for each in found["classes"]] == expected
    assert found["found"] == len(expected)
    first = server.get("/classes?search=a").json["classes"]
    assert first[0]["class"] == "ampersand"  # begins with it
    assert server.get("/classes?search=zebra").json == {"found": 0, "classes": []}
    assert len(server.get("/classes?limit=2").json["classes"]) == 2
    assert server.get("/classes").json["found"] == len(extended.classes)


def test_the_dial_is_turned_and_answers_follow(copied: api.Model, files: list[File]) -> None:
    with running(create_app(copied)) as caller:
        answers = {}
        for b in (-30.0, 30.0):
            reply = caller.put("/operating-point", {"b": b})
            assert reply.status == 200
            schema.CurrentPoint.model_validate(reply.json)
            assert reply.json == caller.get("/operating-point").json
            told = caller.predict(files[:1], "?top=1").json
            assert told["operating_point"]["b"] == b
            answers[b] = told["predictions"][0]["answers"][0]
        assert not answers[-30.0]["new"]
        assert answers[30.0]["new"]
        kept = api.load(copied.folder).saved.step_points[-1]
        goal = "novel" if kept.goal != "novel" else "all"
        turned = caller.put("/operating-point", {"goal": goal}).json["operating_point"]
        assert not turned["saved"]
        assert api.load(copied.folder).saved.step_points[-1] == kept  # nothing was saved yet
        saved = caller.put("/operating-point", {"goal": goal, "save": True}).json["operating_point"]
        assert saved["saved"]
        assert api.load(copied.folder).saved.step_points[-1].goal == goal
        refusal = caller.put("/operating-point", {"b": 30.0, "save": True})
        assert "nearest" in error_of(refusal, 422)
        assert caller.get("/operating-point").json["operating_point"]["goal"] == goal  # a refusal changes nothing


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"{}", "either goal or b"),
        (b'{"goal": "avg", "b": 1}', "either goal or b"),
        (b'{"goal": "best"}', "no goal is called 'best'"),
        (b'{"goal": "novel>=7000"}', ""),
        (b'{"goal": 3}', "goal"),
        (b'{"b": "far"}', "b"),
        (b'{"b": true}', "b"),
        (b'{"b": NaN}', "b must be a number"),
        (b'{"b": 1e999}', ""),
        (b'{"b": 1, "sav": true}', "sav"),
        (b"\xff\xfe", "application/json"),
    ],
)
def test_a_turn_that_is_none_is_refused(server: Caller, body: bytes, words: str) -> None:
    before = server.get("/operating-point").json
    reply = server.ask("PUT", "/operating-point", body, Content_Type="application/json")
    assert words in error_of(reply, 422)
    assert server.get("/operating-point").json == before


def test_a_turn_that_is_far_too_long_is_refused(server: Caller) -> None:
    error_of(server.ask("PUT", "/operating-point", b'{"goal": "' + b"x" * 1_000_000), 413)


# Under load.


def test_requests_are_run_together_and_answered_as_if_alone(
    extended: api.Model, val: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    answer = Engine.answer

    def counted(self: Engine, questions: list[Question]) -> list[Result]:
        sizes.append(len(questions))
        return answer(self, questions)

    monkeypatch.setattr(Engine, "answer", counted)
    many = glyph_files(val, 40)
    with running(create_app(extended, limits=Limits(batch=8, linger=0.05))) as caller:
        alone = [caller.predict([file]).json["predictions"][0] for file in many]
        assert sizes == [1] * 40
        sizes.clear()
        with ThreadPoolExecutor(8) as pool:
            together = [reply.json["predictions"][0] for reply in pool.map(lambda f: caller.predict([f]), many)]
    assert sum(sizes) == 40
    assert 1 < max(sizes) <= 8
    for one, other in zip(alone, together, strict=True):
        assert one["file"] == other["file"]
        assert chances(one["answers"]) == pytest.approx(chances(other["answers"]), abs=1e-5)
        assert chances(one["before"]) == pytest.approx(chances(other["before"]), abs=1e-5)


def test_when_too_much_waits_more_is_turned_away_and_the_rest_is_answered(
    extended: api.Model, files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()
    answer = Engine.answer

    def slow(self: Engine, questions: list[Question]) -> list[Result]:
        begun.set()
        gate.wait(60)
        return answer(self, questions)

    monkeypatch.setattr(Engine, "answer", slow)
    limits = Limits(batch=1, waiting=3, requests=4)
    with running(create_app(extended, limits=limits)) as caller, ThreadPoolExecutor(8) as pool:
        try:
            held = [pool.submit(caller.predict, files[:1])]
            assert begun.wait(60)
            held.append(pool.submit(caller.predict, files[:2]))
            wait_for(lambda: caller.get("/health").json["queued"] == 2)
            refusal = caller.predict(files[:2])  # two more than may wait
            assert "Try again" in error_of(refusal, 503)
            assert int(refusal.headers["retry-after"]) > 0
            held.append(pool.submit(caller.predict, files[:1]))
            wait_for(lambda: caller.get("/health").json["queued"] == 3)
            error_of(caller.predict(files[:1]), 503)
            start = time.monotonic()
            assert caller.get("/model").status == 200  # the model is busy, the server is not
            assert time.monotonic() - start < 5
        finally:
            gate.set()
        assert [each.result(20).status for each in held] == [200, 200, 200]
        assert caller.predict(files[:1]).status == 200


def test_a_model_that_fails_at_a_picture_says_so_and_goes_on(
    extended: api.Model, files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Engine.answer
    broken = [True]

    def failing(self: Engine, questions: list[Question]) -> list[Result]:
        if broken[0]:
            raise RuntimeError("out of memory")
        return answer(self, questions)

    monkeypatch.setattr(Engine, "answer", failing)
    app = create_app(extended)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        reply = client.post("/predict", files=[("files", files[0])])
        assert reply.status_code == 500
        assert "RuntimeError" in reply.json()["error"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        broken[0] = False
        assert client.post("/predict", files=[("files", files[0])]).status_code == 200


def test_every_answer_belongs_to_the_one_point_it_names(copied: api.Model, files: list[File]) -> None:
    positions = [-6.0, -1.0, 0.5, 2.0, 8.0]
    with running(create_app(copied, limits=Limits(batch=4))) as caller:
        expected = {}
        for b in positions:
            caller.put("/operating-point", {"b": b})
            told = caller.predict(files).json["predictions"]
            expected[b] = [chances(each["answers"]) for each in told]
        assert len({json.dumps(each) for each in expected.values()}) == len(positions)
        done = threading.Event()

        def turn() -> int:
            turns = 0
            while not done.is_set():
                assert caller.put("/operating-point", {"b": positions[turns % len(positions)]}).status == 200
                turns += 1
            return turns

        with ThreadPoolExecutor(8) as pool:
            turning = [pool.submit(turn) for _ in range(2)]
            try:
                replies = list(pool.map(lambda _: caller.predict(files), range(40)))
            finally:
                done.set()
            assert all(each.result(20) > 3 for each in turning)
    seen = set()
    for reply in replies:
        assert reply.status == 200
        b = reply.json["operating_point"]["b"]
        seen.add(b)
        for told, chance in zip(reply.json["predictions"], expected[b], strict=True):
            assert chances(told["answers"]) == pytest.approx(chance, abs=1e-5)
    assert len(seen) > 1


# Large images and slow clients.


@pytest.fixture(scope="module")
def tight(extended: api.Model) -> Iterator[Caller]:
    """A server with little patience, and limits that small images reach."""
    limits = Limits(
        pixels=1_000_000,
        request_pixels=1_500_000,
        decoding_pixels=1_000_000,
        small_pixels=100_000,
        header_seconds=2,
        body_grace=1.5,
        requests=4,
    )
    with running(create_app(extended, limits=limits)) as caller:
        yield caller


def test_pixels_are_limited_per_image_and_per_request(tight: Caller) -> None:
    large = png(np.zeros((800, 1000), np.uint8))
    assert tight.predict([("a.png", large)]).status == 200
    reply = tight.predict([("a.png", large), ("b.png", large), ("c.png", png(NOISE))])
    assert reply.status == 200
    told = reply.json["predictions"]
    assert ["error" in each for each in told] == [False, True, False]
    assert "1.5 million pixels in one request" in told[1]["error"]
    too_large = png(np.zeros((1000, 1001), np.uint8))
    assert "1,001 × 1,000 pixels; the limit is 1 million" in error_of(tight.predict([("d.png", too_large)]), 413)
    jpeg = png(np.zeros((1000, 1400), np.uint8), kind="JPEG")  # a JPEG may be larger
    assert tight.predict([("e.jpg", jpeg)] * 4).status == 200


def test_small_images_do_not_wait_for_large_ones(
    tight: Caller, files: list[File], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    busy: list[str] = []
    pixels = Engine.pixels

    def slow(self: Engine, source: Any, name: str, limits: Limits) -> Any:
        if name.startswith("large"):
            busy.append(name)
            gate.wait(20)
        return pixels(self, source, name, limits)

    monkeypatch.setattr(Engine, "pixels", slow)
    large = png(np.zeros((800, 1000), np.uint8))
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(tight.predict, [(f"large-{n}.png", large)]) for n in range(3)]
        try:
            wait_for(lambda: busy)
            for file in files:
                assert tight.predict([file]).status == 200
            assert len(busy) == 1  # two of them have more pixels than may be decoded at the same time
        finally:
            gate.set()
        assert [each.result(20).status for each in held] == [200] * 3


def unfinished(port: int, sent: bytes) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=30)
    line.sendall(sent)
    return line


BODY = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\nContent-Length: 5000\r\n\r\nx"


def test_unfinished_bodies_block_nobody_and_are_given_up(extended: api.Model, files: list[File]) -> None:
    with running(create_app(extended, limits=Limits(body_grace=6, requests=4))) as caller:
        lines = [unfinished(caller.port, BODY) for _ in range(20)]  # five times the requests that are answered at once
        start = time.monotonic()
        assert caller.predict(files[:1]).status == 200
        assert time.monotonic() - start < 5  # before any of them is given up
        for line in lines:
            answer = line.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 408 ")
            line.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_headers_must_arrive_in_time(tight: Caller, sent: bytes) -> None:
    start = time.monotonic()
    with unfinished(tight.port, sent) as line:
        assert line.recv(1000) == b""
        assert 1.8 < time.monotonic() - start < 20


def test_headers_must_arrive_in_time_on_a_connection_in_use_too(tight: Caller) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with unfinished(tight.port, request) as line:
        answer = b""
        while not answer.endswith(b"}"):
            answer += line.recv(10_000)
        line.sendall(request[:-10])
        assert line.recv(1000) == b""


# Strangers, headers, pages.


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_strangers_are_refused_before_anything_is_read(
    server: Caller, files: list[File], headers: dict[str, str]
) -> None:
    before = server.get("/operating-point").json
    reply = server.predict(files[:1], **headers)
    error_of(reply, 403)
    assert "access-control-allow-origin" not in reply.headers
    error_of(server.ask("PUT", "/operating-point", b'{"b": 3}', **headers), 403)
    assert server.get("/operating-point").json == before


def test_no_other_origin_is_given_leave(server: Caller) -> None:
    reply = server.ask(
        "OPTIONS",
        "/operating-point",
        Origin="http://evil.example",
        Access_Control_Request_Method="PUT",
    )
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/docs", "/inbox", "/script.js", "/model", "/nowhere", "/predict"])
def test_every_answer_keeps_pages_to_themselves(server: Caller, path: str) -> None:
    headers = server.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers


def test_a_path_that_leads_nowhere_says_where_to_look(server: Caller) -> None:
    assert "/docs" in error_of(server.get("/nowhere"), 404)
    assert "/docs" in error_of(server.get("/../../etc/passwd"), 404)
    assert "/predict?" in error_of(server.get("/predct"), 404)
    assert "GET" in error_of(server.get("/predict"), 405)
    page = server.get("/nowhere", Accept="text/html,*/*")
    assert page.status == 404
    assert b"/nowhere does not exist" in page.body
    assert b'href="/docs"' in page.body


def test_pages_need_nothing_from_elsewhere(server: Caller) -> None:
    pages = {
        "/": "text/html",
        "/docs": "text/html",
        "/inbox": "text/html",
        "/inbox.js": "text/javascript",
        "/script.js": "text/javascript",
        "/serve.js": "text/javascript",
        "/style.css": "text/css",
    }
    for path, kind in pages.items():
        reply = server.get(path, Accept="text/html")
        assert reply.status == (404 if path == "/inbox" else 200)  # this server has none: a page that says so
        assert reply.headers["content-type"].startswith(kind)
        own = f"http://127.0.0.1:{server.port}/".encode()  # in the curl lines
        assert not re.findall(rb"(?:https?:)?//[a-z0-9]", reply.body.replace(own, b"/")), path
        if kind == "text/html":
            assert not re.search(
                rb"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", reply.body
            )  # what the policy forbids


def test_the_documentation_names_every_path(server: Caller) -> None:
    described = server.get("/openapi.json").json
    paths = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert paths == {
        ("/predict", "post"),
        ("/model", "get"),
        ("/classes", "get"),
        ("/operating-point", "get"),
        ("/operating-point", "put"),
        ("/report-data", "get"),
        ("/test-image/{number}", "get"),
        ("/test-image/{number}/prediction", "get"),
        ("/health", "get"),
        ("/progress", "get"),
        ("/progress/events", "get"),
        ("/inbox/state", "get"),
        ("/inbox/photo/{photo}", "get"),
        ("/inbox/decisions", "post"),
        ("/inbox/false-alarms", "put"),
        ("/inbox/runs", "post"),
        ("/inbox/run", "post"),
    }
    page = server.get("/docs").body.decode()
    for path, method in paths:
        assert f"{method.upper()} {path}<" in page
        address = f"http://127.0.0.1:{server.port}{re.sub('{number}', '0', path)}".removesuffix("{photo}")
        assert re.search(rf"curl [^<]*{re.escape(address)}", page), path
    assert "multipart/form-data" in page
    assert "4XX" in page
    not_json = ("/test-image/{number}", "/progress/events", "/inbox/photo/{photo}")
    for path, method in paths - {(each, "get") for each in not_json}:
        responses = described["paths"][path][method]["responses"]
        assert set(responses) == {"200", "4XX", "503"}  # what is answered in fact, not FastAPI's own error format
        assert "$ref" in responses["200"]["content"]["application/json"]["schema"]
    choice = described["components"]["schemas"]["PointChoice"]
    assert set(choice["properties"]) == {"goal", "b", "point", "save"}


def test_health(server: Caller) -> None:
    reply = server.get("/health")
    schema.Health.model_validate(reply.json)
    assert reply.json["status"] == "ok"


def test_health_by_head(server: Caller) -> None:
    reply = server.ask("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


# The token.


def test_with_a_token_every_request_needs_it(extended: api.Model, files: list[File]) -> None:
    with running(create_app(extended, token="a long secret")) as caller:
        for reply in (caller.get("/"), caller.get("/health"), caller.predict(files[:1]), caller.get("/?token=wrong")):
            assert "Authorization: Bearer" in error_of(reply, 401)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "set-cookie" not in reply.headers
        assert caller.predict(files[:1], Authorization="Bearer a long secret").status == 200
        error_of(caller.get("/health", Authorization="Bearer a long secret", Origin="http://evil.example"), 403)


def test_the_login_link_gives_the_page_a_cookie(extended: api.Model, files: list[File]) -> None:
    with running(create_app(extended, token="a long secret")) as caller:
        reply = caller.get("/?token=a%20long%20secret")
        assert (reply.status, reply.headers["location"]) == (303, "/")
        cookie, *attributes = reply.headers["set-cookie"].split("; ")
        assert {"httponly", "samesite=lax", "path=/"} == {each.lower() for each in attributes}
        assert caller.get("/", Cookie=cookie).status == 200
        assert caller.predict(files[:1], Cookie=cookie).status == 200
        error_of(caller.predict(files[:1], Cookie=cookie, Origin="http://evil.example"), 403)
        error_of(caller.get("/model?token=a%20long%20secret"), 401)  # only the page's address logs in


# Watching.


def test_nothing_is_watched_unless_asked(server: Caller) -> None:
    told = server.get("/progress").json
    schema.Progress.model_validate(told)
    assert told["state"] == "none"
    assert "--watch" in error_of(server.get("/progress/events"), 404)


def follow(caller: Caller, seen: list[dict[str, Any]]) -> str:
    """Read the stream of progress to its end, each event as it comes; its content type."""
    connection = HTTPConnection("127.0.0.1", caller.port, timeout=60)
    connection.request("GET", "/progress/events")
    reply = connection.getresponse()
    seen.extend(json.loads(line[6:]) for line in reply if line.startswith(b"data: "))
    connection.close()
    return str(reply.headers["content-type"])


def test_a_model_in_the_making_is_watched_and_then_served(
    extended: api.Model, files: list[File], tmp_path: Path
) -> None:
    import os
    import platform

    out = tmp_path / "v2"
    work = api.work_folder(out)
    works: list[dict[str, Any]] = []

    def note() -> None:
        about = {"state": "running", "pid": os.getpid(), "host": platform.node(), "started": 1.0, "updated": 2.0}
        partial = work / "partial"
        partial.write_text(json.dumps({**about, "works": works}), encoding="utf-8")
        partial.replace(work / "progress.json")

    with running(create_app(None, watch=out)) as caller:
        assert caller.get("/progress").json["state"] == "waiting"
        work.mkdir()
        note()
        refusal = caller.predict(files[:1])
        assert "still being made" in error_of(refusal, 503)
        assert "retry-after" in refusal.headers
        error_of(caller.get("/model"), 503)
        assert caller.get("/health").status == 503
        assert caller.get("/health").json["status"] == "waiting"
        with ThreadPoolExecutor(1) as pool:
            seen: list[dict[str, Any]] = []
            stream = pool.submit(follow, caller, seen)
            for done in (1, 2):
                works[:] = [
                    {"work": "branch", "done": done, "total": 2, "figures": {"loss": float("nan")}, "since": 1.0}
                ]
                note()
                told = caller.get("/progress").json
                schema.Progress.model_validate(told)
                assert told["works"][0]["done"] == done
                assert told["works"][0]["figures"] == {"loss": None}  # JSON has no word for it
                wait_for(lambda done=done: any(work["done"] == done for event in seen for work in event["works"]))
            shutil.copytree(extended.folder, tmp_path / "copy")
            (tmp_path / "copy").rename(out)
            shutil.rmtree(work)
            assert stream.result(60).startswith("text/event-stream")
        assert seen[-1]["state"] == "finished"
        wait_for(lambda: caller.get("/health").status == 200)
        assert caller.predict(files[:1]).status == 200


def test_a_model_that_was_made_but_cannot_be_opened_is_told(extended: api.Model, tmp_path: Path) -> None:
    out = tmp_path / "v2"
    shutil.copytree(extended.folder, out)
    (out / "base.safetensors").write_bytes(b"broken")
    with running(create_app(None, watch=out)) as caller:
        wait_for(lambda: caller.get("/health").json["status"] == "failed")
        assert "base.safetensors" in error_of(caller.get("/model"), 503)
