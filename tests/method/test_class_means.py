"""Linear discriminant analysis of the new classes, compared with an obvious version, and in an extension."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, CPU, LATER, NEW, exemplars, untrained
from torch import nn

import branchout as api
from branchout.data.samples import Samples
from branchout.evaluate.explain import LogitSums
from branchout.method.class_means import centred, choose_share, class_means, discriminant
from branchout.method.recipes import COVARIANCE_RIDGE, MEANS_SHARE
from branchout.model.card import parameter_counts
from branchout.model.checkpoint import SavedModel
from branchout.model.class_means import ClassMeans
from branchout.model.classifier import Classifier
from branchout.model.manifest import read_manifest


def obvious(u: np.ndarray, labels: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Scores of every image and class, one at a time, from inverted covariances."""
    k = u.shape[1]
    means = {c: u[labels == c].mean(0) for c in classes}
    scatter, freedom = np.zeros((k, k)), 0
    for c in classes:
        for row in u[labels == c]:
            scatter += np.outer(row - means[c], row - means[c])
        freedom += int((labels == c).sum()) - 1
    covariance = scatter / freedom
    inverse = np.linalg.inv(covariance + COVARIANCE_RIDGE * np.trace(covariance) / k * np.eye(k))
    chance = {c: np.trace(inverse @ covariance) / (labels == c).sum() for c in classes}
    return np.array([[means[c] @ inverse @ (x - means[c] / 2) + chance[c] / 2 for c in classes] for x in u])


def test_means_of_few_images_are_not_put_behind() -> None:
    """Two classes of the same distribution, one with three images and one with 300: each wins half of other images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 3 + [1] * 300)
    member = (labels[:, None] == torch.arange(2)).double()
    won = []
    for _ in range(200):
        u = torch.randn(303, 20, generator=generator, dtype=torch.float64)
        weight, bias = discriminant(u, member)
        others = torch.randn(50, 20, generator=generator, dtype=torch.float64)
        won.append((others @ weight.T + bias).argmax(1).double().mean().item())
    assert np.mean(won) == pytest.approx(0.5, abs=0.03)


def test_it_is_linear_discriminant_analysis() -> None:
    rng = np.random.default_rng(0)
    labels = np.array([3, 3, 3, 5, 5, 8, 8, 8, 8])
    u = rng.normal(size=(9, 4)) + labels[:, None] / 5
    member = torch.from_numpy((labels[:, None] == [3, 5, 8]).astype(float))
    weight, bias = discriminant(torch.from_numpy(u), member)
    found = centred(torch.from_numpy(u) @ weight.T + bias).numpy()
    expected = obvious(u, labels, [3, 5, 8])
    expected -= expected.mean(1, keepdims=True)
    np.testing.assert_allclose(found, expected / expected.std(ddof=1), atol=1e-8)


def test_scores_of_one_feature_vector_have_a_share_of_the_spread_of_the_logits() -> None:
    model = untrained(BASE, NEW, LATER, where=["fc", "fc"])
    features = torch.randn(60, 1, model.backbone.features)
    labels = torch.from_numpy(np.resize(model.space.index([*NEW, *LATER]), 60))
    means = class_means(model, features, labels, [0.5, -0.5])
    assert means is not None
    z = model.fused.columns(features.unbind(1))[:, len(BASE) :] + means.level
    for share in (1.0, 0.25):
        mixed = means.at(share)
        spreads = [centred(each).std().item() for each in (mixed.scores(features.unbind(1)), z)]
        assert spreads[0] == pytest.approx(share * spreads[1], rel=1e-4)
        assert mixed.trained.item() == pytest.approx(1 - share)
    assert means.level.unique().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("known", [NEW[1:], NEW])
def test_there_are_none_without_images_of_every_class_or_a_spread_within_one(known: Sequence[str]) -> None:
    model = untrained(BASE, NEW, LATER)
    labels = torch.from_numpy(model.space.index([*known, *LATER]))  # one image each
    assert class_means(model, torch.randn(len(labels), 3, model.backbone.features), labels, [0.0, 0.0]) is None


@pytest.mark.parametrize(("images", "helps", "usual"), [(20, True, True), (2000, True, True), (2000, False, False)])
def test_held_out_images_choose_how_much_they_count(images: int, helps: bool, usual: bool) -> None:
    """Few images leave the usual share; many choose another where it is better."""
    model = untrained(BASE, NEW, where=["fc"])
    k, columns = model.backbone.features, len(NEW)
    generator = torch.Generator().manual_seed(0)
    labels = torch.from_numpy(np.resize(model.space.index(NEW), images))
    right = model.fused.heads[1].weight if not helps else torch.randn(columns, k, generator=generator)
    features = torch.randn(images, k, generator=generator) + 2 * right[torch.arange(images) % columns]
    other = torch.randn(columns, k, generator=generator) if not helps else right
    means = ClassMeans.of(30 * other, torch.zeros(columns), torch.zeros(columns), 0.0)
    found = choose_share(means, model, features[:, None], labels)
    assert (found == MEANS_SHARE) == usual
    assert found <= MEANS_SHARE


@pytest.fixture(scope="module")
def linear(train: Samples) -> api.Model:
    """A base with a linear head after one step."""
    like = untrained(BASE)
    head = nn.Linear(like.backbone.features, len(BASE))
    base = Classifier(like.arch, like.backbone, head, BASE, like.preprocessing, "glyph")
    return api.Model(SavedModel(base, (), ({"what": "opened"},)), None, CPU).extend(
        train.of_classes(NEW), memory=exemplars(train), epochs=1, views=1
    )


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few held-out images of an untrained network choose by chance."""
    monkeypatch.setattr("branchout.method.step_choice.choose_share", lambda *_: 0.5)


@pytest.mark.usefixtures("half")
def test_a_second_step_has_them_and_old_images_keep_their_answer(
    linear: api.Model, train: Samples, tmp_path: Path
) -> None:
    memory = exemplars(train, [*BASE, *NEW])
    grown = linear.extend(train.of_classes(LATER), memory=memory, epochs=1, views=1, out=tmp_path / "v2")
    opened = api.load(tmp_path / "v2").classifier
    model = grown.classifier
    assert model.fused.class_means is not None
    images = torch.randn(40, 1, 32, 32)
    features = model.features(model.backbone.arrange(images))
    torch.testing.assert_close(opened.fused(features), model.fused(features))
    sums = LogitSums.of(model.fused, [h[:1] for h in features])
    torch.testing.assert_close(sums.columns, (model.fused.columns(features) + model.fused.shift)[0])
    bare = grown.saved.model()
    bare.fused.class_means = None
    before, after = (each.fused(features).argmax(1) for each in (bare, model))
    assert torch.equal(before < len(BASE), after < len(BASE))
    columns, length = model.fused.class_means.weight.shape
    assert (columns, length) == (len([*NEW, *LATER]), 3 * model.backbone.features)
    bare_heads = bare.parameter_counts()["heads"]
    assert opened.parameter_counts()["heads"] == bare_heads + columns * (length + 2) + 1
    card = (tmp_path / "v2" / "README.md").read_text(encoding="utf-8")
    assert parameter_counts(read_manifest(tmp_path / "v2")[1], tmp_path / "v2") == opened.parameter_counts(), card


@pytest.mark.usefixtures("half")
def test_the_last_two_steps_keep_them(linear: api.Model, train: Samples, tmp_path: Path) -> None:
    parts = [train.of_classes(LATER[n : n + 1]) for n in range(3)]
    grown, known = linear, [*BASE, *NEW]
    for number, part in enumerate(parts):
        grown = grown.extend(part, memory=exemplars(train, known), epochs=1, views=1, out=tmp_path / str(number))
        known += part.classes
    found = api.load(tmp_path / "2")
    assert [step.class_means is not None for step in found.classifier.steps] == [False, False, True, True]
    assert [points.dropped for points in found.saved.step_points[1:]] == [True, False, False]
    torch.testing.assert_close(
        found.saved.model(3).fused.class_means.weight, api.load(tmp_path / "1").classifier.fused.class_means.weight
    )


@pytest.mark.usefixtures("half")
def test_report_and_evaluate_agree_on_the_model_before_the_last_step(
    linear: api.Model, train: Samples, val: Samples
) -> None:
    """It has means of its own features, which are the first ones of the newer model's."""
    grown, known = linear, [*BASE, *NEW]
    for names in (LATER[:1], LATER[1:]):
        grown = grown.extend(train.of_classes(names), memory=exemplars(train, known), epochs=1, views=1)
        known += names
    before = grown.saved.model(2)
    assert before.fused.class_means is not None
    shown = grown.report_data(val, gallery=2).test.figures_before
    found = grown.evaluate(val).before
    assert {name: shown[name] for name in ("all", "base", "novel", "avg")} == {
        name: getattr(found, name) for name in ("all", "base", "novel", "avg")
    }
    features = grown.classifier.features(grown.classifier.backbone.arrange(torch.randn(8, 1, 32, 32)))
    torch.testing.assert_close(before.fused(features), before.fused(features[:-1]))


def test_there_are_none_without_images_of_the_earlier_step(linear: api.Model, train: Samples) -> None:
    with pytest.warns(UserWarning, match="no images for 3 classes"):
        grown = linear.extend(train.of_classes(LATER), memory=exemplars(train, BASE), epochs=1, views=1)
    assert grown.classifier.fused.class_means is None


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_images_that_choose_may_leave_them_out(
    share: float, linear: api.Model, train: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchout.method.step_choice.choose_share", lambda *_: share)
    base = api.Model(SavedModel(linear.saved.model(0), (), linear.saved.history[:1]), None, CPU)
    grown = base.extend(train.of_classes(NEW), memory=exemplars(train), epochs=1, views=1)
    assert (grown.classifier.fused.class_means is None) == (share == 0)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_compacted_model_has_them(branches: int, linear: api.Model, train: Samples, tmp_path: Path) -> None:
    """Of the last two steps, as after extensions."""
    grown, known = linear, [*BASE, *NEW]
    for names in (LATER[:1], LATER[1:2], LATER[2:]):
        grown = grown.extend(train.of_classes(names), memory=exemplars(train, known), epochs=1, views=1)
        known += names
    small = grown.compact(exemplars(train, known), branches=branches, epochs=1, out=tmp_path / "small")
    saved = api.load(tmp_path / "small").saved
    opened = saved.model()
    assert [step.class_means is not None for step in opened.steps] == [n >= branches - 2 for n in range(branches)]
    assert [points.dropped for points in saved.step_points] == [n < branches - 2 for n in range(branches)]
    features = opened.features(opened.backbone.arrange(torch.randn(8, 1, 32, 32)))
    assert len(features) == 1 + branches
    torch.testing.assert_close(opened.fused(features), small.classifier.fused(features))
    assert opened.fused.class_means is not None
    assert opened.fused.class_means.weight.shape[0] == len(known) - len(BASE)
