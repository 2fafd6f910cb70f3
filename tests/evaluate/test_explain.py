"""An explanation's numbers are the model's own, and they add up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from helpers import fixed_batch, untrained

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.evaluate.explain import Explanation, branch_shares, explain
from branchout.labels import LabelSpace, branch_name
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead, FusedHead

BRANCHES = (("a", "b", "c", "d"), ("e", "b"), ("f", "a", "b"))


def mixed(pooler: str, where: tuple[str, ...] = ("last", "last"), *, deltas: bool = True, seed: int = 1) -> Classifier:
    """Three branches that share classes, with deltas as strong as logits and a dial for each step."""
    plain = untrained(*BRANCHES, where=where)
    model = plain.rebuilt(plain.steps, pooler)
    generator = torch.Generator().manual_seed(seed)
    if deltas:
        trained: list[torch.Tensor | None] = [
            torch.randn(len(sources) * model.backbone.features, len(names), generator=generator) * 0.3
            for sources, names in zip(model.fused.delta_inputs, BRANCHES, strict=True)
        ]
        trained[1] = None  # no deltas were trained for step 1
        model.fused.deltas = trained
    model.fused.set_bias([0.7, -0.4])
    return model.on_device(torch.device("cpu"))


def every_class(model: Classifier, image: torch.Tensor) -> Explanation:
    return explain(model, None, image, top=len(model.space.classes))


@torch.no_grad()
def slowly(model: Classifier, image: torch.Tensor) -> dict[tuple[int, str], tuple[float, float, float]]:
    """For every branch and class the own logit, what is added and the dial: the formulas, term by term."""
    vectors = [h[0].double().tolist() for h in model.features(model.backbone.arrange(image))]
    unit = [[4 * x / math.sqrt(sum(y * y for y in h)) for x in h] for h in vectors]
    found = {}
    numbers = iter(range(model.space.columns))
    for branch, names in enumerate(model.space.branches):
        weights = model.fused.heads[branch].weight.double().tolist()
        for row, name in enumerate(names):
            length = math.sqrt(sum(w * w for w in weights[row]))
            h = unit[model.fused.feature_of[branch]]
            own = sum(x * 4 * w / length for x, w in zip(h, weights[row], strict=True))
            delta = 0.0
            if model.fused.deltas[branch] is not None:
                inputs = [x for source in model.fused.delta_inputs[branch] for x in unit[source]]
                matrix = model.fused.deltas[branch].double().tolist()
                delta = sum(x * line[row] for x, line in zip(inputs, matrix, strict=True))
            column = next(numbers)
            for later, step in enumerate(model.steps[branch:], branch + 1):
                if step.correction is not None:
                    inputs = unit[model.fused.feature_of[later]]
                    delta += sum(x * w for x, w in zip(inputs, step.correction.weight[:, column].tolist(), strict=True))
            found[branch, name] = own, delta, model.fused.bias[branch].item()
    return found


@pytest.mark.parametrize("pooler", ["max", "average"])
@pytest.mark.parametrize("where", [("last", "last"), ("layer3", "fc")])
def test_the_parts_are_those_of_the_formulas(pooler: str, where: tuple[str, ...]) -> None:
    model = mixed(pooler, where)
    for image in fixed_batch(3).split(1):
        expected = slowly(model, image)
        why = every_class(model, image)
        assert {score.name for score in why.answers} == set("abcdef")
        seen = 0
        for score in why.answers:
            for column in score.columns:
                own, delta, dial = expected[column.branch, score.name]
                assert column.own == pytest.approx(own, abs=1e-4)
                assert column.delta == pytest.approx(delta, abs=1e-4)
                assert column.dial == pytest.approx(dial, abs=1e-6)
                seen += 1
        assert seen == len(expected)


@pytest.mark.parametrize("deltas", [True, False])
def test_logits_are_the_models_to_the_bit_and_parts_add_up(deltas: bool) -> None:
    model = mixed("max", deltas=deltas)
    for image in fixed_batch(8).split(1):
        with torch.no_grad():
            fused = model(model.backbone.arrange(image))[0].numpy()
        why = every_class(model, image)
        assert [v.logit for v in why.answers] == sorted((float(z) for z in fused), reverse=True)
        for score in why.answers:
            logit = fused[model.space.index([score.name])[0]]
            sums = []
            for column in score.columns:
                assert column.own + column.delta + column.dial == pytest.approx(column.logit, abs=1e-5)
                sums.append(column.logit)
                assert deltas or column.branch < 2 or column.delta == 0  # the last branch is not corrected
            assert max(sums) == float(logit) == score.logit
            assert [column.counts for column in score.columns] == [z == max(sums) for z in sums]
            assert sum(score.parts().values()) == pytest.approx(score.logit, abs=1e-5)


def test_an_average_adds_up_too() -> None:
    model = mixed("average")
    for image in fixed_batch(4).split(1):
        with torch.no_grad():
            fused = model(model.backbone.arrange(image))[0]
        for score in every_class(model, image).answers:
            logit = fused[model.space.index([score.name])[0]].item()
            assert all(column.counts for column in score.columns)
            mean = sum(column.logit for column in score.columns) / len(score.columns)
            assert mean == pytest.approx(logit, abs=1e-5)
            assert sum(score.parts().values()) == pytest.approx(logit, abs=1e-5)
            assert score.logit == logit


def test_probabilities_are_those_of_the_model(extended_twice: api.Model, val: Samples) -> None:
    for number in range(0, len(val), 17):
        picture = val.read(number)
        why = extended_twice.explain(picture, top=3)
        assert [(v.name, pytest.approx(v.probability, abs=1e-6)) for v in why.answers] == extended_twice.predict(
            picture, top=3
        )


def test_what_it_would_be_without_dial_and_deltas() -> None:
    """The counterfactual answers are those of models whose dial is at zero and whose deltas are gone."""
    seen = set()
    for seed in range(6):
        model, still, bare = mixed("max", seed=seed), mixed("max", seed=seed), mixed("max", deltas=False)
        model.fused.set_bias([(-4.0) ** seed, 3.0])
        still.fused.set_bias(0.0)
        bare.fused.set_bias(0.0)
        for image in fixed_batch(2, seed).split(1):
            why = every_class(model, image)
            with torch.no_grad():
                answers = [m.space.classes[int(m(image).argmax())] for m in (model, still, bare)]
            assert [why.winner.name, why.without_dial, why.own_answer] == answers
            seen.add((answers[0] == answers[1], answers[1] == answers[2]))
    assert {at_dial for at_dial, _ in seen} == {at_deltas for _, at_deltas in seen} == {True, False}


def test_each_branch_speaks_for_itself_and_the_old_model_beside_it(extended_twice: api.Model, val: Samples) -> None:
    classifier = extended_twice.classifier
    before = api.Model(extended_twice.saved, None, torch.device("cpu"))
    before.classifier = extended_twice.saved.model(1)
    for number in (3, 50, 90):
        picture = val.read(number)
        why = extended_twice.explain(picture, top=2)
        image = classifier.preprocessing.normalise(classifier.preprocessing.prepare(picture)[None])
        with torch.no_grad():
            features = classifier.features(classifier.backbone.arrange(image))
            for branch, told in enumerate(why.branches):
                own = classifier.fused.heads[branch](features[classifier.fused.feature_of[branch]])[0]
                values, places = own.sort(descending=True)
                names = classifier.space.branches[branch]
                assert told == tuple(
                    (names[n], pytest.approx(z)) for z, n in zip(values[:2].tolist(), places[:2].tolist(), strict=True)
                )
        [(name, probability)] = before.predict(picture, top=1)
        assert why.before == (name, pytest.approx(probability, abs=1e-6))
        overlap = {c for c in extended_twice.classes if sum(c in b for b in classifier.space.branches) > 1}
        owners = [branch_name(n) for n, b in enumerate(classifier.space.branches) if why.winner.name in b]
        assert why.known == " and ".join(owners)
        assert (" and " in why.known) == (why.winner.name in overlap)


def test_neighbours_are_the_nearest_in_the_winning_branch(
    extended_twice: api.Model, train: Samples, val: Samples
) -> None:
    album = train.select(np.arange(0, len(train), 9))
    classifier = extended_twice.classifier
    winners = set()
    for number in range(0, len(val), 13):
        picture = val.read(number)
        why = extended_twice.explain(picture, memory=album, nearest=4)
        place = classifier.fused.feature_of[why.winner.branch]
        winners.add(place)

        def vector(pixels: np.ndarray, place: int = place) -> np.ndarray:
            image = classifier.preprocessing.normalise(classifier.preprocessing.prepare(pixels)[None])
            with torch.no_grad():
                h = classifier.features(classifier.backbone.arrange(image))[place][0].double().numpy()
            return h / np.linalg.norm(h)

        cosines = np.array([vector(picture) @ vector(album.read(n)) for n in range(len(album))])
        nearest = np.argsort(-cosines)[:4]
        assert [n.cosine for n in why.nearest] == pytest.approx(cosines[nearest].tolist(), abs=1e-5)
        assert [n.file for n in why.nearest] == [str(album.ids[n]) for n in nearest]
        assert [n.name for n in why.nearest] == [str(album.names[n]) for n in nearest]
    assert len(winners) > 1  # else one branch's features would do for all


def test_a_base_has_one_branch_and_no_past(base: api.Model, val: Samples) -> None:
    why = base.explain(val.read(0), top=50)
    assert why.before is None
    assert len(why.branches) == 1
    assert why.own_answer == why.without_dial == why.winner.name
    assert len(why.answers) == len(base.classes)
    for score in why.answers:
        assert [(c.own, c.delta, c.dial) for c in score.columns] == [(score.logit, 0, 0)]


def test_it_travels_as_json(extended_twice: api.Model, val: Samples) -> None:
    two = extended_twice.explain([val.read(0), val.read(30)], memory=val)
    told = json.loads(json.dumps([why.to_dict() for why in two]))
    assert len(told) == 2
    for why, plain in zip(two, told, strict=True):
        assert plain["answers"][0]["class"] == why.winner.name
        assert plain["answers"][0]["columns"][0]["branch"] in ("the base", "step 1", "step 2")
        assert [n["file"] for n in plain["nearest"]] == [n.file for n in why.nearest]
        assert [b["branch"] for b in plain["branches"]] == ["the base", "step 1", "step 2"]


# An expected class.


def test_a_class_that_lost_is_compared_with_the_winner() -> None:
    model = mixed("max")
    for image in fixed_batch(4).split(1):
        every = every_class(model, image)
        for place, score in enumerate(every.answers, 1):
            found = explain(model, None, image, top=1, expect=score.name).expected
            assert found is not None
            assert found.place == place
            assert found.score == score
            assert sum(found.lead.values()) == pytest.approx(every.winner.logit - score.logit, abs=1e-4)


@pytest.mark.parametrize("pooler", ["max", "average"])
def test_the_dial_that_would_make_a_class_win(pooler: str) -> None:
    """Just beyond the change the class wins, just before it does not; where there is none, it never wins."""
    seen = set()
    for seed in range(8):
        model = mixed(pooler, seed=seed)
        biases = model.fused.bias[1:].clone()
        (image,) = fixed_batch(1, seed).split(1)

        def answer(model: Classifier = model, image: torch.Tensor = image) -> str:
            with torch.no_grad():
                return model.space.classes[int(model(model.backbone.arrange(image)).argmax())]

        for name in model.space.classes:
            model.fused.set_bias(biases.tolist())
            found = explain(model, None, image, expect=name).expected
            assert found is not None
            change = found.dial_change
            seen.add(None if change is None else int(np.sign(change)))
            if change is None:
                for b in np.linspace(-60, 60, 41):
                    model.fused.set_bias((biases + b).tolist())
                    assert answer() != name
            elif change:
                for nudge, wins in ((1e-3, True), (-1e-3, False)):
                    model.fused.set_bias((biases + change + nudge * np.sign(change)).tolist())
                    assert (answer() == name) == wins
            else:
                assert answer() == name
    assert {None, 0} < seen


def test_an_unknown_class_is_answered_with_similar_names(extended: api.Model, val: Samples) -> None:
    with pytest.raises(BranchoutError, match=r"no class is called 'greek capital letter omeg'.*omega"):
        extended.explain(val.read(0), expect="greek capital letter omeg")


@pytest.mark.parametrize("pooler", ["max", "average"])
def test_shares_of_branches_by_hand(pooler: str) -> None:
    space = LabelSpace.of(["a", "b", "c"], ["b", "d"], ["d", "b"])
    head = FusedHead(space, [CosineHead(4, 3), CosineHead(4, 2), CosineHead(4, 2)], [0, 1, 2], pooler)
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 2
    head.set_bias([0.5, -0.25])
    found = branch_shares(head, z)
    z = z + torch.tensor([0, 0, 0, 0.5, 0.5, -0.25, -0.25])
    for row, shares in zip(z.tolist(), found.tolist(), strict=True):
        columns = {"a": [0], "b": [1, 3, 6], "c": [2], "d": [4, 5]}
        pooled = {
            name: max(row[c] for c in own) if pooler == "max" else sum(row[c] for c in own) / len(own)
            for name, own in columns.items()
        }
        total = sum(math.exp(value) for value in pooled.values())
        expected = [0.0, 0.0, 0.0]
        for name, own in columns.items():
            brought = math.exp(pooled[name]) / total
            winners = [max(own, key=lambda c: row[c])] if pooler == "max" else own
            for column in winners:
                expected[[0, 0, 0, 1, 1, 2, 2][column]] += brought / len(winners)
        assert shares == pytest.approx(expected, abs=1e-6)
        assert sum(shares) == pytest.approx(1, abs=1e-6)
