"""iCaRL answers with the nearest mean of exemplars, and herds them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from branchout.baselines import icarl, whole_network
from branchout.baselines.networks import scores_of
from branchout.data.samples import concatenate


@pytest.fixture(scope="module")
def learned(classifier, task) -> icarl.NearestMean:
    return icarl.learn(classifier, replace(task, network=replace(task.network, epochs=4)))


def test_it_learns_and_remembers(learned, task, accuracy_of, old_test, new_test) -> None:
    assert accuracy_of(learned, task, new_test) > 0.8
    assert accuracy_of(learned, task, old_test) > 0.8


def test_answers_are_nearest_means(learned, task, old_test) -> None:
    exemplars = concatenate([task.memory, learned.kept])
    features = normalize(whole_network.plain_outputs(learned.network.features, task, exemplars), dim=1)
    labels = task.labels(exemplars)
    means = [normalize(features[labels == c].mean(0), dim=0) for c in range(16)]
    asked = normalize(whole_network.plain_outputs(learned.network.features, task, old_test), dim=1)
    nearest = [int(np.argmin([(h - mean).norm() for mean in means])) for h in asked]
    assert scores_of(learned, task.images(old_test)).argmax(1).tolist() == nearest


def test_kept_images_are_the_greedy_sequence(learned, task) -> None:
    assert learned.kept.counts() == dict.fromkeys(task.new.classes, task.per_class)
    one = task.new.of_classes(task.new.classes[:1])
    u = normalize(whole_network.plain_outputs(learned.network.features, task, one).double(), dim=1)
    chosen: list[int] = []
    for _ in range(task.per_class):
        distance = {n: float((u.mean(0) - u[[*chosen, n]].mean(0)).norm()) for n in range(len(one)) if n not in chosen}
        chosen.append(min(distance, key=distance.__getitem__))
    kept = learned.kept.of_classes(one.classes)
    assert kept.ids.tolist() == one.ids[chosen].tolist()


def test_mirrors_enter_the_means_of_photographs(learned, task) -> None:
    few = task.memory.of_classes(task.memory.classes[:1])
    plain = icarl.exemplar_means(learned.network, task, few)[0]
    mirrored = icarl.exemplar_means(learned.network, replace(task, kind="photo"), few)[0]
    assert not torch.allclose(plain, mirrored, atol=1e-3)
    flipped = whole_network.plain_outputs(lambda x: normalize(learned.network.features(x.flip(3)), dim=1), task, few)
    upright = whole_network.plain_outputs(lambda x: normalize(learned.network.features(x), dim=1), task, few)
    assert torch.allclose(mirrored, normalize((flipped + upright).sum(0), dim=0), atol=1e-5)


def test_what_it_takes_to_answer_is_one_mean_a_class(learned) -> None:
    assert learned.stored() == 16 * learned.network.backbone.features
