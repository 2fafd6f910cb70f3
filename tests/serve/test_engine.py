"""What is told of a picture, against the model asked alone and against slow versions of the same sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import BASE, LATER, NEW, untrained
from PIL import Image
from serving import png

from branchout import api
from branchout.data.decode import UnreadableImage
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.evaluate.compare import logits
from branchout.model.checkpoint import SavedModel, StepPoints
from branchout.serve import schema
from branchout.serve.engine import Engine, Question, Result
from branchout.serve.limits import Limits

CLOSE = {"rel": 1e-4, "abs": 1e-5}


def dial(points: list[float]) -> dict[str, object]:
    figures = {name: [0.5] * len(points) for name in ("all", "base", "novel", "overlap", "avg")}
    return {
        "kind": "dial",
        "settings": [[b] for b in points],
        "figures": figures,
        "images": 10,
        "balanced_by": "mean",
        "measured": "dev",
    }


def two_steps(where: list[str], pooler: str = "max") -> api.Model:
    """A model with random weights, two steps, an overlap, and deltas after both."""
    classifier = untrained(BASE, NEW, [*LATER, BASE[0]], where=where)
    classifier = classifier.rebuilt(classifier.steps, pooler)
    width = classifier.backbone.features
    step_points = []
    for step in (1, 2):
        fused = classifier.rebuilt(classifier.steps[:step]).fused
        torch.manual_seed(step)
        deltas = [
            torch.randn(width * len(sources), len(names)) / width
            for sources, names in zip(fused.delta_inputs, fused.space.branches, strict=True)
        ]
        step_points.append(StepPoints(dial([0.3 * step, -2.0]), [deltas], 0, "all"))
    return api.Model(SavedModel(classifier, tuple(step_points), ({"what": "made"},)), None, torch.device("cpu"))


def asked(engine: Engine, samples: Samples, rows: list[int], **settings: object) -> list[Question]:
    given = {"top": 4, "flip": False, "point": engine.points.current, **settings}
    how = engine.model.classifier.preprocessing
    return [Question(how.prepare(samples.read(row)), **given) for row in rows]


def named(answer: list[dict[str, object]]) -> list[object]:
    return [each["class"] for each in answer]


def chances(answer: list[dict[str, object]]) -> list[object]:
    return [each["probability"] for each in answer]


def alike(one: Result, other: Result) -> None:
    """The same answer, up to what the size of a batch does to the last digits."""
    for part in ("answers", "before"):
        assert chances(one[part]) == pytest.approx(chances(other[part]), **CLOSE)
        assert named(one[part])[0] == named(other[part])[0]
    for mine, theirs in zip(one["branches"], other["branches"], strict=True):
        assert mine["share"] == pytest.approx(theirs["share"], **CLOSE)
        assert chances(mine["top"]) == pytest.approx(chances(theirs["top"]), **CLOSE)


def test_the_answer_is_what_the_model_predicts(extended: api.Model, val: Samples) -> None:
    engine = Engine(extended)
    rows = list(range(0, len(val), 9))
    for told, row in zip(engine.answer(asked(engine, val, rows)), rows, strict=True):
        expected = extended.predict(val.read(row), top=4)
        assert named(told["answers"])[0] == expected[0][0]
        assert chances(told["answers"]) == pytest.approx([p for _, p in expected], **CLOSE)


@pytest.mark.parametrize("where", [["last", "last"], ["fc", "last"], ["last", "fc"], ["fc", "fc"]])
def test_before_is_what_the_model_without_its_last_step_says(where: list[str], val: Samples) -> None:
    model = two_steps(where)
    engine = Engine(model)
    earlier = model.saved.model(1)
    rows = [0, 30, 60]
    told = engine.answer(asked(engine, val, rows))
    images = torch.stack([model.classifier.preprocessing.prepare(val.read(row)) for row in rows])
    expected = logits(earlier, model.classifier.preprocessing.normalise(images)).softmax(1)
    for each, row in zip(told, expected, strict=True):
        assert set(named(each["before"])) <= {*BASE, *NEW}
        assert chances(each["before"]) == pytest.approx(row.topk(4).values.tolist(), **CLOSE)
        assert named(each["before"])[0] == earlier.space.classes[int(row.argmax())]


def test_new_is_what_the_last_step_taught_and_nobody_knew(val: Samples) -> None:
    engine = Engine(two_steps(["last", "last"]))
    (told,) = engine.answer(asked(engine, val, [0], top=100))
    assert {each["class"] for each in told["answers"] if each["new"]} == set(LATER)
    assert len(told["answers"]) == len({*BASE, *NEW, *LATER})


def test_a_base_model_has_nothing_before_and_nothing_new(base: api.Model, val: Samples) -> None:
    engine = Engine(base)
    (told,) = engine.answer(asked(engine, val, [0]))
    assert told["before"] is None
    assert not any(each["new"] for each in told["answers"])
    assert [branch["branch"] for branch in told["branches"]] == ["base"]
    assert told["branches"][0]["share"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("pooler", ["max", "average"])
def test_together_is_as_alone_whatever_is_mixed(pooler: str, val: Samples) -> None:
    engine = Engine(two_steps(["last", "last"], pooler))
    here, there = engine.points.current, engine.points.at(2.5)
    mixed = [
        *asked(engine, val, [0, 9, 18], top=3),
        *asked(engine, val, [27, 36], flip=True),
        *asked(engine, val, [45, 0], point=there, top=2),
        *asked(engine, val, [54], point=there, flip=True),
    ]
    assert here is not there
    mixed = [mixed[n] for n in (5, 0, 3, 7, 1, 6, 4, 2)]
    for question, told in zip(mixed, engine.answer(mixed), strict=True):
        (alone,) = engine.answer([question])
        assert len(told["answers"]) == question.top
        alike(told, alone)


def test_flip_averages_the_logits_of_both_images(val: Samples) -> None:
    model = two_steps(["last", "last"])
    engine = Engine(model)
    (told,) = engine.answer(asked(engine, val, [20], flip=True))
    images = model.classifier.preprocessing.normalise(
        torch.stack([model.classifier.preprocessing.prepare(val.read(20))])
    )
    expected = logits(model.classifier, images, flip=True).softmax(1)[0].topk(4).values
    assert chances(told["answers"]) == pytest.approx(expected.tolist(), **CLOSE)
    (plain,) = engine.answer(asked(engine, val, [20]))
    assert chances(plain["answers"]) != pytest.approx(expected.tolist(), **CLOSE)


def test_an_expected_class_is_compared_at_the_point_that_is_asked(val: Samples) -> None:
    model = two_steps(["last", "last"])
    engine = Engine(model)
    name = model.classes[-1]
    for b in (-30.0, 30.0):
        point = engine.points.at(b)
        (told,) = engine.answer(asked(engine, val, [20], point=point, expect=name))
        why = told["why"]
        schema.WhyNot.model_validate(why)
        assert why["winner"]["class"] == told["answers"][0]["class"]
        assert why["expected"]["class"] == name
        assert why["expected"]["parts"]["dial"] == b
        assert sum(why["expected"]["parts"].values()) == pytest.approx(why["expected"]["logit"], abs=1e-4)
        gap = why["winner"]["logit"] - why["expected"]["logit"]
        assert sum(why["lead"].values()) == pytest.approx(gap, abs=1e-4)
    with pytest.raises(BranchoutError, match=f"no class.*did you mean {name}"):
        engine.check(flip=False, expect=f"{name}x")


def test_turning_the_dial_up_moves_credit_to_the_new_branches(val: Samples) -> None:
    engine = Engine(two_steps(["last", "last"]))
    shares = []
    for b in (-30.0, 0.0, 30.0):
        (told,) = engine.answer(asked(engine, val, [0], point=engine.points.at(b)))
        shares.append(told["branches"][0]["share"])
    assert shares[0] == pytest.approx(1, abs=1e-3)
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] == pytest.approx(0, abs=1e-3)


def test_a_picture_one_pixel_high_is_refused_before_it_grows(base: api.Model) -> None:
    engine = Engine(api.Model(base.saved, None, torch.device("cpu")))
    engine.model.classifier.preprocessing = Preprocessing(224, 1, (0.5,), (0.25,))
    limits = Limits(pixels=10_000_000)
    with pytest.raises(UnreadableImage, match="long and thin"):
        engine.pixels(png(np.zeros((1, 60_000), np.uint8)), "line.png", limits)
    assert engine.pixels(png(np.zeros((10, 300), np.uint8)), "bar.png", limits).shape == (1, 224, 224)


def test_the_cost_of_an_image_is_read_from_its_header(base: api.Model) -> None:
    engine = Engine(base)
    pixels = np.zeros((300, 400, 3), np.uint8)
    limits = Limits(pixels=120_000)
    assert engine.pixel_cost(png(pixels), "a.png", limits) == 120_000
    assert engine.pixel_cost(png(pixels, kind="JPEG"), "a.jpg", limits) == 30_000  # decoded at a reduced size
    half = Limits(pixels=60_000)
    assert engine.pixel_cost(png(pixels, kind="JPEG"), "a.jpg", half) == 30_000
    with pytest.raises(UnreadableImage, match=r"a\.png.*400 × 300 .* 0\.06 million"):
        engine.pixel_cost(png(pixels), "a.png", half)
    with pytest.raises(UnreadableImage, match="not an image"):
        engine.pixel_cost(b"text", "a.png", limits)


def test_a_large_jpeg_is_decoded_at_a_reduced_size(base: api.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(base)
    rows, columns = np.mgrid[0:1000, 0:1200]
    data = png(((rows // 5 + columns // 9) % 256).astype(np.uint8), kind="JPEG", quality=95)
    sizes = []
    prepare = Preprocessing.prepare

    def noted(self: Preprocessing, image: Image.Image) -> torch.Tensor:
        sizes.append(image.size)
        return prepare(self, image)

    monkeypatch.setattr(Preprocessing, "prepare", noted)
    whole = engine.pixels(data, "a.jpg", Limits())
    reduced = engine.pixels(data, "a.jpg", Limits(small_pixels=1000))
    assert sizes == [(1200, 1000), (150, 125)]
    assert (whole.float() - reduced.float()).abs().mean() < 2  # of 255
