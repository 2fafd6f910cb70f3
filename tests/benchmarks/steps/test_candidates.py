"""What the candidates change, and that the method is as before afterwards."""

import torch
from helpers import BASE, LATER, NEW, fixed_batch, untrained

from benchmarks.steps.candidates import Candidate, mixed_in_pairs
from branchout.method import new_branch, stage1
from branchout.method.new_branch import NewBranch
from branchout.method.recipes import BRANCHOUT
from branchout.method.stage1 import Batch
from branchout.model.classifier import Classifier
from branchout.model.staged import branch_point

CPU = torch.device("cpu")


def started(model: Classifier) -> NewBranch:
    start = stage1.initial_branch  # type: ignore[attr-defined]
    made: NewBranch = start(model, LATER, None, "last", settings=BRANCHOUT.stage_one, seed=0, device=CPU)
    return made


def test_branches_can_start_at_the_last_one_and_the_method_is_restored() -> None:
    model = untrained(BASE, NEW)
    with Candidate(from_last=True).training():
        made = started(model)
    found, last, base = (
        branch.own_state_dict() for branch in (made.branch, model.steps[-1].branch, started(model).branch)
    )
    assert all(torch.equal(found[name], last[name]) for name in last)
    assert not all(torch.equal(found[name], base[name]) for name in last)
    assert stage1.initial_branch is new_branch.initial_branch  # type: ignore[attr-defined]


def test_mixed_exemplars_are_made_of_two_and_labelled_by_their_shares() -> None:
    torch.manual_seed(3)
    images = torch.arange(6.0)[:, None, None, None].expand(6, 2, 4, 4)
    batch = Batch(images, torch.arange(6.0)[:, None], torch.arange(6), 2)
    for _ in range(20):
        (share, one), (rest, other) = mixed_in_pairs(batch)
        assert torch.equal(one.x[:2], images[:2])
        assert torch.equal(one.y[:2], other.y[:2])
        assert torch.allclose(share + rest, torch.ones(()))
        for n in range(2, 6):
            own, partner = float(one.y[n]), float(other.y[n])
            assert set(one.x[n].unique().tolist()) <= {own, partner}
            if own != partner:
                assert torch.isclose((one.x[n] == own).float().mean(), share)
            assert torch.isclose(one.z[n, 0], share * own + rest * partner)


def test_frozen_statistics_stay_those_of_the_base_in_training() -> None:
    model, found = untrained(BASE), []
    start = branch_point(model.backbone, "last").start
    for candidate in (Candidate(frozen_statistics=True), Candidate(mixed=True)):
        with candidate.training():
            made = started(model).train()
        before = {name: value.clone() for name, value in made.branch.state_dict().items() if "running" in name}
        made.branch(model.activations(fixed_batch(), [start])[start])
        after = made.branch.state_dict()
        found.append(all(torch.equal(after[name], value) for name, value in before.items()))
    assert found == [True, False]
