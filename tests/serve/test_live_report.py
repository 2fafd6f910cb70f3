"""The report over HTTP: what the page reads, when it changes, and points by their number."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browsing import with_fixed_dial
from PIL import Image
from serving import Caller, File, glyph_files, running, wait_for

from branchout import api
from branchout.data.samples import Samples
from branchout.report.labelled_results import THUMBNAILS
from branchout.report.page import parts
from branchout.serve import schema
from branchout.serve.app import create_app
from branchout.training.loop import Event


@pytest.fixture(scope="module")
def tested(extended: api.Model, val: Samples) -> Samples:
    return val.of_classes(extended.classes)


@pytest.fixture
def copied(extended: api.Model, tested: Samples, tmp_path: Path) -> api.Model:
    return with_fixed_dial(extended, tested, tmp_path / "v2")


@pytest.fixture
def server(copied: api.Model, tested: Samples) -> Iterator[Caller]:
    with running(create_app(copied, test=tested)) as caller:
        yield caller


@pytest.fixture
def file(tested: Samples) -> File:
    return glyph_files(tested, 1)[0]


def is_read(caller: Caller) -> None:
    wait_for(lambda: caller.get("/report-data?brief=true").json["state"] == "ready")


def test_nested_folders_of_labelled_images_are_read_as_asked(
    copied: api.Model, tested: Samples, tmp_path: Path
) -> None:
    for name in tested.classes[:2]:
        place = tmp_path / "test" / "signs" / name
        place.mkdir(parents=True)
        for row in np.flatnonzero(tested.names == name)[:3].tolist():
            Image.fromarray(tested.read(row)[:, :, 0]).save(place / f"{row}.png")
    with running(create_app(copied, test=tmp_path / "test")) as caller:
        wait_for(lambda: caller.get("/report-data?brief=true").json["state"] == "failed")
        assert "--classes-from leaves" in caller.get("/report-data?brief=true").json["error"]
    with running(create_app(copied, test=tmp_path / "test", classes_from="leaves")) as caller:
        is_read(caller)
        assert len(caller.get("/report-data").json["data"]["labels"]) == 6


def test_it_is_the_report_of_python(server: Caller, copied: api.Model, tested: Samples) -> None:
    is_read(server)
    told = server.get("/report-data").json
    schema.ReportData.model_validate(told)
    facts = copied.report_data(tested)
    expected = json.loads(json.dumps(parts(replace(facts, command=f"branchout serve {copied.folder} TEST/"))))
    assert {key: told[key] for key in expected} == expected
    assert told["data"]["labels"] == facts.test.labels
    assert told["current"] == facts.points.saved


def test_without_images_it_says_so_and_how_to_serve_some(copied: api.Model) -> None:
    with running(create_app(copied)) as caller:
        told = caller.get("/report-data").json
        assert told["state"] == "none"
        assert "Accuracy per class" not in told["sections"]
        assert f"branchout serve {copied.folder} TEST/" in told["figures"]
        assert caller.get("/test-image/0").status == 404


def test_progress_of_reading_is_reported(copied: api.Model, tested: Samples) -> None:
    seen: list[Event] = []
    with running(create_app(copied, test=tested, on_progress=seen.append)) as caller:
        is_read(caller)
    assert (seen[-1].work, seen[-1].done) == (THUMBNAILS, seen[-1].total)
    assert sum(event.work == THUMBNAILS and event.done == event.total for event in seen) == 1


def test_the_end_of_reading_is_reported_where_no_image_is_shown(base: api.Model, val: Samples) -> None:
    seen: list[Event] = []
    with running(create_app(base, test=val.of_classes(base.classes), on_progress=seen.append)) as caller:
        is_read(caller)
    assert (seen[-1].work, seen[-1].done) == (THUMBNAILS, seen[-1].total)


def test_a_model_that_is_awaited_is_loaded_on_the_wanted_device(
    copied: api.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str | None] = []

    def load(name: Path, *, device: str | None = None) -> api.Model:
        devices.append(device)
        return copied

    monkeypatch.setattr("branchout.serve.service.api.load", load)
    assert copied.folder is not None
    with running(create_app(None, watch=copied.folder, device="cpu")) as caller:
        wait_for(lambda: caller.get("/health").status == 200)
    assert devices == ["cpu"]


def test_images_that_cannot_be_used_are_told_and_the_rest_goes_on(
    copied: api.Model, file: File, tmp_path: Path
) -> None:
    (tmp_path / "TEST" / "kiwi").mkdir(parents=True)
    Image.new("L", (32, 32)).save(tmp_path / "TEST" / "kiwi" / "one.png")
    with running(create_app(copied, test=tmp_path / "TEST")) as caller:
        wait_for(lambda: caller.get("/report-data?brief=true").json["state"] == "failed")
        assert "does not know 1 of these classes: kiwi" in caller.get("/report-data").json["error"]
        assert caller.predict([file]).status == 200


def test_small_copies_are_pictures(server: Caller, tested: Samples) -> None:
    is_read(server)
    for number in (0, len(tested) - 1):
        reply = server.get(f"/test-image/{number}")
        assert reply.status == 200
        assert reply.headers["content-type"] == "image/png"
        assert (np.asarray(Image.open(io.BytesIO(reply.body))) == tested.read(number)[:, :, 0]).all()
    for number in (len(tested), -1):
        assert "does not exist" in server.get(f"/test-image/{number}").json["error"]
    assert server.get("/test-image/first").status == 422


def test_a_request_may_name_its_own_point(server: Caller, copied: api.Model, file: File) -> None:
    before = server.get("/operating-point").json
    for number in (0, len(copied.frontier) - 1):
        told = server.predict([file], f"?point={number}").json
        assert told["operating_point"]["point"] == number
        assert server.get("/operating-point").json == before  # nobody else is moved
        turned = server.put("/operating-point", {"b": float(copied.frontier.settings[number, 0])})
        assert turned.json["operating_point"]["point"] == number
        assert server.predict([file]).json["predictions"] == told["predictions"]
        server.put("/operating-point", {"goal": before["operating_point"]["goal"]})
    for number in (len(copied.frontier), -1):
        assert "points 0 to" in server.predict([file], f"?point={number}").json["error"]


def test_a_saved_point_has_a_goal_that_leads_there_and_the_report_follows(server: Caller, copied: api.Model) -> None:
    is_read(server)
    assert copied.folder is not None
    for number in range(len(copied.frontier)):
        reply = server.put("/operating-point", {"point": number, "save": True})
        assert reply.status == 200
        kept = api.load(copied.folder)
        assert kept.saved.step_points[-1].point == number
        told = server.get("/report-data").json
        assert told["data"]["numbers"][told["data"]["saved"]] == number
        assert told["current"] == told["data"]["saved"]
        goal = reply.json["operating_point"]["goal"]
        if "b=" in goal:
            assert told["data"]["tune"][told["data"]["saved"]] is None
        else:
            assert kept.frontier.choose(goal) == number


def test_the_report_follows_a_choice_made_outside(server: Caller, copied: api.Model) -> None:
    assert copied.folder is not None
    before = server.get("/operating-point").json["operating_point"]
    assert before["saved"]
    other = next(goal for goal in ("novel", "all") if copied.frontier.choose(goal) != before["point"])
    api.load(copied.folder).tune(other)
    told = server.get("/report-data").json
    assert told["data"]["numbers"][told["data"]["saved"]] == told["saved_point"] == copied.frontier.choose(other)
    assert not server.get("/operating-point").json["operating_point"]["saved"]
    turned = server.put("/operating-point", {"goal": other}).json["operating_point"]
    assert turned["saved"]


def test_a_base_model_is_told_too(base: api.Model, val: Samples) -> None:
    with running(create_app(base, test=val.of_classes(base.classes))) as caller:
        is_read(caller)
        told = caller.get("/report-data").json
        assert told["dial"] == ""
        assert told["current"] is None
        assert told["data"]["before"] is None
        right = np.array(told["data"]["answers"]["first"]) == told["data"]["labels"]
        assert right.mean() == pytest.approx(base.evaluate(val.of_classes(base.classes)).after.all)
