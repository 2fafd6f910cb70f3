"""APER on a tiny vision transformer."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from helpers import fixed_batch, same, snapshot, tiles
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from branchout.baselines import aper, podnet
from branchout.baselines.networks import scores_of
from branchout.baselines.task import Task
from branchout.data.memory import keep
from branchout.errors import BranchoutError, DoesNotApply
from branchout.model.classifier import Classifier
from branchout.model.timm_adapters import split_network


@pytest.fixture(scope="module")
def transformer(classifier: Classifier) -> Classifier:
    torch.manual_seed(0)
    network = VisionTransformer(
        img_size=32, patch_size=8, in_chans=1, num_classes=12, embed_dim=48, depth=2, num_heads=4, global_pool="avg"
    )
    backbone, head = split_network(network.eval())
    arch = {"family": "timm", "name": "tiny", "num_classes": 12}
    return Classifier(arch, backbone, head, classifier.space.classes, classifier.preprocessing, "glyph")


@pytest.fixture(scope="module")
def short(task: Task) -> Task:
    """The first step's classes, as tiles."""
    everything = tiles(task.space.classes, 20, seed=0)
    old, new = (everything.of_classes(names).with_origin(n) for n, names in enumerate(task.space.branches))
    return replace(task, network=replace(task.network, epochs=8), new=new, memory=keep(old, per_class=5))


@pytest.fixture(scope="module", autouse=True)
def _fast() -> Iterator[None]:
    """A network of random weights needs a larger rate than a pre-trained one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aper, "ADAPTERS", replace(aper.ADAPTERS, lr=0.5))
        yield


@pytest.fixture(scope="module")
def learned(transformer: Classifier, short: Task) -> aper.AdaptedScorer:
    return aper.learn(transformer, short)


def test_adapters_start_by_adding_nothing(transformer: Classifier) -> None:
    adapted = aper.with_adapters(transformer.backbone)
    parameters = [each for each in adapted.parameters() if each.requires_grad]
    with torch.no_grad():
        assert torch.equal(adapted(fixed_batch()), transformer.backbone(fixed_batch()))
    assert sum(p.numel() for p in parameters) == 2 * (48 * 64 + 64 + 64 * 48 + 48)
    assert not any(isinstance(module, aper.Adapter) for module in transformer.backbone.modules())


def test_only_adapters_are_trained(transformer: Classifier, learned: aper.AdaptedScorer) -> None:
    before = snapshot(transformer.backbone)
    after = {key.replace("mlp.mlp", "mlp"): value for key, value in learned.adapted.state_dict().items()}
    added = {key for key in after if ".down." in key or ".up." in key}
    assert len(added) == 8
    assert same(before, {key: value for key, value in after.items() if key not in added})
    assert all(after[key].any() for key in added if ".up." in key)
    with torch.no_grad():
        assert not torch.allclose(learned.adapted(fixed_batch()), transformer.backbone(fixed_batch()), atol=1e-3)


def test_the_head_is_class_means_of_both_features(
    transformer: Classifier, short: Task, learned: aper.AdaptedScorer
) -> None:
    name = short.space.branches[1][0]
    pictures = next(short.images(short.new.of_classes([name])).plain([torch.arange(20).numpy()]))
    with torch.no_grad():
        both = torch.cat([transformer.backbone(pictures), learned.adapted(pictures)], dim=1)
    assert torch.cosine_similarity(learned.head.means[12], both.mean(0), dim=0) > 1 - 1e-5
    assert learned.stored() == 16 * 2 * transformer.backbone.features


def test_it_learns_and_takes_a_second_step(
    learned: aper.AdaptedScorer, short: Task, accuracy_of: Callable[..., float]
) -> None:
    test = tiles(short.space.classes, 5, seed=1)
    assert all(accuracy_of(learned, short, test.of_classes(names)) > 0.8 for names in short.space.branches)
    known = [*short.space.classes, "one more", "another"]
    new = tiles(known, 20, seed=2).of_classes(known[-2:]).with_origin(2)
    later = replace(short, space=short.space.extend(new.classes), new=new)
    held = snapshot(learned)
    second = aper.learn(learned, later)
    assert second.adapted is learned.adapted
    assert same(held, snapshot(learned))
    scores = scores_of(second, later.images(new))
    assert scores.shape == (40, 18)
    assert torch.isfinite(scores).all()
    assert accuracy_of(second, later, new) > 0.8
    assert accuracy_of(second, later, test) > 0.8


def test_new_looks_of_old_classes_have_means_of_their_own(transformer: Classifier, overlapping_task: Task) -> None:
    quick = replace(overlapping_task, network=replace(overlapping_task.network, epochs=1))
    assert len(aper.learn(transformer, quick).head.means) == overlapping_task.space.columns


def test_other_networks_are_answered_with_what_to_use(classifier: Classifier, task: Task) -> None:
    with pytest.raises(BranchoutError, match=r"\(resnet10\) has none; use ncm"):
        aper.learn(classifier, task)


def test_podnet_has_nothing_to_compare_in_a_transformer(transformer: Classifier, short: Task) -> None:
    with pytest.raises(DoesNotApply, match="podnet compares feature maps"):
        podnet.learn(transformer, replace(short, network=replace(short.network, epochs=1)))


def test_adapters_have_a_schedule_of_their_own_which_fewer_epochs_shorten(
    transformer: Classifier, short: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(aper.whole_network, "train", lambda *given: seen.append(given[-1]))
    for epochs in (3, 90):
        aper.adapt(transformer, replace(short, network=replace(short.network, epochs=epochs, lr=0.1)))
    assert [each.epochs for each in seen] == [3, 20]
    assert all(each == replace(aper.ADAPTERS, epochs=each.epochs) for each in seen)


def test_an_adapter_adds_a_tenth_of_its_narrow_path() -> None:
    adapter = aper.Adapter(nn.Identity(), 6)
    nn.init.ones_(adapter.up.weight)
    x = torch.randn(3, 6)
    assert torch.allclose(adapter(x), x + 0.1 * adapter.down(x).relu().sum(1, keepdim=True), atol=1e-6)
