"""Which photos fit no class, by the threshold of known images, and which look alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from inbox_case import UNKNOWN, make, write
from PIL.Image import Image

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.inbox.analysis import Analyzer
from branchout.inbox.folder import Inbox
from branchout.inbox.groups import listed


def test_photos_above_the_threshold_are_grouped_and_the_others_fit(
    base: api.Model, train: Samples, val: Samples, tmp_path: Path
) -> None:
    case = make(tmp_path, base, train)
    write(val, "ampersand", 4, case.photos, "k-")
    inbox = Inbox(case.photos)
    found = Analyzer.of(base, val.of_classes(base.classes)).analyze(inbox, inbox.photos())
    grouped = [photo for members in found.groups for photo in members]
    above = [each.photo for each in found.photos if each.score > found.threshold]
    assert sorted(grouped) == sorted(above)
    assert len(found.photos) == 14
    assert {each.photo for each in found.fitting} == {each.photo for each in found.photos} - set(above)
    assert [each.score for each in found.fitting] == sorted((each.score for each in found.fitting), reverse=True)
    assert [len(members) for members in found.groups] == sorted(map(len, found.groups), reverse=True)
    assert found.known_images == len(val.of_classes(base.classes))
    found.save(inbox)
    assert listed(inbox) == found
    inbox.set_false_alarms(0.5)
    more = Analyzer.of(base, val.of_classes(base.classes)).analyze(inbox, inbox.photos())
    assert (found.false_alarms, more.false_alarms) == (0.1, 0.5)
    assert more.threshold < found.threshold
    assert set(grouped) <= {photo for members in more.groups for photo in members}


def test_only_new_photos_are_computed(
    base: api.Model, train: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(make(tmp_path, base, train).photos)
    analyzer = Analyzer.of(base, None, limit=-100.0)
    first = analyzer.analyze(inbox, inbox.photos())
    assert sum(map(len, first.groups)) == 10
    assert first.known_images == 0
    decoded = []
    from branchout.inbox import analysis

    real = analysis.decode_picture

    def noted(path: Path, **how: int) -> Image:
        decoded.append(path.name)
        return real(path, **how)

    monkeypatch.setattr(analysis, "decode_picture", noted)
    write(train, "question mark", 1, inbox.folder, "c-")
    (inbox.folder / "broken.png").write_bytes((inbox.folder / "a-0.png").read_bytes()[:80])
    (inbox.folder / "copy.png").write_bytes((inbox.folder / "broken.png").read_bytes())
    (inbox.folder / "empty.jpg").touch()
    second = analyzer.analyze(inbox, inbox.photos())
    assert decoded == ["broken.png", "c-0.png"]
    assert len(second.photos) == 11
    assert list(second.unreadable) == ["broken.png", "copy.png", "empty.jpg"]
    assert [each.score for each in second.photos[:10]] == [each.score for each in first.photos]


def test_an_empty_inbox_has_no_groups(base: api.Model, tmp_path: Path) -> None:
    found = Analyzer.of(base, None, limit=0.0).analyze(Inbox(tmp_path), [])
    assert (found.photos, found.groups) == ([], [])


def test_without_known_images_a_threshold_is_asked_for(base: api.Model) -> None:
    with pytest.raises(BranchoutError, match="--memory"):
        Analyzer.of(base, None)


def test_unlisted_groups_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match="branchout inbox"):
        listed(Inbox(tmp_path))


def test_the_classes_of_the_case_are_unknown(base: api.Model) -> None:
    assert not set(UNKNOWN) & set(base.classes)
