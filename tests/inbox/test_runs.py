"""Runs: what is taught, what is kept when a process is killed, and what becomes of the new model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import BASE, start
from inbox_case import UNKNOWN, Case, make, write

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.files import read_json, write_json
from branchout.inbox import runs, teach
from branchout.inbox.folder import Inbox
from branchout.inbox.teach import execute
from branchout.training.work_folder import work_folder


@pytest.fixture
def case(base: api.Model, train: Samples, tmp_path: Path) -> Case:
    return make(tmp_path, base, train)


def named(case: Case) -> Inbox:
    inbox = Inbox(case.photos)
    for name in UNKNOWN:
        inbox.decide([photo for photo in inbox.photos() if case.truth[photo.file] == name], name)
    return inbox


def planned(case: Case, inbox: Inbox, out: str = "v2", epochs: int = 8) -> runs.Run:
    return runs.plan(inbox, str(case.model), case.root / out, case.old, epochs)


def test_from_ten_photos_to_a_model_and_on_to_the_next(case: Case, train: Samples) -> None:
    inbox = named(case)
    run = planned(case, inbox)
    assert run.state() == "stopped"
    assert run.settings.classes == dict.fromkeys(UNKNOWN, 5)
    with pytest.raises(BranchoutError, match="not finished"):
        runs.accept(run)
    result = execute(run)
    assert run.state() == "finished"
    assert result == runs.open_run(inbox).result
    assert (result.photos, result.images > 0) == (10, True)
    assert set(UNKNOWN) < set(api.load(run.out).classes)
    run = runs.accept(run)
    assert run.state() == "live"
    assert runs.taught(inbox) == {photo.id for photo in inbox.photos()}
    assert runs.live_model(inbox) == str(run.out)
    assert runs.ready(inbox) == ({}, {})

    # The next run: its exemplars include the photos of the first.
    write(train, "question mark", 3, case.photos, "c-")
    inbox.decide([photo for photo in inbox.photos() if photo.file.startswith("c-")], "question mark")
    second = runs.plan(inbox, str(run.out), case.root / "v3", case.old, 2)
    assert second.settings.classes == {"question mark": 3}
    model = api.load(run.out)
    kept = teach.kept_images(model, str(case.old), None, inbox.state / "runs")
    assert teach.memory_notes(model, kept, str(case.old)) == []
    told = teach.memory_notes(model, api.samples_in(case.old), str(case.old))
    assert all(word in told[0] for word in ("2 classes", *UNKNOWN, f"{case.old}/{UNKNOWN[0]}"))
    told = teach.memory_notes(model, None, None)
    assert ["--memory OLD/" in line for line in told] == [True, True]
    result = execute(second)
    assert not [line for line in result.warnings if "may be forgotten" in line]
    # Before → after counts the base classes, those of the first run, and the new one.
    base, first, new = result.parts
    assert (base.title, base.images, new.before) == ("base classes", len(BASE), None)
    assert (first.title, first.images) == (f"step 1: {', '.join(UNKNOWN)}", 2)
    assert first.before is not None
    history = api.load(second.out).saved.history
    assert history[-1]["exemplars kept"] > 4 * 8 + 2 * 3  # a fifth of each class is held out


def test_old_classes_that_got_worse_are_said_to(case: Case) -> None:
    def result(*parts: tuple[str, int, int | None, int]) -> runs.Result:
        made = [runs.Part(title=t, images=n, before=b, after=a) for t, n, b, a in parts]
        return runs.Result(images=0, before={}, after={}, photos=3, photos_right=3, warnings=[], parts=made)

    new = ("new classes: owl", 2, None, 2)
    said = result(("base classes", 100, 90, 91), ("step 1: robin", 10, 9, 2), new).verdict()
    assert "got worse" in said
    assert "step 1: robin: 9 → 2 of 10" in said
    assert "base" not in said
    assert "chance" not in said
    assert "chance" in result(("base classes", 100, 90, 89), new).verdict()
    said = result(("base classes", 100, 90, 90), new).verdict()
    assert "did not get worse" in said
    assert "not measured" not in said
    assert "base classes were not measured" in result(("step 1: robin", 10, 9, 9), new).verdict()
    assert "not measured" in result(new).verdict()


def test_images_of_a_test_folder_compare_both_models(case: Case, val: Samples) -> None:
    for name in BASE[:3]:
        write(val, name, 4, case.root / "test" / name)
    inbox = named(case)
    run = runs.plan(inbox, str(case.model), case.root / "v2", case.old, 1, test=case.root / "test")
    base, new = execute(run).parts
    assert (base.on, new.on) == ("test", "held-out")
    assert (base.images, new.images, new.before) == (12, 2, None)
    found = api.load(run.out).evaluate(case.root / "test")
    assert base.before == (found.before_answers == found.labels).sum()
    assert base.after == (found.answers == found.labels).sum()


def test_a_wrong_test_folder_is_found_before_training_and_can_be_corrected(case: Case, val: Samples) -> None:
    def planned_with(test: str | None) -> runs.Run:
        place = None if test is None else case.root / test
        return runs.plan(inbox, str(case.model), case.root / "v2", case.old, 1, test=place)

    inbox = named(case)
    write(val, UNKNOWN[0], 2, case.root / "others" / UNKNOWN[0])
    write(val, BASE[0], 2, case.root / "test" / BASE[0])
    for wrong, said in (("tets", "tets"), ("others", f"{len(BASE)} classes.* {UNKNOWN[0]}")):
        run = planned_with(wrong)
        with pytest.raises(BranchoutError, match=said):
            execute(run)
        assert run.state() == "failed"
        assert not run.out.exists()
        assert not work_folder(run.out).exists()
    corrected = planned_with("test")
    assert corrected.folder == run.folder
    assert execute(corrected).parts[0].images == 2
    assert runs.open_run(inbox).settings.test == str(case.root / "test")
    assert planned_with(None).settings.test == str(case.root / "test")  # the result is of these images


def test_a_discarded_run_keeps_the_decisions(case: Case) -> None:
    inbox = named(case)
    run = planned(case, inbox, epochs=1)
    execute(run)
    run = runs.discard(run)
    assert run.state() == "discarded"
    assert not run.out.exists()
    assert len(runs.ready(inbox)[0]["infinity"]) == 5
    with pytest.raises(BranchoutError, match="discarded"):
        runs.discard(run)
    assert planned(case, inbox, epochs=1).number == 2


def test_classes_with_few_photos_wait(case: Case) -> None:
    inbox = Inbox(case.photos)
    inbox.decide(inbox.photos()[:2], "infinity")
    with pytest.raises(BranchoutError, match="infinity has 2"):
        planned(case, inbox)
    assert list(runs.ready(inbox)[1]) == ["infinity"]


def test_one_run_at_a_time_and_the_same_command_resumes(case: Case) -> None:
    inbox = named(case)
    run = planned(case, inbox)
    assert planned(case, inbox) == run
    with pytest.raises(BranchoutError, match=r"Run 1 into v2 is stopped\. Resume or discard it"):
        planned(case, inbox, out="other")


def test_a_run_that_fails_says_why_and_can_be_tried_again(case: Case) -> None:
    inbox = named(case)
    run = planned(case, inbox, epochs=1)
    hidden = case.old.rename(case.root / "away")
    with pytest.raises(BranchoutError):
        execute(run)
    assert run.state() == "failed"
    assert "old" in (run.error or "")
    hidden.rename(case.old)
    execute(run)
    assert run.state() == "finished"


def test_a_run_that_fails_in_an_unforeseen_way_says_why_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("out of memory")

    run = planned(case, named(case), epochs=1)
    monkeypatch.setattr(teach, "_extend", full)
    with pytest.raises(RuntimeError):
        execute(run)
    assert (run.state(), run.error) == ("failed", "RuntimeError: out of memory")


def test_a_run_that_was_thrown_away_is_not_executed_by_a_process_that_starts_late(case: Case) -> None:
    run = planned(case, named(case), epochs=1)
    runs.discard(run)
    with pytest.raises(BranchoutError, match="discarded"):
        execute(run)
    assert not run.out.exists()


def test_photos_of_a_run_keep_their_decision(case: Case) -> None:
    inbox = Inbox(case.photos)
    first, *others = inbox.photos()
    inbox.decide(others, "infinity")
    run = planned(case, inbox, epochs=1)
    runs.check_free(inbox, [first])
    with pytest.raises(BranchoutError, match=r"2 of these photos .+ Run 1 into v2 is stopped. Resume or discard it"):
        runs.check_free(inbox, [first, *others[:2]])
    with (
        runs.lock(run.folder / "lock"),
        pytest.raises(BranchoutError, match=r"1 of these photos is .+ Wait until it ends"),
    ):
        runs.check_free(inbox, [first, others[0]])
    write_json(run.folder / "run.json", {**run.settings.model_dump(), "decision": "live"})
    with pytest.raises(BranchoutError, match="2 of these photos were taught already"):
        runs.check_free(inbox, [first, *others[:2]])
    # A model that does not know the class was not taught these photos.
    known = runs.known_classes(str(case.model))
    assert known == set(api.load(case.model).classes)
    assert runs.taught(inbox, known) == set()
    assert runs.taught(inbox, [*known, "infinity"]) == {photo.id for photo in others}
    runs.check_free(inbox, others, known)
    assert len(runs.ready(inbox, known)[0]["infinity"]) == 9
    write_json(run.folder / "run.json", {**run.settings.model_dump(), "decision": "discarded"})
    runs.check_free(inbox, others)


def test_the_work_of_another_command_is_not_taken_over(case: Case) -> None:
    inbox = named(case)
    work = work_folder(case.root / "v2")
    work.mkdir()
    with pytest.raises(BranchoutError, match="another name"):
        planned(case, inbox)
    assert work.is_dir()
    assert runs.runs(inbox) == []


def test_threads_that_look_at_a_run_do_not_take_each_other_for_it(case: Case) -> None:
    run = planned(case, named(case))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: run.state(), range(400))) == {"stopped"}


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 180  # importing torch alone takes long on a busy machine
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_kill_in_the_middle_of_teaching_loses_nothing(case: Case) -> None:
    inbox = named(case)
    before = inbox.decisions()
    run = planned(case, inbox, epochs=300)  # longer than its progress takes to appear
    process = start("inbox", case.photos, "--resume")
    work = work_folder(run.out)
    wait_for(lambda: list(work.glob("*.safetensors")))  # the checkpoint of an epoch
    wait_for(lambda: read_json(work / "progress.json")["works"])  # it is written now and then
    assert run.state() == "running"
    process.kill()
    process.communicate()
    assert run.state() == "stopped"
    assert inbox.decisions() == before
    assert not run.out.exists()
    assert read_json(work / "progress.json")["works"]

    seen: list[int] = []
    first = runs.Run(run.folder, run.settings)
    execute(first, on_progress=lambda event: seen.append(event.done) if "branch" in event.work else None)
    assert seen[0] > 1  # it went on where it was killed
    assert run.state() == "finished"
    assert set(UNKNOWN) < set(api.load(run.out).classes)


def test_a_run_in_the_background_can_be_stopped_and_thrown_away(case: Case) -> None:
    inbox = named(case)
    run = planned(case, inbox, epochs=300)
    process = runs.start(inbox, run)
    assert os.getpgid(process.pid) != os.getpgid(0)  # Ctrl-C of the server does not reach it
    wait_for(lambda: run.state() == "running")
    with pytest.raises(BranchoutError, match="running"):
        runs.discard(run)
    runs.stop(run)
    assert process.wait(30) == -signal.SIGTERM
    assert run.state() == "stopped"
    runs.discard(run)
    assert not work_folder(run.out).exists()


def test_names_for_the_next_model(tmp_path: Path, case: Case) -> None:
    for name, following in (("v2", "v3"), ("birds", "birds-2"), ("v9", "v11")):
        (tmp_path / name).symlink_to(case.model)
        (tmp_path / "v10").mkdir(exist_ok=True)
        assert runs.next_name(str(tmp_path / name)).name == following
    assert runs.next_name("efficientnet_lite0").name == "v2"
