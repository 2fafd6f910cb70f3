"""Answers at every operating point, against asking the model at each of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import BASE, LATER, NEW, exemplars
from hypothesis import given
from hypothesis import strategies as st

from branchout import api
from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.labels import LabelSpace
from branchout.method.dial import predict, prediction_changes
from branchout.method.features import extract
from branchout.method.frontier import Frontier
from branchout.report.answers_by_point import PointValues, answers_by_point, point_order


@pytest.fixture(scope="module")
def gridded(base: api.Model, train: Samples, val: Samples) -> api.Model:
    """The paper's recipe: trained points instead of a dial; one class overlaps."""
    return base.extend(
        train.of_classes([*NEW, BASE[0]]),
        memory=exemplars(train),
        val=val.of_classes([*BASE, *NEW]),
        recipe="paper",
        epochs=2,
    )


@pytest.fixture(scope="module")
def averaged(base: api.Model, train: Samples, val: Samples) -> api.Model:
    return base.extend(
        train.of_classes([*NEW, BASE[0]]),
        memory=exemplars(train),
        val=val.of_classes([*BASE, *NEW]),
        pooler="average",
        epochs=2,
    )


@pytest.fixture(scope="module")
def shifted(extended: api.Model, train: Samples, val: Samples) -> api.Model:
    """Each step has a number of its own beside the dial."""
    return extended.extend(
        train.of_classes(LATER), memory=exemplars(train, [*BASE, *NEW]), val=val, epochs=1, goal="avg"
    )


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=9))
def test_changes_from_point_to_point_give_the_values_at_every_point(rows: list[list[int]]) -> None:
    table = np.array(rows)
    values = PointValues.of(table)
    assert [values.at(point).tolist() for point in range(len(table))] == rows
    assert (np.diff(values.point) >= 0).all()


@pytest.mark.parametrize("pooler", ["max", "average"])
@pytest.mark.parametrize(
    "space",
    [LabelSpace.of("ab", "cd"), LabelSpace.of("abc", "bd", "dae"), LabelSpace.of("abc", "ab")],
    ids=["disjoint", "two steps", "all overlap"],
)
def test_stretches_say_what_is_answered_at_any_b(space: LabelSpace, pooler: str) -> None:
    rng = np.random.default_rng(7)
    columns = rng.normal(size=(40, space.columns))
    turns, answers = prediction_changes(columns, space, pooler)
    finite = np.where(np.isfinite(turns), turns, 1e9)
    assert (np.diff(finite, axis=1) >= 0).all()
    for b in rng.uniform(-6, 6, 50):
        told = answers[np.arange(40), (turns < b).sum(1)]
        assert told.tolist() == predict(columns, space, b, pooler).tolist()


@pytest.mark.parametrize("which", ["extended", "extended_twice", "gridded", "averaged", "shifted"])
def test_every_point_answers_as_the_model_moved_there(which: str, val: Samples, request: pytest.FixtureRequest) -> None:
    model: api.Model = request.getfixturevalue(which)
    samples = val.of_classes(model.classes)
    space = model.classifier.space
    labels = samples.labels_in(space)
    images = open_images(samples, model.classifier.preprocessing, torch.device("cpu"))
    features = extract(model.classifier, images, device=torch.device("cpu"))[0]
    answers, branches = answers_by_point(model.saved, model.saved.model(), features, labels)

    *earlier, last = model.saved.step_points
    order = point_order(Frontier.from_dict(last.frontier)).tolist()
    assert sorted(order) == list(range(len(model.frontier)))
    assert answers.point.max(initial=0) < len(order)
    seen = set()
    for place, point in enumerate(order):
        moved = api.Model(replace(model.saved, step_points=(*earlier, replace(last, point=point))), None)
        found = moved.evaluate(samples)
        assert answers.at(place).tolist() == found.answers.tolist()
        seen.add(tuple(found.answers.tolist()))
        told = branches.at(place)
        biases = [0.0, *replace(last, point=point).biases(len(model.classifier.steps))]
        for image, label in enumerate(labels):
            owners = [d for d, names in enumerate(space.branches) if space.classes[label] in names]
            starts = [space.slice_of(d).start + space.branches[d].index(space.classes[label]) for d in owners]
            scores = [found.columns[image, c] + biases[d] for c, d in zip(starts, owners, strict=True)]
            assert told[image] == owners[int(np.argmax(scores))]
    assert len(seen) > 1 or len(order) == 1


def test_points_go_from_old_classes_to_new_ones(extended: api.Model, gridded: api.Model) -> None:
    for model in (extended, gridded):
        figures = model.frontier.accuracies
        order = point_order(model.frontier)
        assert (np.diff(figures["novel"][order]) >= 0).all()
        assert figures["base"][order][0] >= figures["base"][order][-1]
