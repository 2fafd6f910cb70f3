"""What `check` says about the images of an extension."""

from dataclasses import replace

import torch
from helpers import BASE, NEW, exemplars

from branchout import api
from branchout.data.memory import keep
from branchout.data.samples import Samples, concatenate
from branchout.method.config import ExtendConfig
from branchout.method.running.effort import BRANCHES, SMALL_INPUTS, Effort, Plan
from branchout.method.running.forecast import forecast
from branchout.method.running.prepared_extension import Prepared
from branchout.method.split import DataSplit


def test_classes_whose_only_images_are_held_out_are_not_called_missing(base: api.Model, train: Samples) -> None:
    model = base.saved.classifier
    split = DataSplit.of(model.space, train.of_classes(NEW), exemplars(train), None, 0)
    assert split.memory is not None
    missing, single = BASE[0], BASE[1]
    split = replace(
        split,
        memory=split.memory.of_classes(BASE[2:]),
        dev=split.dev.of_classes([*BASE[1:], *NEW]),
        test=split.test.of_classes([*BASE[1:], *NEW]),
    )
    prepared = Prepared(model, split, ExtendConfig(), ())
    plan = Plan("last", SMALL_INPUTS, seconds=1.0)
    told = list(forecast(prepared, plan, device=torch.device("cpu"), base_bytes=0))
    assert [line for line in told if missing in line] == [f"  no image of: {missing}"]
    (about,) = [line for line in told if single in line]
    assert "held-out" in about


def told_of(split: DataSplit, base: api.Model, recipe: str = "branchout", effort: Effort = SMALL_INPUTS) -> list[str]:
    prepared = Prepared(base.saved.classifier, split, ExtendConfig(recipe=recipe), ())
    return list(forecast(prepared, Plan("last", effort, seconds=1.0), device=torch.device("cpu"), base_bytes=0))


def test_held_out_halves_choose_for_each_other_where_there_is_a_dial(
    base: api.Model, train: Samples, val: Samples
) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    held = DataSplit.of(space, new, exemplars(train), None, 0)
    given = DataSplit.of(space, new, exemplars(train), val.of_classes([*BASE, *NEW]), 0)
    for split, recipe, cross in ((held, "branchout", True), (held, "paper", False), (given, "branchout", False)):
        (line,) = [line for line in told_of(split, base, recipe) if line.startswith("validation: ")]
        assert ("each tested at the point that the others choose" in line) == cross
        assert ("to choose with" in line) != cross


def test_a_half_that_ends_the_training_measures_nothing(base: api.Model, train: Samples) -> None:
    split = DataSplit.of(base.saved.classifier.space, train.of_classes(NEW), exemplars(train), None, 0)
    assert BRANCHES[0].stops
    (line,) = [line for line in told_of(split, base, effort=BRANCHES[0]) if line.startswith("validation: ")]
    assert "that the others choose" not in line
    assert f"{len(split.dev)} to end training" in line
    assert f"{len(split.test)} to test" in line


def test_every_held_out_image_has_a_role(base: api.Model, train: Samples) -> None:
    lacking = DataSplit.of(base.saved.classifier.space, train.of_classes(NEW), exemplars(train, BASE[1:]), None, 0)
    assert lacking.halves_cross
    assert lacking.calibration is not None
    (line,) = [line for line in told_of(lacking, base) if line.startswith("validation: ")]
    assert f": {sum(lacking.held_out)} images" in line
    assert f"{len(lacking.calibration)} to calibrate" in line


def memory_line(split: DataSplit, base: api.Model) -> str:
    return next(line for line in told_of(split, base) if line.startswith("memory: "))


def test_old_classes_are_those_of_memory_whether_their_images_train_or_are_held_out(
    base: api.Model, train: Samples, val: Samples
) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    of_val = DataSplit.of(space, new, exemplars(train, BASE[:3]), val.of_classes([*BASE, *NEW]), 0)
    assert " of 3 old classes to train on" in memory_line(of_val, base)
    kept = DataSplit.of(space, new, exemplars(train), None, 0)
    assert kept.memory is not None
    fewer = replace(kept, memory=kept.memory.of_classes(BASE[1:]))  # the only image of a class may be held out
    assert f" of {len(BASE)} old classes: " in memory_line(fewer, base)


def test_an_old_class_with_new_images_alone_is_none_of_memory(base: api.Model, train: Samples) -> None:
    new = train.of_classes([*NEW, BASE[0]])
    split = DataSplit.of(base.saved.classifier.space, new, exemplars(train, BASE[1:]), None, 0)
    assert BASE[0] in {*split.dev.classes, *split.test.classes}
    assert f" of {len(BASE) - 1} old classes: " in memory_line(split, base)
    assert [line for line in told_of(split, base) if BASE[0] in line and "only held-out" in line] == []


def test_why_old_accuracy_cannot_be_measured(base: api.Model, train: Samples, val: Samples) -> None:
    space, new = base.saved.classifier.space, train.of_classes(NEW)
    without = DataSplit.of(space, new, None, None, 0)
    few = DataSplit.of(space, new, exemplars(train, BASE[:3]), None, 0)
    for split, reason in ((without, f"0 of {len(BASE)} old classes"), (few, f"3 of {len(BASE)} old classes")):
        assert split.chosen_on == "pseudo"
        (line,) = [line for line in told_of(split, base) if "cannot be measured" in line]
        assert reason in line
        assert "pseudo-exemplars choose the operating point" in line
    both = DataSplit.of(space, train.of_classes([*NEW, BASE[0]]), exemplars(train, BASE[:1]), None, 0)
    assert BASE[0] in {*both.dev.classes, *both.test.classes}
    assert f"0 of {len(BASE) - 1} old classes without new images" in both.unmeasured
    one_each = keep(exemplars(train), per_class=1, seed=0)  # too few to hold any out
    every = DataSplit.of(space, concatenate([train.of_classes(NEW), one_each]), None, None, 0)
    assert f"of {len(BASE)} old classes have" in every.unmeasured
