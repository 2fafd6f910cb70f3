"""WA makes the rows of new classes as long, on average, as those of old ones."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from branchout.baselines import wa, whole_network
from branchout.baselines.networks import Network, scores_of
from branchout.data.memory import keep
from branchout.model.heads import CosineHead


@pytest.fixture(scope="module")
def learned(classifier, task) -> Network:
    return wa.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.7
    assert accuracy_of(learned, task, old_test) > 0.7


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_new_rows_start_along_what_is_their_classs_alone_as_long_as_the_others(
    classifier, linear_classifier, overlapping_task, kind
) -> None:
    task = overlapping_task
    _, teacher = whole_network.student_and_teacher(classifier if kind == "cosine" else linear_classifier, task)
    rows = wa.imprinted(wa.Rows.continuing(teacher.head, 16), 12, teacher, task)
    assert torch.allclose(rows.weight.norm(dim=1), torch.tensor(4.0 if kind == "cosine" else 40.0), rtol=1e-5)
    assert torch.allclose(rows.weight[:12], wa.Rows.continuing(teacher.head, 12).weight)
    means = []
    for name in task.space.classes:  # of a class that comes again all images count, old ones and new
        tables = [table.of_classes([name]) for table in (task.new, task.memory) if name in table.classes]
        h = torch.cat([whole_network.plain_outputs(teacher.features, task, table) for table in tables])
        means.append((normalize(h, dim=1) if kind == "cosine" else h).mean(0))
    own = means[13] - sum(means) / 16
    assert torch.allclose(rows.weight[13], rows.weight[13].norm() * normalize(own, dim=0), atol=1e-3)


def test_old_pictures_do_not_answer_to_new_rows_at_the_start(classifier, task, old_test) -> None:
    """Features are never negative: what all of them share would make rows of plain means heard everywhere."""
    _, teacher = whole_network.student_and_teacher(classifier, task)
    rows = wa.imprinted(wa.Rows.continuing(teacher.head, 16, wa.LENGTH), 12, teacher, task)
    h = whole_network.plain_outputs(teacher.features, task, old_test)
    means = torch.stack(
        [
            whole_network.plain_outputs(teacher.features, task, task.new.of_classes([c])).mean(0)
            for c in task.space.branches[1]
        ]
    )
    plain = 16 * normalize(h, dim=1) @ normalize(means, dim=1).T
    assert plain.mean() > 3
    assert rows(h)[:, 12:].mean() < 0.5
    assert (rows(h).argmax(1) == torch.from_numpy(task.labels(old_test))).float().mean() > 0.9


def test_without_exemplars_a_single_new_class_starts_along_its_mean(first_step, classifier, drawings) -> None:
    task = first_step(drawings[0].of_classes(["digit eight"]))
    task = replace(task, memory=task.memory.select([]))
    _, teacher = whole_network.student_and_teacher(classifier, task)
    rows = wa.imprinted(wa.Rows.continuing(teacher.head, 13), 12, teacher, task)
    mean = normalize(whole_network.plain_outputs(teacher.features, task, task.new), dim=1).mean(0)
    assert torch.allclose(rows.weight[12], 4 * normalize(mean, dim=0), atol=1e-4)


def test_new_rows_outgrow_rare_old_ones_and_aligning_brings_old_pictures_back(
    classifier, task, accuracy_of, new_test
) -> None:
    """One exemplar of each old class and 20 images of each new: the bias that the method is about."""
    old = task.everything.select(task.everything.origin == 0)
    rare = replace(task, memory=keep(old, per_class=1, seed=3), network=replace(task.network, lr=0.2, epochs=10))
    measured = []

    def noted(head: nn.Linear, new: torch.Tensor) -> None:
        lengths = head.weight.norm(dim=1)
        assert lengths[new].mean() > 1.05 * lengths[~new].mean()
        measured.append(states(network_of[0]))
        align(head, new)

    def states(network: Network) -> tuple[float, float]:
        heard = scores_of(network, rare.images(old))[:, 12:].mean().item()
        return accuracy_of(network, rare, old), heard

    align, network_of = wa.align, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wa, "align", noted)
        train = whole_network.train
        patch.setattr(
            whole_network, "train", lambda network, *rest: (train(network, *rest), network_of.append(network))
        )
        learned = wa.learn(classifier, rare)
    (before, heard_before), (after, heard_after) = measured[0], states(learned)
    assert after > before + 0.01
    assert 0 < heard_after < 0.95 * heard_before
    assert accuracy_of(learned, rare, new_test) > 0.8


def test_rows_are_equally_long_on_average(learned) -> None:
    lengths = learned.head.weight.norm(dim=1)
    assert lengths[12:].mean().item() == pytest.approx(lengths[:12].mean().item(), rel=1e-5)
    assert lengths.std() > 1e-3  # each on its own is not


def test_aligning_is_one_factor_for_new_rows() -> None:
    head = nn.Linear(5, 6, bias=False)
    before = head.weight.detach().clone()
    wa.align(head, torch.tensor([False, False, True, False, True, True]))
    ratio = head.weight.detach() / before
    assert torch.equal(ratio[[0, 1, 3]], torch.ones(3, 5))
    expected = before[[0, 1, 3]].norm(dim=1).mean() / before[[2, 4, 5]].norm(dim=1).mean()
    assert torch.allclose(ratio[[2, 4, 5]], expected.expand(3, 5))


def test_where_all_classes_are_new_nothing_is_aligned() -> None:
    head = nn.Linear(5, 6, bias=False)
    before = head.weight.detach().clone()
    wa.align(head, torch.ones(6, dtype=torch.bool))
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize("length", [4.0, wa.LENGTH])
def test_rows_go_on_from_a_cosine_head(length: float) -> None:
    head = CosineHead(8, 5)
    rows = wa.Rows.continuing(head, 7, length)
    assert torch.allclose(rows.weight[:5].norm(dim=1), torch.tensor(16 / length))
    h = torch.randn(3, 8)
    assert torch.allclose(rows(h)[:, :5], head(h), atol=1e-5)
    assert rows(h)[:, 5:].abs().max() == 0
    again = wa.Rows.continuing(rows, 9)
    assert torch.allclose(again(h)[:, :7], rows(h), atol=1e-5)
    with torch.no_grad():
        rows.weight *= 2  # unlike a cosine head's, its lengths count
    assert torch.allclose(rows(h)[:, :5], 2 * head(h), atol=1e-5)


def test_rows_go_on_from_a_linear_head_without_its_bias() -> None:
    head = nn.Linear(8, 5)
    h = torch.randn(3, 8)
    assert torch.allclose(wa.Rows.continuing(head, 7)(h)[:, :5], head(h) - head.bias, atol=1e-5)


def test_on_features_only_new_logits_change_and_rows_are_aligned(
    branched, task, accuracy_of, old_test, new_test
) -> None:
    model = branched(task)
    scorer = wa.learn_on_features(model, task)
    assert scorer.head.rows.weight.norm(dim=1).mean().item() == pytest.approx(4, rel=1e-5)
    images = task.images(new_test)
    raw, aligned = scores_of(model, images), scores_of(scorer, images)
    assert torch.allclose(aligned[:, :12], raw[:, :12])
    assert not torch.allclose(aligned[:, 12:], raw[:, 12:], atol=0.1)
    assert accuracy_of(scorer, task, old_test) > 0.9
    assert accuracy_of(scorer, task, new_test) > 0.5


def test_on_features_of_a_linear_base_logits_are_scaled(linear_classifier, branched, task, new_test) -> None:
    step = branched(task).steps[0]
    head = nn.Linear(step.head.weight.shape[1], 4)
    model = linear_classifier.extended(replace(step, head=head))
    old, new = (each.weight.norm(dim=1).mean() for each in model.fused.heads)
    images = task.images(new_test)
    raw, aligned = scores_of(model, images), scores_of(wa.learn_on_features(model, task), images)
    assert torch.allclose(aligned[:, :12], raw[:, :12])
    assert torch.allclose(aligned[:, 12:] * new, raw[:, 12:] * old, rtol=1e-4)
