"""Each half is measured at the point that the other half chooses."""

import pytest
from helpers import scores

from branchout.evaluate.two_fold import score_dial
from branchout.labels import LabelSpace
from branchout.method.dial import dial_frontier, predict, step_offsets
from branchout.metrics import accuracies


def test_two_fold_scores_swap_the_halves() -> None:
    space = LabelSpace.of("abc", "de")
    dev, test = scores(space, 1), scores(space, 2)
    forward, back = (score_dial(*halves, space, ["avg"])["avg"] for halves in ((dev, test), (test, dev)))
    assert forward.two_fold == pytest.approx((forward.test.avg + back.test.avg) / 2)
    assert forward.spread == pytest.approx(abs(forward.test.avg - back.test.avg) / 2)
    curve = dial_frontier(*dev, space)
    assert forward.setting == (curve.settings[curve.choose("avg"), 0],)
    assert forward.offsets == ()


def test_what_was_chosen_gives_the_answers_that_were_measured() -> None:
    space = LabelSpace.of("abcd", "ef", "gh")
    dev, test = scores(space, 1), scores(space, 2)
    for goal, found in score_dial(dev, test, space, ["all", "avg"]).items():
        assert found.offsets == tuple(step_offsets(*dev, space)), goal
        answers = predict(test[0], space, [offset + found.setting[0] for offset in found.offsets])
        assert accuracies(answers, test[1], space) == found.test
