"""Methods as their authors train them: a base of their own, and each loss against its formula written out."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from branchout.baselines import bic, der, feature_heads, foster, icarl, podnet, published_training, wa, whole_network
from branchout.baselines.networks import scores_of
from branchout.baselines.registry import baselines
from branchout.baselines.task import Task
from branchout.data.samples import Samples
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

    def noted(network, task, samples, loss_of, work="", optimisation=None, *, alter=None, redrawn=()):
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
        assert isinstance(network.head, nn.Linear)
        assert (network.head.bias is not None) == (name in ("icarl", "foster"))


def test_without_a_network_to_start_from_the_task_says_so(base_task: Task) -> None:
    with pytest.raises(Exception, match="set `untrained`"):
        published_training.first(replace(base_task, untrained=None))


def test_icarl_distils_sigmoids(base_task: Task, step: Task, losses) -> None:
    before = icarl.first_as_published(base_task)
    network, loss_of, optimisation = losses[0]
    assert (optimisation.lr, optimisation.weight_decay, optimisation.schedule) == (2.0, 5e-5, "icarl")
    assert network.head.bias is not None
    pictures, target = batch(base_task)
    p = network(pictures).sigmoid().double()
    terms = [
        -math.log(p[n, c] if c == target[n] else 1 - p[n, c]) for n in range(len(target)) for c in range(p.shape[1])
    ]
    assert loss_of(pictures, target).item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)

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
    assert loss_of(pictures, target).item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)


def test_a_class_that_comes_again_is_learned_from_its_labels() -> None:
    z, target, remembered = torch.randn(3, 4), torch.tensor([0, 1, 3]), torch.randn(3, 3)
    new = torch.tensor([False, True, False, True])
    wanted = remembered.sigmoid()[:, [0, 0, 2, 2]].clone()
    wanted[:, [1, 3]] = F.one_hot(target, 4)[:, [1, 3]].float()
    expected = F.binary_cross_entropy_with_logits(z, wanted)
    assert icarl.sigmoid_loss(z, target, remembered, new).item() == pytest.approx(expected.item())


def test_icarls_means_are_of_as_many_exemplars_as_the_memory_has_room_for(base_task: Task, step: Task) -> None:
    network = published_training.first(base_task).eval()
    network.widened(16, published_training.linear_head)
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


def test_images_that_fit_bics_bias_never_train(base_task: Task, step: Task, next_task, monkeypatch) -> None:
    trained: list[set[str]] = []
    fitted: list[Samples] = []
    monkeypatch.setattr(
        whole_network, "train", lambda network, task, samples, *others, **named: trained.append(set(samples.ids))
    )
    outputs = whole_network.augmented_outputs

    def noted(network: nn.Module, task: Task, samples: Samples, *others: int) -> Tensor:
        fitted.append(samples)
        return outputs(network, task, samples, *others)

    monkeypatch.setattr(whole_network, "augmented_outputs", noted)
    method, step = baselines()["bic"].published, replace(step, per_class=10)
    second = method.learn(method.first(replace(base_task, after=10)), step)
    method.learn(second, replace(next_task(step, again=()), untrained=step.untrained))
    assert len(trained) == 3
    assert len(fitted) == 2
    for held, names in zip(fitted, (12 + 4, 12 + 4 + 3), strict=True):
        assert set(held.counts().values()) == {1}
        assert len(held.counts()) == names
        assert not set(held.ids) & set.union(*trained)
    assert set(fitted[0].ids) <= set(fitted[1].ids)
    # A memory that shrinks holds fewer out, and those of before are not trained on then either.
    trained.clear()
    fitted.clear()
    method.learn(
        method.learn(method.first(replace(base_task, after=30)), replace(step, per_class=30)),
        replace(next_task(step, again=()), untrained=step.untrained, per_class=10),
    )
    assert set(fitted[0].counts().values()) == {3}
    assert set(fitted[1].counts().values()) == {1}
    assert not set(fitted[0].ids) & set.union(*trained)
    old_and_trained = [name for name in trained[1] if name in set(base_task.new.ids)]
    assert len(old_and_trained) <= 12 * 9  # nine train and one is held out: together ten exemplars a class


def test_wa_sets_negative_weights_to_zero_at_every_step(base_task: Task, step: Task) -> None:
    first = baselines()["wa"].published.first(base_task)
    scores_of(first, base_task.images(base_task.new))
    assert (first.head.weight >= 0).all()
    second = wa.learn_as_published(first, step)
    assert (second.head.weight >= 0).all()
    lengths = second.head.weight.norm(dim=1)
    assert lengths[12:].mean().item() == pytest.approx(lengths[:12].mean().item(), rel=1e-4)
    head = wa.NonNegative(2, 2, bias=False)
    head.weight.data.fill_(-1.0)
    assert head(torch.ones(1, 2)).tolist() == [[0, 0]]


@pytest.mark.parametrize("name", ["wa", "der"])
def test_heads_start_at_random_once_more_after_the_warm_up(name: str, base_task: Task, step: Task, monkeypatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda head: drawn.append(head.out_features))
    monkeypatch.setattr(feature_heads, "train", lambda *given: None)
    seen = []

    def noted(network, parameters, epoch_batches, *given, **more):
        for epoch in range(4):
            drawn.clear()
            epoch_batches(epoch)
            seen.append(drawn.copy())

    monkeypatch.setattr(whole_network, "fit", noted)
    long = replace(published_training.SCHEDULE, epochs=34)  # of which 2 are the warm-up
    method = baselines()[name].published
    first = method.first(replace(base_task, pretraining=long))
    method.learn(first, replace(step, network=long))
    assert seen == [[], [], [12], [], [], [], [16] if name == "wa" else [16, 5], []]


def test_der_adds_an_auxiliary_loss_and_divides_its_last_logits_by_five(
    base_task: Task, step: Task, losses, monkeypatch
) -> None:
    last = []
    monkeypatch.setattr(feature_heads, "train", lambda head, task, data, scores: last.append((head, scores)))
    before = published_training.first(base_task)
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


def test_der_starts_every_head_at_random_and_sees_a_view_for_each_last_epoch(
    base_task: Task, step: Task, losses, monkeypatch
) -> None:
    last = []
    monkeypatch.setattr(feature_heads, "train", lambda head, task, data, scores: last.append((task.heads, data)))
    before = published_training.first(base_task)
    network = der.learn(before, step, published=True)
    assert not torch.equal(network.head.weight[:12, : before.head.in_features], before.head.weight)
    heads, data = last[0]
    assert (heads.schedule, heads.epochs, len(data.features)) == ("half", 30, 30)


@pytest.mark.parametrize(("arch", "weights"), [("resnet10", (8, 10)), ("resnet32", (3, 1))])
def test_podnets_base_has_its_loss_and_its_step_both_distillations(
    arch: str, weights: tuple[int, int], base_task: Task, step: Task, losses, monkeypatch
) -> None:
    monkeypatch.setattr(podnet, "tune_head", lambda *given: None)
    before = podnet.first_as_published(replace(base_task, untrained=lambda: small(arch)))
    network, loss_of, optimisation = losses[0]
    assert (network.head.eta.item(), network.head.unit) == (1.0, 2.0)
    assert network.head.proxies.norm(dim=2).mean().item() == pytest.approx(1.0, abs=0.1)
    assert optimisation.schedule == "plain-cosine"
    assert (optimisation.lr, optimisation.batch) == ((0.05, 64) if arch == "resnet10" else (0.1, 128))
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


def test_podnets_last_epochs_move_proxies_and_running_statistics_only(base_task: Task, step: Task) -> None:
    network = podnet.learn(podnet.first_as_published(base_task), step)
    weights = {name: each.detach().clone() for name, each in network.named_parameters()}
    means = network.backbone.get_submodule("layer1.0.bn1").running_mean.clone()
    network.head.proxies.requires_grad_(True)
    podnet.tune_head(network, step, replace(podnet.LAST_EPOCHS[1], epochs=1))
    changed = {name for name, each in network.named_parameters() if not torch.equal(each, weights[name])}
    assert changed == {"head.proxies"}
    assert not torch.equal(network.backbone.get_submodule("layer1.0.bn1").running_mean, means)


def test_podnets_last_epochs_see_the_images_nearest_to_their_class_mean(
    base_task: Task, step: Task, losses, monkeypatch
) -> None:
    network, seen = podnet.first_as_published(base_task), []
    monkeypatch.setattr(whole_network, "train", lambda net, task, samples, *rest: seen.append(samples))
    podnet.tune_head(network, step, podnet.LAST_EPOCHS[1])
    samples = seen[0]
    h = whole_network.plain_outputs(network.features, step, step.new)
    u, labels = F.normalize(h, dim=1), torch.from_numpy(step.new.labels)
    for label in labels.unique():
        own = torch.where(labels == label)[0].tolist()
        nearest = max(own, key=lambda place: float(u[place] @ u[own].mean(0)))  # what herding takes first
        assert step.new.ids[nearest] in samples.ids
    assert len(samples) == len(step.memory) + step.per_class * len(step.space.branches[-1])
    podnet.tune_head(network, replace(step, after=2), podnet.LAST_EPOCHS[1])  # where the memory shrinks with each step
    classes = len(set(step.memory.labels.tolist())) + len(labels.unique())
    assert len(seen[1]) == 2 * classes


def test_podnets_gradients_are_clamped_as_published_and_while_it_trains_only(base_task: Task, losses) -> None:
    network = podnet.first_as_published(base_task)
    weight = network.head.proxies

    def gradient() -> float:
        weight.grad = None
        (1e3 * weight).sum().backward()
        return weight.grad.abs().max().item()

    with podnet.clamped_gradients(network):
        assert gradient() == 5.0
    assert gradient() == 1e3
    network.published = False
    with podnet.clamped_gradients(network):
        assert gradient() == 1e3


def test_podnets_gradients_are_clamped_in_the_base_the_step_and_the_last_epochs(
    base_task: Task, step: Task, monkeypatch
) -> None:
    def trained(network, *given, **options) -> None:
        (1e3 * network.head.proxies).sum().backward()
        largest.append(network.head.proxies.grad.abs().max().item())
        network.zero_grad()
        network.eval()

    largest: list[float] = []
    monkeypatch.setattr(whole_network, "train", trained)
    podnet.learn(podnet.first_as_published(base_task), step)
    assert largest == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("arch", ["resnet10", "resnet32"])
def test_podnet_compares_maps_before_their_relu(arch: str, base_task: Task, losses) -> None:
    network = podnet.first_as_published(replace(base_task, untrained=lambda: small(arch)))
    for part in (part for part in network.modules() if isinstance(part, resnet.BasicBlock)):
        nn.init.ones_(part.bn2.weight)
    maps, h = network.maps_and_features(torch.randn(2, 1, 32, 32))
    assert all((x < 0).any() for x in maps)
    stage = network.eval().backbone.get_submodule(network.backbone.names[2])
    maps, h = network.maps_and_features(torch.randn(2, 1, 32, 32))
    assert torch.allclose(stage(maps[0]), maps[1], atol=1e-5)  # the next stage reads a map as it is
    assert torch.allclose(maps[-1].mean((2, 3)), h, atol=1e-5)
    sides = [x.shape[2] for x in maps]
    assert sides == ([32, 16, 8, 8] if arch == "resnet32" else [32, 16, 8, 4])


def test_podnets_scale_is_learned_as_published(base_task: Task) -> None:
    """Their logits are η(2·cos − 2): a step of descent on η moves them by 4·cos², not by cos²."""
    proxies, h = torch.randn(3, 10, 8), torch.randn(5, 8)
    head = podnet.LocalSimilarity(proxies, 1.0, unit=2.0)
    rows = F.normalize(h, dim=1) @ F.normalize(proxies, dim=2).transpose(1, 2)  # (class, image, proxy)
    theirs = ((2 * rows - 2) * (2 * rows - 2).softmax(2)).sum(2).T
    assert torch.allclose(head(h), theirs + 2, atol=1e-5)
    head(h).sum().backward()
    assert head.eta.grad.item() == pytest.approx((theirs + 2).sum().item(), abs=1e-4)


def test_podnets_new_proxies_are_as_long_as_its_old_ones(base_task: Task, step: Task, losses) -> None:
    before = podnet.first_as_published(replace(base_task, untrained=lambda: small("resnet32")))
    with torch.no_grad():
        before.head.proxies *= 3
    proxies = podnet.imprinted(before, step)
    assert torch.equal(proxies[:12], before.head.proxies)
    assert 1.5 < proxies[12:].norm(dim=2).mean().item() < 4  # centres of unit vectors are a little shorter


@pytest.mark.parametrize(("relu", "without"), [("always", 0), ("but the last", 1), ("inside stages", 15)])
def test_blocks_of_the_literatures_resnet32(relu: str, without: int, base_task: Task) -> None:
    network = published_training.untrained(replace(base_task, untrained=lambda: resnet.build("resnet32")), relu)
    assert sum(each.numel() for each in network.parameters()) == 464_154 - 64 * 10 - 10  # of the original, 10 classes
    blocks = [block for block in network.modules() if isinstance(block, resnet.BasicBlock)]
    assert [block.last_relu for block in blocks] == [True] * (15 - without) + [False] * without
    x = torch.randn(1, 16, 8, 8)
    block = network.get_submodule("layer2.0").eval()
    padded = torch.cat([x[:, :, ::2, ::2], torch.zeros(1, 16, 4, 4)], dim=1)
    assert torch.equal(block(x), padded) == (relu == "inside stages")  # PODNet's starts by adding nothing


@pytest.mark.parametrize("relu", ["always", "but the last"])
def test_blocks_of_other_networks_start_by_adding_nothing_and_end_in_a_relu(relu: str, base_task: Task) -> None:
    network = published_training.untrained(base_task, relu)
    blocks = [block for block in network.modules() if isinstance(block, resnet.BasicBlock)]
    assert all((block.bn2.weight == 0).all() and block.last_relu for block in blocks)
    assert isinstance(blocks[1].downsample, nn.Sequential)


def test_each_method_has_its_authors_epochs_and_fewer_are_shared_out(base_task: Task, step: Task, losses) -> None:
    whole = replace(base_task, pretraining=published_training.SCHEDULE, network=published_training.SCHEDULE)
    for asked, expected in ((170, (70, 200, 170, 130)), (85, (35, 100, 85, 65))):
        losses.clear()
        epochs = replace(published_training.SCHEDULE, epochs=asked)
        task = replace(whole, pretraining=epochs, network=epochs)
        icarl.first_as_published(task)
        first = foster.first_as_published(task)
        foster.learn(first, replace(step, network=epochs), published=True)
        assert tuple(optimisation.epochs for _, _, optimisation in losses) == expected
    assert [optimisation.weight_decay for _, _, optimisation in losses] == [5e-5, 5e-4, 5e-4, 0.0]


def test_fosters_new_rows_start_at_random_on_both_networks_features(base_task: Task, step: Task, losses) -> None:
    first = foster.first_as_published(base_task)
    boosted = foster.Boosted(first.eval(), 16, published=True)
    k = first.head.in_features
    assert torch.equal(boosted.head.weight[:12, :k], first.head.weight)
    assert torch.equal(boosted.head.bias[:12], first.head.bias)
    assert boosted.head.weight[12:, :k].std().item() == pytest.approx(1 / math.sqrt(2 * k), rel=0.3)
    assert boosted.enhancing.bias is not None


def test_fosters_beta_follows_the_exemplars_as_in_its_settings() -> None:
    found = [foster.boosting_beta(np.full(10, 2000 // (10 * t))) for t in range(1, 10)]
    assert found == pytest.approx([0.98, 0.975, 0.97, 0.965, 0.96, 0.955, 0.95, 0.945, 0.94], abs=1e-3)
    assert foster.boosting_beta(np.full(50, 20)) == 0.94
