"""The whole model: how its parts are joined, what it computes, and that it stays frozen."""

import pytest
import torch
from helpers import BASE, LATER, NEW, fixed_batch, same, snapshot, untrained

from branchout.errors import BranchoutError
from branchout.model.staged import branch_point


def test_logits_are_those_of_the_parts_put_together_by_hand() -> None:
    model = untrained(BASE, (*NEW, BASE[2]), LATER, where=["layer4", "layer3"])
    pictures = fixed_batch(3)
    model.fused.set_bias([0.5, -2.0])
    with torch.no_grad():
        found = model(pictures)
        x, inputs = pictures, {}
        for name in model.backbone.names:
            inputs[name] = x
            x = model.backbone.get_submodule(name)(x)
        h = [x]
        h.append(model.steps[0].branch.get_submodule("layer4")(inputs["layer4"]))
        third = model.steps[1].branch
        h.append(third.get_submodule("layer4")(third.get_submodule("layer3")(inputs["layer3"])))
        assert model.steps[0].correction is None
        correction = model.steps[1].correction
        assert correction is not None
        for i in range(3):
            score: dict[str, float] = {}
            column = 0
            for d, names in enumerate(model.space.branches):
                for row, name in zip(model.fused.heads[d].weight, names, strict=True):
                    value = 16 * float(h[d][i] @ row / (h[d][i].norm() * row.norm())) + [0, 0.5, -2.0][d]
                    if d < 2:  # the second step corrects the logits of the base and of the first
                        value += float(4 * h[2][i] / h[2][i].norm() @ correction.weight[:, column])
                    column += 1
                    score[name] = max(score.get(name, -1e9), value)
            assert found[i].tolist() == pytest.approx([score[name] for name in model.space.classes], abs=1e-4)


def test_feature_numbers_skip_branches_that_clone_nothing() -> None:
    model = untrained(BASE, NEW, LATER, BASE[:1], BASE[1:2], where=["fc", "last", "fc", "layer4.0.conv2"])
    assert model.fused.feature_of == (0, 0, 1, 0, 2)
    features = model.features(fixed_batch(2))
    assert len(features) == 3
    assert torch.allclose(features[0], model.backbone(fixed_batch(2)), atol=1e-6)
    assert not torch.allclose(features[2], features[0], atol=1e-3)


def test_each_stage_runs_once_whatever_branches_off_it() -> None:
    model = untrained(BASE, NEW, LATER, where=["layer3", "layer4"])
    counts: dict[str, int] = {}
    for name in model.backbone.names:
        stage = model.backbone.get_submodule(name)
        stage.register_forward_hook(lambda *_, name=name: counts.__setitem__(name, counts.get(name, 0) + 1))
    model(fixed_batch(2))
    assert counts == dict.fromkeys(model.backbone.names, 1)


def test_nothing_in_it_trains_whatever_train_is_called() -> None:
    model = untrained(BASE, NEW)
    before, answers = snapshot(model), model(fixed_batch())
    model.train()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(fixed_batch()), answers)
    assert same(snapshot(model), before)


def test_an_extended_model_shares_the_weights_and_leaves_the_old_one_alone() -> None:
    model, donor = untrained(BASE, NEW), untrained(BASE, NEW, LATER, seed=9)
    model.fused.set_bias(1.5)
    answers = model(fixed_batch())
    grown = model.extended(donor.steps[1])
    assert grown.space.branches == (BASE, NEW, LATER)
    grown.fused.set_bias(-3.0)
    assert torch.equal(model(fixed_batch()), answers)
    assert grown.backbone is model.backbone
    assert grown.fused.heads[0] is model.fused.heads[0]
    assert model.rebuilt(model.steps).fused.bias.tolist() == [0.0, 0.0]


def test_a_pooler_can_be_changed_only_by_rebuilding() -> None:
    model = untrained(BASE, (*NEW, BASE[0]))
    averaged = model.rebuilt(model.steps, "average")
    assert averaged.fused.pooler.kind == "average"
    assert not torch.equal(averaged(fixed_batch()), model(fixed_batch()))
    with pytest.raises(BranchoutError, match="no pooler is called 'median'"):
        model.rebuilt(model.steps, "median")


@pytest.mark.parametrize("where", ["last", "layer3", "layer4.0.conv2", "fc"])
def test_parameter_counts_add_up(where: str) -> None:
    model = untrained(BASE, NEW, where=[where])
    counts = model.parameter_counts()
    own = {id(p): p.numel() for p in model.parameters()}
    assert counts["base"] + counts["step 1"] + counts["heads"] == sum(own.values())
    assert counts["heads"] == 64 * (len(BASE) + len(NEW))
    assert counts["deltas"] == 0
    model.fused.deltas = [torch.zeros(64, len(BASE)), None]
    assert model.parameter_counts()["deltas"] == 64 * len(BASE)
    assert model.steps[0].start == branch_point(model.backbone, where).start
