"""How well images of unknown classes are told from those of known ones, and how well they are grouped.

    python -m benchmarks.unknown --data glyphs --out results/unknown/glyphs.json
    python -m benchmarks.unknown --data tiny-imagenet-200/ --out results/unknown/tiny-imagenet-200.json
    python -m benchmarks.unknown --data imagenet-flowers/ --out results/unknown/imagenet-flowers.json

Classes that the model does not know are divided into development classes, on which the score of `branchout inbox` was
chosen, and report classes. `glyphs` uses the built-in base. A folder of photos uses the frozen features of
EfficientNet-Lite0 and a logistic regression for half of its classes; these features were trained on ImageNet, so that
the network has seen the unknown classes of Tiny-ImageNet, but no classifier has. A folder with old/ and test/, as of
`branchout bench photos`, uses EfficientNet-Lite0 as it is, and every class that it does not know is a report class.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, roc_auc_score

import branchout
from benchmarks.unknown_scores import SCORES, KnownImages, score, score_known
from branchout.api import samples_in
from branchout.bench.rows import provenance
from branchout.data.datasets import resolve
from branchout.data.glyphs import glyphs
from branchout.data.images import open_images
from branchout.data.samples import Samples
from branchout.disk_cache import cache_folder
from branchout.evaluate.unknown import FALSE_ALARMS, Outputs, group, threshold
from branchout.files import write_json
from branchout.labels import Floats, Ints
from branchout.method.features import extract

SEEDS = (0, 1, 2)
MEMORY = 5
"""Images of each known class that set the threshold, and that `mean` and `knn` compare with."""
DRAWS, PER_GROUP = 20, 5
"""Inboxes drawn to measure groups, and photos of each class in one."""


@dataclass(frozen=True)
class Unknown:
    outputs: Outputs
    labels: Ints


@dataclass(frozen=True)
class Case:
    """One draw of known and unknown classes. Keys are `dev` and `report`."""

    memory: KnownImages
    known: dict[str, Outputs]
    """Held-out images of known classes, other ones for each: those of the one set a threshold for the other."""
    unknown: dict[str, Unknown]
    accuracy: float
    """Of the model on all held-out images of known classes."""


def some(samples: Samples, per_class: int, rng: np.random.Generator) -> Samples:
    rows = [rng.permutation(np.flatnonzero(samples.labels == n))[:per_class] for n in range(len(samples.classes))]
    return samples.select(np.sort(np.concatenate(rows)))


def part(outputs: Outputs, which: np.ndarray) -> Outputs:
    return Outputs(outputs.logits[which], outputs.features[which])


def features_of(model: branchout.Model, samples: Samples) -> torch.Tensor:
    images = open_images(samples, model.classifier.preprocessing, model.device, cache=cache_folder())
    return extract(
        model.classifier, images, device=model.device, cache=cache_folder(), fingerprint=samples.fingerprint()
    )[0]


def glyph_cases() -> Iterator[Case]:
    """The built-in base of 800 characters; of the other 698, 150 to develop with and 150 to report."""
    model, data = branchout.load("glyphs"), glyphs()
    index = model.classifier.space.index
    strange = [name for name in data.val.classes if name not in set(model.classes)]
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        names = rng.permutation(strange)
        memory = some(data.train.of_classes(model.classes), MEMORY, rng)
        held = some(data.val.of_classes(model.classes), 4, rng)
        found = Outputs.of(model.classifier, features_of(model, held))
        labels = index(held.classes)[held.labels]
        even = rng.permutation(len(held)) % 2 == 0
        unknown = {}
        for split, chosen in (("dev", names[:150]), ("report", names[150:300])):
            images = some(data.val.of_classes(chosen.tolist()), 10, rng)
            unknown[split] = Unknown(Outputs.of(model.classifier, features_of(model, images)), images.labels)
        kept = Outputs.of(model.classifier, features_of(model, memory))
        yield Case(
            KnownImages(kept, index(memory.classes)[memory.labels]),
            {"dev": part(found, even), "report": part(found, ~even)},
            unknown,
            float((found.logits.argmax(1) == labels).mean()),
        )


def strong_base_cases(data: Path) -> Iterator[Case]:
    """A base as it is, with a few images that it was not trained with, and classes that it was never taught."""
    model = branchout.load("efficientnet_lite0")
    index, rng = model.classifier.space.index, np.random.default_rng(0)
    memory, test = samples_in(data / "old"), samples_in(data / "test")
    known = some(test.of_classes([name for name in test.classes if name in set(model.classes)]), 2, rng)
    unknown = test.of_classes([name for name in test.classes if name not in set(model.classes)])
    kept, found, strange = (Outputs.of(model.classifier, features_of(model, s)) for s in (memory, known, unknown))
    labels = index(known.classes)[known.labels]
    even = rng.permutation(len(known)) % 2 == 0
    yield Case(
        KnownImages(kept, index(memory.classes)[memory.labels]),
        {"dev": part(found, even), "report": part(found, ~even)},
        {"report": Unknown(strange, unknown.labels)},
        float((found.logits.argmax(1) == labels).mean()),
    )


def photo_cases(data: str, train: int = 20, val: int = 10) -> Iterator[Case]:
    """Half of the classes are known; of the others, half develop and half report."""
    model, dataset = branchout.load("efficientnet_lite0"), resolve(data)
    rng = np.random.default_rng(0)
    fitting, held = some(dataset.train, train, rng), some(dataset.val, val, rng)
    features = [torch.nn.functional.normalize(features_of(model, s)[:, 0], dim=1).double().cpu().numpy()
                for s in (fitting, held)]  # fmt: skip
    count = len(fitting.classes)
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(count)
        known, dev, report = np.split(order, [count // 2, count // 2 + count // 4])
        yield photo_case(features, (fitting.labels, held.labels), (known, dev, report), seed)


def photo_case(features: Sequence[Floats], labels: Sequence[Ints], classes: Sequence[Ints], seed: int) -> Case:
    known = classes[0]
    column = np.full(max(map(np.max, classes)) + 1, -1)
    column[known] = np.arange(len(known))
    fits = np.isin(labels[0], known)
    model = LogisticRegression(C=100.0, max_iter=300).fit(features[0][fits], column[labels[0][fits]])

    def outputs(which: np.ndarray, of: int = 1) -> Outputs:
        return Outputs(model.decision_function(features[of][which]), features[of][which])

    first = np.concatenate([np.flatnonzero(labels[0] == name)[:MEMORY] for name in known])
    test = np.flatnonzero(np.isin(labels[1], known))
    even = np.random.default_rng(seed).permutation(len(test)) % 2 == 0
    unknown = {}
    for split, names in (("dev", classes[1]), ("report", classes[2])):
        rows = np.flatnonzero(np.isin(labels[1], names))
        unknown[split] = Unknown(outputs(rows), labels[1][rows])
    right = outputs(test).logits.argmax(1) == column[labels[1][test]]
    return Case(
        KnownImages(outputs(first, of=0), column[labels[0][first]]),
        {"dev": outputs(test[even]), "report": outputs(test[~even])},
        unknown,
        float(right.mean()),
    )


def detection(case: Case, split: str) -> dict[str, dict[str, float]]:
    """For each score: AUROC, and what the thresholds from memory and from held-out images do, all in percent."""
    found = {}
    other = "report" if split == "dev" else "dev"
    for kind in SCORES:
        known = score(kind, case.known[split], case.memory)
        unknown = score(kind, case.unknown[split].outputs, case.memory)
        truth = np.repeat([0, 1], [len(known), len(unknown)])
        found[kind] = {"auroc": 100 * float(roc_auc_score(truth, np.concatenate([known, unknown])))}
        limits = {"memory": score_known(kind, case.memory), "held_out": score(kind, case.known[other], case.memory)}
        for source, scores in limits.items():
            found[kind][f"false_alarms_{source}"] = 100 * float((known > threshold(scores)).mean())
            found[kind][f"found_{source}"] = 100 * float((unknown > threshold(scores)).mean())
    return found


def grouping(case: Case, split: str, classes: int) -> dict[str, float]:
    """Inboxes of a few photos of some unknown classes each: groups made, adjusted Rand index and purity."""
    outputs, labels = case.unknown[split].outputs, case.unknown[split].labels
    measured = []
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        chosen = rng.permutation(np.unique(labels))[:classes]
        rows = np.concatenate([rng.permutation(np.flatnonzero(labels == name))[:PER_GROUP] for name in chosen])
        groups, truth = group(outputs.features[rows]), labels[rows]
        most = sum(np.bincount(truth[groups == number]).max() for number in set(groups.tolist()))
        measured.append((len(set(groups.tolist())), 100 * adjusted_rand_score(truth, groups), 100 * most / len(rows)))
    return dict(zip(("groups", "rand_index", "purity"), np.mean(measured, axis=0).tolist(), strict=True))


def summary(per_seed: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means and standard deviations over the seeds."""
    values = {key: [each[key] for each in per_seed] for key in per_seed[0]}
    return {key: round(float(np.mean(found)), 2) for key, found in values.items()} | {
        f"{key}_std": round(float(np.std(found)), 2) for key, found in values.items()
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", required=True, help="glyphs, or a folder of photos that branchout bench takes")
    words.add_argument("--out", type=Path, required=True)
    asked = words.parse_args()
    start = time.perf_counter()
    folder = Path(asked.data)
    if asked.data == "glyphs":
        cases = list(glyph_cases())
    else:
        cases = list(strong_base_cases(folder) if (folder / "old").is_dir() else photo_cases(asked.data))
    row: dict[str, object] = {
        "dataset": folder.name,
        "known_classes": cases[0].memory.outputs.logits.shape[1],
        "false_alarms": FALSE_ALARMS,
        "memory_images": len(cases[0].memory.labels),
        "accuracy_on_known": round(100 * float(np.mean([case.accuracy for case in cases])), 2),
        "seeds": list(SEEDS)[: len(cases)],
    }
    for split in cases[0].unknown:
        found = [detection(case, split) for case in cases]
        scores = {kind: summary([each[kind] for each in found]) for kind in SCORES}
        groups = {f"{n} classes": summary([grouping(case, split, n) for case in cases]) for n in (2, 5, 20)}
        row[split] = {
            "unknown_classes": len(np.unique(cases[0].unknown[split].labels)),
            "known_images": len(cases[0].known[split].logits),
            "unknown_images": len(cases[0].unknown[split].labels),
            "scores": scores,
            "groups": groups,
        }
        for kind, figures in scores.items():
            shown = (f"{key} {value:.1f}" for key, value in figures.items() if not key.endswith("_std"))
            print(f"{split:7} {kind:8}", *shown, flush=True)
        for kind, figures in groups.items():
            print(f"{split:7} {kind}: {figures['groups']:.1f} groups, purity {figures['purity']:.1f}")
    write_json(asked.out, {**row, "seconds": round(time.perf_counter() - start, 1), **provenance()})


if __name__ == "__main__":
    main()
