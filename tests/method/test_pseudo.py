"""Made-up exemplars: where they lie, what they are called, and the two fits they rest on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import BASE, CPU, LATER, NEW, SIZES, untrained
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage
from torch import Tensor, nn

from branchout.method.pseudo import alignment, ledoit_wolf, predict_features, pseudo_exemplars, within_class_spread
from branchout.method.recipes import RIDGE
from branchout.model.classifier import Classifier

K = 64


def random_features(model: Classifier, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features of images of the newest step, in as many vectors as the model has."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(model.space.index(model.space.branches[-1])).repeat_interleave(count)
    centres = torch.randn(len(model.space.classes), 1 + max(model.fused.feature_of), K, generator=generator)
    noise = torch.randn(len(labels), 1 + max(model.fused.feature_of), K, generator=generator)
    return (centres[labels] + 0.5 * noise).relu(), labels


@pytest.fixture(scope="module")
def model() -> Classifier:
    """Two earlier branches, the second of which knows a class of the first, and a newest one that knows one of each."""
    return untrained(BASE[:4], (*NEW, BASE[1]), (LATER[0], NEW[2], BASE[0]))


def test_made_up_features_have_the_drawn_cosines_with_their_own_rows(model: Classifier) -> None:
    new, fresh = random_features(model, 9, 0), random_features(model, 4, 1)
    features, _, _ = pseudo_exemplars(model, new, fresh, 6, seed=2)
    allowed = alignment(model, *fresh)
    seen = []
    at = 0
    for branch, own in enumerate(model.fused.feature_of[:-1]):
        for row in model.fused.heads[branch].weight:
            for vector in features[at : at + 6, own]:
                cosine = (vector @ row) / (vector.norm() * row.norm())
                assert (allowed - cosine).abs().min() < 1e-5
                assert vector.norm() == pytest.approx(new[0][:, own].norm(dim=1).mean().item(), rel=1e-5)
                seen.append(int((allowed - cosine).abs().argmin()))
            at += 6
    assert at == len(features)
    assert len(set(seen)) > len(allowed) // 2  # they are drawn, not all the same


def test_labels_and_origins_of_two_earlier_branches(model: Classifier) -> None:
    new, fresh = random_features(model, 9, 0), random_features(model, 4, 1)
    features, labels, origins = pseudo_exemplars(model, new, fresh, 3, seed=2)
    names = [model.space.classes[n] for n in labels]
    expected = [(name, branch) for branch in (0, 1) for name in model.space.branches[branch] for _ in range(3)]
    assert list(zip(names, origins.tolist(), strict=True)) == expected
    assert features.shape == (len(expected), 3, K)


def test_what_other_branches_see_is_predicted(model: Classifier) -> None:
    new, fresh = random_features(model, 20, 0), random_features(model, 4, 1)
    features, _, origins = pseudo_exemplars(model, new, fresh, 3, seed=2)
    for branch in (0, 1):
        own = model.fused.feature_of[branch]
        rows = features[origins == branch]
        for other in {0, 1, 2} - {own}:
            assert torch.equal(rows[:, other], predict_features(new[0][:, own], new[0][:, other], rows[:, own]))


def test_the_seed_decides(model: Classifier) -> None:
    new, fresh = random_features(model, 9, 0), random_features(model, 4, 1)
    one, again, other = (pseudo_exemplars(model, new, fresh, 3, seed)[0] for seed in (2, 2, 3))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_branch_that_clones_nothing_reads_the_base_features() -> None:
    model = untrained(BASE[:4], NEW, LATER, where=["fc", "last"])
    new, fresh = random_features(model, 9, 0), random_features(model, 4, 1)
    features, _, origins = pseudo_exemplars(model, new, fresh, 5, seed=0)
    assert features.shape[1] == 2
    rows = torch.nn.functional.normalize(model.fused.heads[1].weight, dim=1).repeat_interleave(5, 0)
    cosines = (torch.nn.functional.normalize(features[origins == 1][:, 0], dim=1) * rows).sum(1)
    allowed = alignment(model, *fresh)
    assert ((cosines[:, None] - allowed).abs().min(1).values < 1e-5).all()


def test_alignment_is_the_cosine_of_each_image_with_its_own_row(model: Classifier) -> None:
    features, labels = random_features(model, 4, 1)
    labels = labels.clone()
    labels[3] = int(model.space.index([BASE[3]])[0])  # not of the newest step: it has no row there
    found = alignment(model, features, labels)
    expected = []
    for vectors, label in zip(features, labels, strict=True):
        name = model.space.classes[label]
        if name in model.space.branches[2]:
            row = model.fused.heads[2].weight[model.space.branches[2].index(name)]
            h = vectors[model.fused.feature_of[2]]
            expected.append((h @ row / (h.norm() * row.norm())).item())
    assert len(expected) == len(labels) - 1
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_spread_is_the_covariance_within_classes_shrunk_where_images_are_few() -> None:
    rng = np.random.default_rng(0)
    shape = rng.normal(size=(6, 6))
    for count, near in ((4000, 0.01), (2, 1.0)):
        labels = np.repeat([7, 2, 5], [count, 2 * count, count])
        features = rng.normal(size=(len(labels), 6)) @ shape + 10 * labels[:, None]
        inside = np.concatenate([features[labels == c] - features[labels == c].mean(0) for c in (7, 2, 5)])
        pooled = inside.T @ inside / (len(labels) - 3)
        share = LedoitWolf(assume_centered=True).fit(inside).shrinkage_
        assert 0 < share <= near
        slow = (1 - share) * pooled + share * np.trace(pooled) / 6 * np.eye(6)
        spread = within_class_spread(torch.from_numpy(features), torch.from_numpy(labels)).numpy()
        assert np.allclose(spread.T @ spread, slow, atol=1e-9)


def test_stand_ins_of_a_linear_head_lie_no_farther_off_than_strangers_from_some_row() -> None:
    """Random rows of a new head say nothing of how near images lie to rows that were learned."""
    torch.manual_seed(0)
    cosine = untrained(BASE, NEW)
    base, new = (nn.Linear(64, len(names)) for names in (BASE, NEW))
    step = replace(cosine.steps[0], head=new)
    linear = Classifier(cosine.arch, cosine.backbone, base, BASE, SIZES, "glyph", [step])
    features = F.normalize(torch.rand(9, 2, 64), dim=2)
    labels = torch.from_numpy(linear.space.index(list(NEW) * 3))
    found = alignment(linear, features, labels)
    for row, (h, label) in enumerate(zip(features, labels.tolist(), strict=True)):
        own = F.cosine_similarity(h[1], new.weight[list(NEW).index(linear.space.classes[label])], dim=0)
        rows = [F.cosine_similarity(h[0], weight, dim=0) for weight in base.weight]
        assert found[row].item() == pytest.approx(max(own, *rows).item(), abs=1e-6)


def test_the_row_of_a_single_class_beside_a_linear_head_says_nothing_about_old_ones() -> None:
    model = untrained(BASE, NEW[:1])
    base = nn.Linear(K, len(BASE))
    linear = Classifier(model.arch, model.backbone, base, BASE, SIZES, "glyph", model.steps)
    features, labels = random_features(linear, 5, 1)
    found = alignment(linear, features, labels)
    rows = F.normalize(features[:, 0], dim=1) @ F.normalize(base.weight, dim=1).T
    assert torch.allclose(found, rows.amax(1), atol=1e-6)


def test_from_single_images_any_direction_is_as_likely(model: Classifier) -> None:
    spread = within_class_spread(torch.randn(3, 4), torch.arange(3))
    assert torch.equal(spread, torch.eye(4))
    fresh = random_features(model, 4, 1)
    features, _, _ = pseudo_exemplars(model, random_features(model, 1, 0), fresh, 6, seed=2)
    cosines = F.normalize(features[:6, 0], dim=1) @ F.normalize(model.fused.heads[0].weight[0], dim=0)
    apart = (alignment(model, *fresh)[:, None] - cosines).abs().amin(0)
    assert apart.max() < 1e-5
    assert cosines.max() < 0.99  # they do not lie on their row


def test_regression_solves_the_ridge_normal_equations() -> None:
    rng = np.random.default_rng(1)
    x, y, at = rng.normal(2, 1, (40, 5)), rng.normal(-1, 3, (40, 4)), rng.normal(size=(7, 5))
    found = predict_features(*(torch.from_numpy(values) for values in (x, y, at))).numpy()
    centred = x - x.mean(0)
    strength = RIDGE * np.mean(np.sum(centred**2, axis=0))
    # The same as least squares with √λ·I below the data.
    tall = np.vstack([centred, np.sqrt(strength) * np.eye(5)])
    weights = np.linalg.lstsq(tall, np.vstack([y - y.mean(0), np.zeros((5, 4))]), rcond=None)[0]
    assert np.allclose(found, (at - x.mean(0)) @ weights + y.mean(0), atol=1e-9)
    assert np.allclose(found.mean(0), found.mean(0))
    bent = (at - x.mean(0)) @ np.linalg.lstsq(centred, y - y.mean(0), rcond=None)[0] + y.mean(0)
    assert not np.allclose(found, bent, atol=1e-3)  # the ridge does something


def test_constant_features_predict_the_mean() -> None:
    source, target = torch.ones(6, 3), torch.randn(6, 2)
    assert torch.allclose(predict_features(source, target, torch.ones(2, 3)), target.mean(0).expand(2, 2), atol=1e-5)


def test_devices_are_kept(model: Classifier) -> None:
    new, fresh = random_features(model, 3, 0), random_features(model, 3, 1)
    assert all(part.device == CPU for part in pseudo_exemplars(model, new, fresh, 1, seed=0))


@pytest.mark.parametrize(("images", "width"), [(2, 5), (12, 40), (60, 7)])
def test_covariances_are_shrunk_as_ledoit_and_wolf_say(images: int, width: int) -> None:
    centred = torch.rand(images, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred -= centred.mean(0)
    expected = ledoit_wolf_shrinkage(centred.numpy(), assume_centered=True)
    assert ledoit_wolf(centred) == pytest.approx(expected, abs=1e-12)
    assert ledoit_wolf(torch.zeros(3, 4)) == 0
