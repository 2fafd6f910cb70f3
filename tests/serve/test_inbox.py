"""The inbox over HTTP: what is decided is on disk, other sites are refused, names never become paths."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inbox_case import UNKNOWN, Case, make
from serving import Caller, Reply, png, running, wait_for

from branchout import api
from branchout.data.samples import Samples
from branchout.files import write_json
from branchout.inbox import runs
from branchout.inbox.folder import Inbox
from branchout.inbox.teach import execute
from branchout.serve.app import create_app
from branchout.serve.inbox import InboxSettings, RunAction, ServedInbox, router
from branchout.serve.limits import Refused
from branchout.serve.service import Service


@pytest.fixture
def case(base: api.Model, train: Samples, tmp_path: Path) -> Case:
    made = make(tmp_path, base, train)
    return made._replace(model=shutil.copytree(made.model, tmp_path / "v1"))


@pytest.fixture
def server(case: Case) -> Iterator[Caller]:
    settings = InboxSettings(case.photos, case.old, threshold=-100.0, epochs=1)
    with running(create_app(api.load(case.model), inbox=settings)) as caller:
        wait_for(lambda: caller.get("/inbox/state").json["state"] == "ready", 60)
        yield caller


@pytest.fixture(scope="module")
def idle(base: api.Model, train: Samples, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Caller, Case]]:
    """One server for all requests that change nothing."""
    case = make(tmp_path_factory.mktemp("idle"), base, train)
    settings = InboxSettings(case.photos, case.old, threshold=-100.0)
    with running(create_app(base, inbox=settings, model_path=str(case.root / "v1"))) as caller:
        wait_for(lambda: caller.get("/inbox/state").json["state"] == "ready", 60)
        yield caller, case


def post(caller: Caller, path: str, content: Any, **headers: str) -> Reply:
    return caller.ask("POST", path, json.dumps(content), Content_Type="application/json", **headers)


def ids(caller: Caller) -> list[str]:
    return [each["photo"] for group in caller.get("/inbox/state").json["groups"] for each in group]


def test_decisions_are_files_and_new_photos_are_seen(server: Caller, case: Case, val: Samples) -> None:
    chosen = ids(server)
    assert len(chosen) == 10
    found = post(server, "/inbox/decisions", {"photos": chosen[:3], "action": "name", "class": "robin"}).json
    assert [(each["class"], each["missing"], each["known"]) for each in found["decided"]] == [("robin", 0, False)]
    found = post(server, "/inbox/decisions", {"photos": chosen[3:4], "action": "dismiss"}).json
    assert [each["photo"] for each in found["dismissed"]] == chosen[3:4]
    on_disk = Inbox(case.photos).decisions()
    assert {photo: on_disk[photo].name for photo in chosen[:4]} == {
        **dict.fromkeys(chosen[:3], "robin"),
        chosen[3]: None,
    }
    post(server, "/inbox/decisions", {"photos": chosen[:4], "action": "undo"})
    assert Inbox(case.photos).decisions() == {}
    (case.photos / "later.png").write_bytes(png(val.read(0)))
    wait_for(lambda: len(ids(server)) == 11)
    picture = server.get(f"/inbox/photo/{chosen[0]}")
    assert (picture.status, picture.headers["content-type"]) == (200, "image/png")


def test_other_sites_may_neither_decide_nor_teach(idle: tuple[Caller, Case]) -> None:
    server, case = idle
    chosen = {"photos": ids(server)[:3], "action": "name", "class": "robin"}
    requests = {"/inbox/decisions": chosen, "/inbox/runs": {}, "/inbox/run": {"action": "discard"}}
    for path, content in requests.items():
        assert post(server, path, content, Origin="http://evil.example").status == 403
        assert post(server, path, content, Sec_Fetch_Site="cross-site").status == 403
        assert post(server, path, content, Host="evil.example").status == 403
    assert not (case.photos / ".inbox" / "decisions").exists()
    assert not (case.photos / ".inbox" / "runs").exists()


def test_with_a_token_nothing_of_the_inbox_is_shown_without_it(case: Case) -> None:
    settings = InboxSettings(case.photos, None, threshold=-100.0)
    with running(create_app(api.load(case.model), token="a" * 20, inbox=settings)) as caller:
        for path in ("/inbox", "/inbox.js", "/inbox/state", "/inbox/photo/0123456789abcdef"):
            assert caller.get(path).status == 401
        assert post(caller, "/inbox/runs", {}).status == 401
        assert caller.get("/inbox/state", Authorization=f"Bearer {'a' * 20}").status == 200


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/inbox/decisions", {"photos": ["../../etc/passwd"], "action": "dismiss"}, 422),
        ("/inbox/decisions", {"photos": ["0123456789abcdef"], "action": "dismiss"}, 404),
        ("/inbox/decisions", {"photos": [], "action": "dismiss"}, 422),
        ("/inbox/decisions", {"photos": ["0123456789abcdef"], "action": "delete"}, 422),
        ("/inbox/decisions", {"photos": ["0123456789abcdef"], "action": "name"}, 422),
        ("/inbox/decisions", {"photos": ["0123456789abcdef"], "action": "name", "class": "../up"}, 422),
        ("/inbox/decisions", {"photos": ["0123456789abcdef"] * 600, "action": "dismiss"}, 413),
        ("/inbox/runs", {"out": "../elsewhere"}, 422),
        ("/inbox/runs", {"out": "/tmp/elsewhere"}, 422),
        ("/inbox/runs", {}, 422),
        ("/inbox/run", {"action": "accept"}, 409),
        ("/inbox/run", {"action": "explode"}, 422),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    idle: tuple[Caller, Case], path: str, content: Any, status: int
) -> None:
    server, case = idle
    reply = post(server, path, content)
    assert (reply.status, len(reply.json["error"]) > 10) == (status, True)
    assert sorted(each.name for each in case.root.iterdir()) == ["old", "photos"]
    assert not (case.photos / ".inbox" / "decisions").exists()


def test_a_photo_that_is_not_in_the_inbox_is_not_shown(idle: tuple[Caller, Case]) -> None:
    server, _ = idle
    assert server.get("/inbox/photo/0123456789abcdef").status == 404
    assert server.get("/inbox/photo/..%2f..%2fold").status == 404


def test_a_similar_class_is_asked_about_and_the_last_decision_is_undone_from_the_files(
    server: Caller, case: Case
) -> None:
    first, *others = ids(server)[:4]
    known = api.load(case.model).classes[0]
    asked = {"photos": [first], "action": "name", "class": known.upper()}
    reply = post(server, "/inbox/decisions", asked)
    assert (reply.status, reply.json["similar"]) == (409, known)
    assert known in reply.json["error"]
    assert Inbox(case.photos).decisions() == {}
    assert post(server, "/inbox/decisions", {**asked, "new_class": True}).status == 200
    found = post(server, "/inbox/decisions", {"photos": others, "action": "name", "class": known}).json
    assert (found["last"]["class"], sorted(found["last"]["photos"])) == (known, sorted(others))
    found = post(server, "/inbox/decisions", {"photos": found["last"]["photos"], "action": "undo"}).json
    assert (found["last"]["photos"], found["last"]["class"]) == ([first], known.upper())
    # Another tab decides about the same photo: what this one offered to undo is no longer there.
    post(server, "/inbox/decisions", {"photos": [first], "action": "dismiss"})
    reply = post(server, "/inbox/decisions", {"photos": [first], "action": "undo", "when": found["last"]["when"]})
    assert reply.status == 409
    assert Inbox(case.photos).decisions()[first].name is None


def test_before_teaching_it_is_said_of_which_classes_no_images_are_kept(case: Case) -> None:
    with running(create_app(api.load(case.model), inbox=InboxSettings(case.photos, threshold=0.0))) as caller:
        wait_for(lambda: caller.get("/inbox/state").json["notes"], 60)
        [note] = caller.get("/inbox/state").json["notes"]
    assert "--memory OLD/" in note
    assert f"{len(api.load(case.model).classes)} base classes" in note


def test_the_curl_lines_of_the_documentation_work(server: Caller) -> None:
    page = server.get("/docs").body.decode()
    [photo] = set(re.findall(r"/inbox/photo/([0-9a-f]{16})", page))
    assert server.get(f"/inbox/photo/{photo}").status == 200
    assert f"[&#34;{photo}&#34;]" in page


def test_a_server_without_an_inbox_says_how_to_get_one(base: api.Model) -> None:
    with running(create_app(base)) as caller:
        for accept, found in (("text/html", "--inbox PHOTOS/"), ("*/*", "--inbox PHOTOS/")):
            reply = caller.get("/inbox", Accept=accept)
            assert (reply.status, found in reply.body.decode()) == (404, True)
        assert "<h1>" in caller.get("/inbox", Accept="text/html").body.decode()
        reply = caller.get("/inbox/state")
        assert reply.status == 404
        assert "--inbox" in reply.json["error"]


def test_a_model_that_goes_live_answers_at_once(
    server: Caller, case: Case, val: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, info, meanwhile, asked = Service.replace, ServedInbox.info, [], threading.Event()

    def replace_while_asked(service: Service, model: api.Model) -> None:
        asked.clear()
        meanwhile.append(pool.submit(lambda: server.get("/inbox/state").json))
        assert asked.wait(20)
        time.sleep(0.3)  # an answer that waits for nothing would be given now
        replace(service, model)

    def info_when_asked(inbox: ServedInbox) -> object:
        asked.set()
        return info(inbox)

    monkeypatch.setattr(ServedInbox, "info", info_when_asked)
    monkeypatch.setattr(Service, "replace", replace_while_asked)
    inbox = Inbox(case.photos)
    for name in UNKNOWN:
        inbox.decide([photo for photo in inbox.photos() if case.truth[photo.file] == name], name)
    run = runs.plan(inbox, str(case.model), case.root / "v2", case.old, 1)
    assert server.get("/inbox/state").json["run"]["state"] == "stopped"
    execute(run)
    before = server.get("/model").json
    assert post(server, "/inbox/runs", {}).status == 409
    with ThreadPoolExecutor(1) as pool:
        found = post(server, "/inbox/run", {"action": "accept"}).json
    for each in (found, meanwhile[0].result()):  # never the closed run beside the earlier model
        assert (each["run"], each["model"], each["next"], each["taught"]) == (None, "v2", "v3", 10)
    after = server.get("/model").json
    assert len(after["classes"]) == len(before["classes"]) + 2
    picture = ("a.png", png(val.read(int(np.flatnonzero(val.names == "infinity")[0]))))
    reply = server.predict([picture], "?top=10")
    assert {each["class"] for each in reply.json["predictions"][0]["answers"]} >= set(UNKNOWN)
    assert server.get("/report-data").status == 200
    wait_for(lambda: server.get("/inbox/state").json["groups"] == [])


def test_after_a_restart_with_the_earlier_model_taught_photos_can_be_taught_again(case: Case) -> None:
    inbox = Inbox(case.photos)
    taken = inbox.photos()[:3]
    inbox.decide(taken, "robin")
    run = runs.plan(inbox, str(case.model), case.root / "v2", None, 1)
    run.out.mkdir()
    write_json(run.folder / "run.json", {**run.settings.model_dump(), "decision": "live"})
    settings = InboxSettings(case.photos, threshold=-100.0)
    with running(create_app(api.load(case.model), inbox=settings, model_path=str(case.model))) as caller:
        wait_for(lambda: caller.get("/inbox/state").json["state"] == "ready", 60)
        found = caller.get("/inbox/state").json
        assert (found["taught"], found["next"]) == (0, "v3")
        assert [(each["class"], len(each["photos"])) for each in found["decided"]] == [("robin", 3)]
        again = {"photos": [taken[0].id], "action": "undo"}
        assert post(caller, "/inbox/decisions", again).status == 200
        assert len(ids(caller)) == 8


def test_a_larger_share_of_false_alarms_lists_more_photos_and_is_kept(case: Case) -> None:
    with running(create_app(api.load(case.model), inbox=InboxSettings(case.photos, case.old))) as caller:
        wait_for(lambda: caller.get("/inbox/state").json["state"] == "ready", 60)
        first = caller.get("/inbox/state").json
        assert (first["false_alarms"], first["known_images"]) == (0.1, 40)
        wanted = json.dumps({"share": 0.9})
        assert caller.ask("PUT", "/inbox/false-alarms", wanted, Content_Type="application/json").status == 200
        wait_for(lambda: caller.get("/inbox/state").json["false_alarms"] == 0.9)
        second = caller.get("/inbox/state").json
        assert second["threshold"] < first["threshold"]
        assert sum(map(len, second["groups"])) >= sum(map(len, first["groups"]))
        assert caller.ask("PUT", "/inbox/false-alarms", '{"share": 2}', Content_Type="application/json").status == 422
    assert Inbox(case.photos).false_alarms == 0.9


def test_a_run_can_be_stopped_while_its_process_starts(server: Caller, case: Case) -> None:
    taken = ids(server)[:3]
    post(server, "/inbox/decisions", {"photos": taken, "action": "name", "class": "robin"})
    assert post(server, "/inbox/runs", {}).json["run"]["state"] == "running"
    assert post(server, "/inbox/run", {"action": "discard"}).status == 409
    assert post(server, "/inbox/run", {"action": "resume"}).status == 409
    assert post(server, "/inbox/run", {"action": "stop"}).status == 200
    wait_for(lambda: server.get("/inbox/state").json["run"]["state"] != "running", 30)
    assert server.get("/inbox/state").json["run"]["state"] == "stopped"
    correction = {"photos": taken[:1], "action": "name", "class": "wren"}
    assert post(server, "/inbox/decisions", correction).status == 422  # the run has a copy as a robin
    assert post(server, "/inbox/run", {"action": "discard"}).json["run"] is None
    assert post(server, "/inbox/decisions", correction).status == 200
    assert sorted(each.name for each in case.root.iterdir()) == ["old", "photos", "v1"]


def test_a_dismissed_photo_that_was_deleted_is_not_shown(server: Caller, case: Case) -> None:
    chosen = ids(server)[:1]
    found = post(server, "/inbox/decisions", {"photos": chosen, "action": "dismiss"}).json["dismissed"]
    assert [each["photo"] for each in found] == chosen
    (case.photos / found[0]["file"]).unlink()
    assert server.get("/inbox/state").json["dismissed"] == []


def test_what_is_said_of_a_wrong_body_is_about_the_inbox(idle: tuple[Caller, Case]) -> None:
    server, _ = idle
    reply = server.ask("POST", "/inbox/run", "no json", Content_Type="application/json")
    assert reply.status == 422
    assert "application/json" in reply.json["error"]
    assert "goal" not in reply.json["error"]


def test_a_question_for_the_earlier_model_is_not_put_to_the_new_one(base: api.Model, extended: api.Model) -> None:
    import asyncio

    import torch

    from branchout.serve.engine import Question

    app = create_app(base)
    service = app.state.service
    service.start()
    point = service.engine.points.current
    service.replace(extended)
    with pytest.raises(Refused, match="again"):
        asyncio.run(service.ask([Question(torch.zeros(1, 32, 32, dtype=torch.uint8), 5, False, point)]))
    service.stop()


def test_every_action_of_the_page_is_one_of_the_api() -> None:
    from branchout.report.page import static_file

    script = static_file("inbox.js")
    assert all(f'"{action}"' in script for action in RunAction.model_fields["action"].annotation.__args__)
    assert {route.path for route in router.routes} == {
        "/inbox/state", "/inbox/photo/{photo}", "/inbox/decisions", "/inbox/runs", "/inbox/run",
        "/inbox/false-alarms",
    }  # fmt: skip
