"""What `import branchout` offers: opening, asking and measuring models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BASE, LATER, NEW, class_folders, exemplars
from PIL import Image

import branchout
from branchout import api
from branchout.data.images import in_order, open_images
from branchout.data.preprocess import Preprocessing
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.evaluate import two_fold
from branchout.evaluate.compare import Comparison
from branchout.method import dial
from branchout.method.config import ExtendConfig
from branchout.metrics import accuracies
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.model.resnet import build


@pytest.fixture(scope="module")
def files(val: Samples, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A few characters as files of three formats that lose nothing."""
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for n, suffix in zip((3, 40, 77), ("png", "bmp", "tif"), strict=True):
        paths.append(folder / f"{n}.{suffix}")
        Image.fromarray(val.read(n)[:, :, 0]).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def photographs() -> api.Model:
    """An untrained model of colour photographs."""
    torch.manual_seed(3)
    arch = {"family": "resnet", "name": "resnet10", "stem": "small", "width": 8, "in_channels": 3}
    backbone = build("resnet10", width=8)
    seen = Preprocessing(24, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    names = ["ant", "bee", "cat", "dog", "elk", "fly", "gnu"]
    return api.Model(SavedModel(Classifier(arch, backbone, CosineHead(64, 7), names, seen)), None, torch.device("cpu"))


# Asking.


def test_a_file_an_array_and_a_list_are_answered_alike(extended: api.Model, files: list[Path], val: Samples) -> None:
    arrays = [val.read(n) for n in (3, 40, 77)]
    listed = extended.predict(files)
    assert len(listed) == 3
    assert all(len(answer) == 5 for answer in listed)
    assert extended.predict(arrays) == listed
    assert extended.predict([files[0], arrays[1], str(files[2])]) == listed
    assert extended.predict(path for path in files) == listed
    assert extended.predict([]) == []
    assert extended.predict(np.stack(arrays)) == listed
    assert extended.explain(np.stack(arrays[:2])) == extended.explain(arrays[:2])
    for path, array in zip(files, arrays, strict=True):
        assert extended.predict(path) == extended.predict(str(path)) == extended.predict(array)


def test_answers_are_the_softmax_of_the_logits_best_first(extended: api.Model, val: Samples) -> None:
    picture = val.read(50)
    answers = extended.predict(picture, top=1000)
    assert sum(p for _, p in answers) == pytest.approx(1, abs=1e-6)
    assert {name for name, _ in answers} == set(extended.classes)
    assert [p for _, p in answers] == sorted((p for _, p in answers), reverse=True)
    assert extended.predict(picture, top=2) == answers[:2]
    pixels = torch.from_numpy(picture[:, :, 0].astype(np.float32) / 255)
    with torch.no_grad():
        scores = extended.classifier(((pixels - 0.5) / 0.25)[None, None])[0].double().numpy()
    expected = np.exp(scores) / np.exp(scores).sum()
    assert dict(answers) == {n: pytest.approx(p, abs=1e-5) for n, p in zip(extended.classes, expected, strict=True)}


def test_more_pictures_than_a_batch(extended: api.Model, val: Samples) -> None:
    count = 64 + 3
    several = extended.predict([val.read(n) for n in range(count)], top=1)
    assert len(several) == count
    for n in (0, 63, 64, 66):
        name, p = extended.predict(val.read(n), top=1)[0]
        assert several[n][0] == (name, pytest.approx(p, abs=1e-5))


def test_flip_averages_the_picture_and_its_mirror_image(photographs: api.Model) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    flipped = dict(photographs.predict(picture, top=7, flip=True))
    scores = []
    for one in (picture, picture[:, ::-1]):
        pixels = (one.transpose(2, 0, 1) / 255 - np.reshape([0.5, 0.4, 0.3], (3, 1, 1))) / np.reshape(
            [0.2, 0.3, 0.4], (3, 1, 1)
        )
        with torch.no_grad():
            scores.append(photographs.classifier(torch.tensor(pixels, dtype=torch.float32)[None])[0].double().numpy())
    mean = (scores[0] + scores[1]) / 2
    expected = np.exp(mean) / np.exp(mean).sum()
    assert flipped == {n: pytest.approx(p, abs=1e-5) for n, p in zip(photographs.classes, expected, strict=True)}
    assert dict(photographs.predict(picture, top=7)) != {n: pytest.approx(p, abs=1e-5) for n, p in flipped.items()}


def test_characters_are_not_mirrored(extended: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="A mirrored character is another character"):
        extended.predict(val.read(0), flip=True)
    with pytest.raises(BranchoutError, match="A mirrored character is another character"):
        extended.evaluate(val.of_classes(BASE), flip=True)


def test_files_that_cannot_be_read_are_named(extended: api.Model, tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("no picture")
    with pytest.raises(BranchoutError, match=r"note\.png"):
        extended.predict(tmp_path / "note.png")
    with pytest.raises(BranchoutError, match=r"gone\.png"):
        extended.predict(tmp_path / "gone.png")


def test_arrays_become_samples(val: Samples) -> None:
    images = np.stack([val.read(n) for n in range(5)])
    samples = api.as_samples(images, ["b", "a", "b", "c", "a"])
    assert samples.classes == ("a", "b", "c")
    assert samples.names.tolist() == ["b", "a", "b", "c", "a"]
    assert len(set(samples.ids.tolist())) == 5
    assert all(np.array_equal(samples.read(n), images[n]) for n in range(5))
    with pytest.raises(BranchoutError, match="uint8"):
        api.as_samples(images / 255, ["b", "a", "b", "c", "a"])
    with pytest.raises(BranchoutError):
        api.as_samples(images[0], ["a"])


def test_fewer_names_than_arrays_are_refused(val: Samples) -> None:
    images = np.stack([val.read(n) for n in range(5)])
    for names in (["a", "b"], ["a"] * 6):
        with pytest.raises(BranchoutError, match=f"5 images.*{len(names)} names"):
            api.as_samples(images, names)


# Opening.


def test_what_cannot_be_opened_is_answered(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "cat.png").write_text("x")
    torch.save({"x": torch.zeros(1)}, tmp_path / "w.pth")
    (tmp_path / "v2.onnx").write_bytes(b"x")
    for name, arch, words in (
        ("resnet118", None, "no saved model resnet118.*timm has no network called 'resnet118'. Did you mean .*resnet1"),
        ("glyph", None, "no saved model glyph.*Did you mean glyphs"),
        ("efficientnet_lite3", None, "no published weights of efficientnet_lite3.*efficientnet_lite2.*--arch"),
        (tmp_path / "v2.onnx", None, r"v2\.onnx is a file.*give the folder that it was exported from"),
        (tmp_path / "folder", None, r"is not a saved model.*branchout\.json.*found cat\.png"),
        (tmp_path / "nothing", None, r"There is no saved model .*nothing\. A saved model is a folder"),
        (tmp_path / "w.pth", None, r"holds weights of an unknown network. Name its architecture: --arch"),
        (tmp_path / "w.pth", "resnet81", "timm has no network called 'resnet81'"),
        (tmp_path / "w.pth", "resnet18", r"no fc\.weight, only x"),
    ):
        with pytest.raises(BranchoutError, match=words):
            api.load(name, arch=arch)


def test_a_checkpoint_is_opened_with_its_architecture(tmp_path: Path) -> None:
    import timm

    network = timm.create_model("test_resnet", num_classes=3)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    model = api.load(tmp_path / "w.pth", arch="test_resnet", classes=["ant", "bee", "cat"])
    assert model.classes == ("ant", "bee", "cat")
    picture = np.random.default_rng(0).integers(0, 256, (200, 170, 3), dtype=np.uint8)
    assert sum(p for _, p in model.predict(picture)) == pytest.approx(1, abs=1e-6)
    model.save(tmp_path / "saved")
    assert api.load(tmp_path / "saved").predict(picture) == model.predict(picture)
    with pytest.raises(BranchoutError, match="3 classes, but 2 names"):
        api.load(tmp_path / "w.pth", arch="test_resnet", classes=["ant", "bee"])


def test_unknown_architectures_and_operating_points_of_a_base(base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match=r"no architecture is called 'resnet99'; did you mean resnet"):
        api.pretrain(train, arch="resnet99")
    with pytest.raises(BranchoutError, match="A base model has no operating points"):
        base.tune("all")


def test_the_pooler_is_set_by_the_first_step(extended: api.Model, base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match="This model pools with 'max'"):
        extended.extend(train.of_classes(NEW), memory=exemplars(train), pooler="average")
    names = [*NEW, BASE[1]]
    grown = base.extend(train.of_classes(names), memory=exemplars(train), pooler="average", epochs=1, views=1)
    assert grown.classifier.fused.pooler.kind == "average"
    assert base.classifier.fused.pooler.kind == "max"


def test_what_extend_warns_of_and_plans_reaches_python(extended: api.Model, train: Samples) -> None:
    new, kept = train.of_classes(LATER), exemplars(train)
    with pytest.warns(UserWarning, match="no images for .* classes added earlier") as caught:
        extended.extend(new, memory=kept, epochs=1)
    assert {warning.filename for warning in caught} == {__file__}  # the line that can be changed
    warned: list[str] = []
    planned: list[str] = []
    extended.extend(new, memory=kept, epochs=1, minutes=1, warn=warned.append, announce=planned.append)
    assert any("classes added earlier" in line for line in warned)
    assert planned[0].startswith("plan: ")


def test_several_folders_are_one_memory_in_any_order(train: Samples, tmp_path: Path) -> None:
    one = class_folders(train, tmp_path / "one", BASE[:2], 3)
    two = class_folders(train, tmp_path / "two", [BASE[1], NEW[0]], 2)
    both = api.samples_in([one, two])
    assert both.counts() == {BASE[0]: 3, BASE[1]: 3, NEW[0]: 2}  # two of the second are in both
    assert api.samples_in((str(two), one)).fingerprint() == both.fingerprint()
    assert len(api.samples_in([train, one])) == len(train) + 6
    assert len(api.samples_in(iter([one, two]))) == len(both)
    wrong = [([], "empty list"), ([one, f"{one}/"], "one"), ([two, tmp_path / "typo"], "typo"), ([one, None], "None")]
    for sources, said in (*wrong, (None, "None"), (3, "int")):
        with pytest.raises(BranchoutError, match=said):
            api.samples_in(sources)


def test_an_image_in_two_folders_counts_once(train: Samples, tmp_path: Path) -> None:
    one = class_folders(train, tmp_path / "one", BASE[:2], 3)
    two = class_folders(train, tmp_path / "two", BASE[:1], 4)  # the first three are those of the other folder
    class_folders(train, tmp_path / "swapped", BASE[:1], 1)
    (tmp_path / "swapped" / BASE[0]).rename(tmp_path / "swapped" / BASE[1])
    told: list[str] = []
    assert api.samples_in([one, two], told).counts() == {BASE[0]: 4, BASE[1]: 3}
    assert any("3" in line and str(two) in line for line in told)
    told.clear()
    both = api.samples_in([one, tmp_path / "swapped"], told)
    assert both.counts() == {BASE[0]: 3, BASE[1]: 4}  # which class is right is not ours to judge
    assert any(str(tmp_path / "swapped") in line for line in told)


def test_the_package_offers_what_it_says() -> None:
    assert branchout.load is api.load
    for name in branchout.__all__:
        assert getattr(branchout, name) is not None


# Measuring.


@pytest.fixture(scope="module")
def measured(extended_twice: api.Model, val: Samples) -> tuple[Comparison, Samples]:
    # In table order nothing could be mixed up unseen.
    shuffled = val.select(np.random.default_rng(0).permutation(len(val)))
    return extended_twice.evaluate(shuffled), shuffled


def answers_one_by_one(model: Classifier, samples: Samples) -> list[str]:
    images = open_images(samples, model.preprocessing, torch.device("cpu"))
    with torch.no_grad():
        return [model.space.classes[int(model(one).argmax())] for one in images.plain(in_order(len(samples), 1))]


def test_before_and_after_of_every_class(
    measured: tuple[Comparison, Samples], extended: api.Model, extended_twice: api.Model
) -> None:
    comparison, samples = measured
    after = answers_one_by_one(extended_twice.classifier, samples)
    before = answers_one_by_one(extended.classifier, samples)
    rows = {row.name: row for row in comparison.classes()}
    assert set(rows) == set(samples.classes)
    for name in samples.classes:
        own = [n for n, actual in enumerate(samples.names) if actual == name]
        row = rows[name]
        assert row.images == len(own)
        assert row.after == pytest.approx(sum(after[n] == name for n in own) / len(own))
        if name in extended.classes:
            assert row.before == pytest.approx(sum(before[n] == name for n in own) / len(own))
        else:
            assert row.before is None
    losses = [(r.after - r.before) if r.before is not None else r.after - 1 for r in comparison.classes()]
    assert losses == sorted(losses)
    hits = [a == b for a, b in zip(after, samples.names, strict=True)]
    assert comparison.after.all == pytest.approx(np.mean(hits))
    known = [n for n, name in enumerate(samples.names) if name in extended.classes]
    assert comparison.before.all == pytest.approx(np.mean([before[n] == samples.names[n] for n in known]))


def test_a_base_has_no_before(base: api.Model, val: Samples) -> None:
    comparison = base.evaluate(val.of_classes(BASE))
    assert comparison.before is None
    assert all(row.before is None for row in comparison.classes())
    assert comparison.after.all == comparison.after.base > 2 / len(BASE)


def test_no_images_are_no_evaluation(base: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match="no images to evaluate"):
        base.evaluate(val.select(np.zeros(0, dtype=np.int64)))
    with pytest.raises(BranchoutError, match="no images to evaluate"):
        base.report_data(val.select(np.zeros(0, dtype=np.int64)))


@pytest.mark.parametrize("form", ["{}", "{}>=0.5"])
def test_a_goal_that_no_image_measures_is_refused_before_training(
    form: str, base: api.Model, train: Samples, val: Samples
) -> None:
    def refused(goal: str, new: Samples, reason: str, **given: Samples) -> None:
        with pytest.raises(BranchoutError, match=f"cannot be used: {reason}") as caught:
            base.prepare(new, config=ExtendConfig(goal=form.format(goal)), **given)
        assert goal not in str(caught.value).rpartition("Choose one of")[2]

    both = train.of_classes([*NEW, BASE[0]])
    refused("overlap", train.of_classes(NEW), "there are no classes that several branches know")
    refused("overlap", both, "no validation image that chooses", val=val.of_classes([*NEW, *BASE[1:]]))
    refused(
        "novel", train.of_classes(BASE[:2]), "there are no classes that only new branches know", memory=exemplars(train)
    )
    refused("base", train.of_classes(BASE), "there are no classes that only the base knows")
    for goal in ("overlap", "novel", "base"):
        config = ExtendConfig(goal=form.format(goal))
        assert base.prepare(both, memory=exemplars(train), config=config).config.goal == config.goal
        if goal != "overlap":  # pseudo-exemplars stand for the base
            base.prepare(train.of_classes(NEW), config=config)


def test_what_cannot_be_trained_is_refused_before_training(base: api.Model, train: Samples) -> None:
    with pytest.raises(BranchoutError, match="too few images of new classes"):
        base.prepare(train.select(np.zeros(0, dtype=np.int64)))
    with pytest.raises(BranchoutError, match="--memory has no images"):
        base.prepare(train.of_classes(NEW), memory=train.select(np.zeros(0, dtype=np.int64)))
    with pytest.raises(BranchoutError, match="seed must be a whole number of at least 0 and at most"):
        base.extend(train.of_classes(NEW), seed=2**64)


def test_a_scenario_takes_neither_samples_nor_val(train: Samples, tmp_path: Path) -> None:
    with pytest.raises(BranchoutError, match="instead of samples"):
        api.pretrain(train, scenario=tmp_path / "any.json")
    with pytest.raises(BranchoutError, match="Leave out val"):
        api.pretrain("glyphs", scenario=tmp_path / "any.json", val=train)


def test_problems_of_validation_images_are_told(train: Samples, tmp_path: Path) -> None:
    folder = class_folders(train, tmp_path / "val", NEW, 2)
    (folder / NEW[0] / "broken.png").write_bytes(b"")
    warnings: list[str] = []
    api.pretrain(train.of_classes(NEW), val=folder, epochs=1, width=8, size=32, kind="glyph", warn=warnings.append)
    assert any("broken.png" in line for line in warnings)


def test_classes_the_model_does_not_know_are_named(base: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match=f"does not know 1 of these classes: {NEW[0]}. It knows 8 others"):
        base.evaluate(val.of_classes([*BASE, NEW[0]]))


def test_columns_give_the_answers_at_any_point(measured: tuple[Comparison, Samples], extended_twice: api.Model) -> None:
    comparison, _ = measured
    points = extended_twice.saved.step_points[-1]
    biases = points.biases(2)
    assert np.array_equal(dial.predict(comparison.columns, comparison.space, biases), comparison.answers)


@pytest.mark.parametrize("goal", ["balanced", "all", "avg"])
def test_two_fold_chooses_on_one_half_and_measures_on_the_other(
    goal: str, measured: tuple[Comparison, Samples], extended_twice: api.Model
) -> None:
    comparison, _ = measured
    found = extended_twice.two_fold(comparison, goal, seed=4)
    order = np.random.default_rng(4).permutation(len(comparison.labels))
    halves: list[list[int]] = [[], []]
    turn = 0
    for label in range(len(comparison.space.classes)):
        for n in order:
            if comparison.labels[n] == label:
                halves[turn % 2].append(int(n))
                turn += 1
    parts = [(comparison.columns[half], comparison.labels[half]) for half in halves]
    scored = two_fold.score_dial(parts[0], parts[1], comparison.space, [goal])[goal]
    assert (found.test, found.two_fold, found.spread) == (scored.test, scored.two_fold, scored.spread)
    # and score_dial is what it says
    figures = []
    for (columns, labels), (others, actual) in (parts, parts[::-1]):
        offsets = dial.step_offsets(columns, labels, comparison.space)
        moved = dial.with_bias(columns, comparison.space, offsets)
        curve = dial.dial_frontier(moved, labels, comparison.space)
        biases = [offset + curve.settings[curve.choose(goal), 0] for offset in offsets]
        answers = dial.predict(others, comparison.space, biases)
        figures.append(getattr(accuracies(answers, actual, comparison.space), goal))
    assert found.two_fold == pytest.approx(np.mean(figures))
