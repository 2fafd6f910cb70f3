"""Methods as their authors train them: a base of their own, and each loss against its formula written out."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import bic, der, feature_heads, icarl, podnet, published, wa, whole_network
from branchout.baselines.networks import scores_of
from branchout.baselines.registry import baselines
from branchout.baselines.task import Task
from branchout.labels import LabelSpace
from branchout.model import resnet
from branchout.training.optimisation import Optimisation

NAMES = ("icarl", "bic", "wa", "der", "podnet", "foster")
Loss = Callable[[Tensor, Tensor], Tensor]


def small(name: str = "resnet10") -> resnet.Backbone:
    return resnet.build(name, in_channels=1, width=4)


@pytest.fixture(scope="module")
def base_task(task: Task) -> Task:
    """The first classes as a step of their own."""
    old = task.everything.select(task.everything.origin == 0)
    short = Optimisation(epochs=1, lr=0.1, batch=32, weight_decay=5e-4, schedule="cosine")
    return replace(
        task,
        space=LabelSpace.of(task.space.branches[0]),
        new=old,
        memory=old.select([]),
        pretraining=short,
        network=short,
        untrained=small,
        views=1,
    )


@pytest.fixture(scope="module")
def step(task: Task, base_task: Task) -> Task:
    return replace(task, network=base_task.network, views=1)


def batch(task: Task) -> tuple[Tensor, Tensor]:
    samples = whole_network.new_and_exemplars(task)
    index = np.arange(0, len(samples), 9)
    return next(task.images(samples).plain([index])), torch.from_numpy(task.labels(samples)[index])


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, Loss, Optimisation | None]]:
    """What whole_network.train is given; nothing is trained."""
    seen: list[tuple[nn.Module, Loss, Optimisation | None]] = []

    def noted(network, task, samples, loss_of, work="", optimisation=None):
        seen.append((network.eval(), loss_of, optimisation))

    monkeypatch.setattr(whole_network, "train", noted)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_base_of_its_own_then_a_step(name: str, base_task: Task, step: Task, monkeypatch) -> None:
    monkeypatch.setattr(der, "LAST_STAGE", replace(der.LAST_STAGE, epochs=1))
    monkeypatch.setattr(podnet, "LAST_EPOCHS", [replace(each, epochs=1) for each in podnet.LAST_EPOCHS])
    method = baselines()[name].published
    first = method.first(base_task)
    shown = base_task.images(base_task.new)
    assert scores_of(first, shown).shape == (len(base_task.new), 12)
    second = method.learn(first, step)
    scores = scores_of(second, shown)
    assert scores.shape == (len(base_task.new), 16)
    assert torch.isfinite(scores).all()
    network = getattr(second, "network", second)
    if name != "podnet":
        assert type(network.head) is nn.Linear
        assert network.head.bias is None


def test_without_a_network_to_start_from_the_task_says_so(base_task: Task) -> None:
    with pytest.raises(Exception, match="set `untrained`"):
        published.first(replace(base_task, untrained=None))


def test_icarl_distils_sigmoids(base_task: Task, step: Task, losses) -> None:
    before = icarl.first_as_published(base_task)
    network, loss_of, optimisation = losses[0]
    assert (optimisation.lr, optimisation.weight_decay, optimisation.epochs) == (2.0, 1e-5, 1)
    pictures, target = batch(base_task)
    p = network(pictures).sigmoid().double()
    terms = [
        -math.log(p[n, c] if c == target[n] else 1 - p[n, c]) for n in range(len(target)) for c in range(p.shape[1])
    ]
    assert loss_of(pictures, target).item() == pytest.approx(np.mean(terms), rel=1e-4)

    icarl.learn_as_published(before, step)
    network, loss_of, optimisation = losses[1]
    assert optimisation.lr == 2.0
    pictures, target = batch(step)
    p, old = network(pictures).sigmoid().double(), before.network.eval()(pictures).sigmoid().double()
    terms = []
    for n in range(len(target)):
        for c in range(16):
            wanted = float(old[n, c]) if c < 12 else float(c == target[n])
            terms.append(-wanted * math.log(p[n, c]) - (1 - wanted) * math.log(1 - p[n, c]))
    assert loss_of(pictures, target).item() == pytest.approx(np.mean(terms), rel=1e-4)


def test_a_class_that_comes_again_is_learned_from_its_labels() -> None:
    z, target, remembered = torch.randn(3, 4), torch.tensor([0, 1, 3]), torch.randn(3, 3)
    new = torch.tensor([False, True, False, True])
    wanted = remembered.sigmoid()[:, [0, 0, 2, 2]].clone()
    wanted[:, [1, 3]] = F.one_hot(target, 4)[:, [1, 3]].float()
    expected = F.binary_cross_entropy_with_logits(z, wanted)
    assert icarl.sigmoid_loss(z, target, remembered, new).item() == pytest.approx(expected.item())


def test_icarls_means_are_of_as_many_exemplars_as_the_memory_has_room_for(base_task: Task, step: Task) -> None:
    network = published.first(base_task).eval()
    network.widened(16, published.linear_head)
    found = icarl.nearest_mean(network, replace(step, after=2))
    assert set(found.kept.counts().values()) == {2}
    name = step.memory.classes[3]
    rows = np.flatnonzero(step.memory.names == name)[:2]
    u = F.normalize(whole_network.plain_outputs(network.features, step, step.memory.select(rows)), dim=1)
    number = step.space.index([name])[0]
    assert torch.allclose(found.means[number], F.normalize(u.mean(0), dim=0), atol=1e-5)


@pytest.mark.parametrize("method", [bic, wa])
def test_bic_and_wa_weigh_distillation_by_the_share_of_old_classes(method, base_task: Task, step: Task, losses) -> None:
    entry = next(each for each in method.BASELINES if each.on == "network").published
    before = entry.first(base_task)
    entry.learn(before, step)
    network, loss_of, _ = losses[1]
    if method is wa:
        with torch.no_grad():  # alignment scaled the new rows after training
            network.head.weight[12:] = torch.rand(4, network.head.in_features)
    pictures, target = batch(step)
    z, old = network(pictures).double(), before.eval()(pictures).double()
    total = 0.0
    for n in range(len(target)):
        p, q = F.softmax(z[n, :12] / 2, 0), F.softmax(old[n] / 2, 0)
        divergence = sum(float(q[c] * (q[c] / p[c]).log()) for c in range(12))
        total += 12 / 16 * divergence - 4 / 16 * float(F.log_softmax(z[n], 0)[target[n]])
    assert loss_of(pictures, target).item() == pytest.approx(total / len(target), rel=1e-3, abs=1e-5)


def test_wa_sets_negative_weights_to_zero_at_every_step(base_task: Task, step: Task) -> None:
    first = wa.first_as_published(base_task)
    assert (first.head.weight >= 0).all()
    second = wa.learn_as_published(first, step)
    assert (second.head.weight >= 0).all()
    lengths = second.head.weight.norm(dim=1)
    assert lengths[12:].mean().item() == pytest.approx(lengths[:12].mean().item(), rel=1e-4)
    seen = []
    head = nn.Linear(2, 2, bias=False)
    head.weight.data.fill_(-1.0)
    wa.clipped(head, lambda *batch: seen.append(head.weight.clone()))(None, None)
    assert seen[0].tolist() == [[0, 0], [0, 0]]


def test_der_adds_an_auxiliary_loss_and_divides_its_last_logits_by_five(
    base_task: Task, step: Task, losses, monkeypatch
) -> None:
    last = []
    monkeypatch.setattr(feature_heads, "train", lambda head, task, data, scores: last.append((head, scores)))
    before = published.first(base_task)
    network = der.learn(before, step, published=True)
    modules, loss_of, _ = losses[1]
    pictures, target = batch(step)
    with torch.no_grad():
        parts = [backbone(pictures) for backbone in network.backbones]
        h = torch.cat(parts, dim=1)  # as they are, not normalised
        assert torch.allclose(network.features(pictures), h, atol=1e-5)
        answer = torch.where(target < 12, 0, target - 11)
        expected = F.cross_entropy(network.head(h), target) + F.cross_entropy(modules[1](parts[1]), answer)
    assert loss_of(pictures, target).item() == pytest.approx(expected.item(), rel=1e-4)
    head, scores = last[0]
    assert torch.allclose(scores(h[:, None]), head(h) / 5)


def test_der_starts_with_the_rows_of_the_step_before(base_task: Task, step: Task, losses, monkeypatch) -> None:
    monkeypatch.setattr(der, "relearn_head", lambda network, task: None)
    before = published.first(base_task)
    network = der.learn(before, step, published=True)
    known, width = before.head.weight.shape
    assert torch.equal(network.head.weight[:known, :width], before.head.weight)
    again = der.learn(network, step, published=True)
    assert torch.equal(again.head.weight[:, : 2 * width], network.head.weight)


@pytest.mark.parametrize(("arch", "weights"), [("resnet10", (8, 10)), ("resnet32", (3, 1))])
def test_podnets_base_has_its_loss_and_its_step_both_distillations(
    arch: str, weights: tuple[int, int], base_task: Task, step: Task, losses, monkeypatch
) -> None:
    monkeypatch.setattr(podnet, "tune_head", lambda *given: None)
    make = (lambda: published.cifar_style(small(arch))) if arch == "resnet32" else small
    before = podnet.first_as_published(replace(base_task, untrained=make))
    network, loss_of, optimisation = losses[0]
    assert network.head.eta.item() == 2.0
    assert optimisation.schedule == "cosine"
    assert (optimisation.lr, optimisation.batch) == ((0.05, 64) if arch == "resnet10" else (0.1, 32))
    pictures, target = batch(base_task)
    assert loss_of(pictures, target).item() == pytest.approx(podnet.nca(network(pictures), target).item(), rel=1e-5)
    nn.init.normal_(before.backbone.get_submodule("layer1.0.bn2").weight)
    podnet.learn(before, step)
    network, loss_of, _ = losses[1]
    nn.init.normal_(network.backbone.get_submodule("layer1.0.bn2").weight)  # so that it differs from its teacher
    pictures, target = batch(step)
    with torch.no_grad():
        (maps, h), (old_maps, old_h) = network.maps_and_features(pictures), before.maps_and_features(pictures)
        assert len(maps) == 4
        spatial = podnet.pod_spatial(maps, old_maps)
        flat = np.mean([1 - float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(h, old_h, strict=True)])
        distilled = weights[0] * float(spatial) + weights[1] * flat
        expected = podnet.nca(network.head(h), target).item() + math.sqrt(16 / 4) * distilled
    assert min(float(spatial), flat) > 1e-4
    assert loss_of(pictures, target).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("arch", ["resnet10", "resnet32"])
def test_podnet_compares_maps_before_their_relu(arch: str, base_task: Task, losses) -> None:
    make = (lambda: published.cifar_style(small(arch))) if arch == "resnet32" else small
    network = podnet.first_as_published(replace(base_task, untrained=make))
    for part in (part for part in network.modules() if isinstance(part, resnet.BasicBlock)):
        nn.init.ones_(part.bn2.weight)
    maps, h = network.maps_and_features(torch.randn(2, 1, 32, 32))
    assert all((x < 0).any() for x in maps)
    assert torch.allclose(maps[-1].mean((2, 3)), h, atol=1e-5)
    sides = [x.shape[2] for x in maps]
    assert sides == ([32, 16, 8, 8] if arch == "resnet32" else [32, 16, 8, 4])


def test_the_literatures_resnet32_has_no_relu_behind_a_block_and_shortcuts_without_parameters() -> None:
    network = published.cifar_style(resnet.build("resnet32"))
    assert sum(each.numel() for each in network.parameters()) == 464_154 - 64 * 10 - 10  # of the original, 10 classes
    x = torch.randn(1, 16, 8, 8)
    block = network.get_submodule("layer2.0").eval()
    padded = torch.cat([x[:, :, ::2, ::2], torch.zeros(1, 16, 4, 4)], dim=1)
    assert torch.equal(block(x), padded)  # it starts by adding nothing
