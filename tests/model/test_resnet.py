import pytest
import torch
from torch import nn

from branchout.errors import BranchoutError
from branchout.model.resnet import build
from branchout.model.surgery import Branch, branch_point


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "alone", "extended"), [("resnet10", 4.9, 8.6), ("resnet18", 11.2, 19.6)])
def test_parameter_counts_are_the_papers(name, alone, extended):
    backbone = build(name, stem="large")
    branch = Branch.clone(backbone, branch_point(backbone, "layer4"))
    assert round(size(backbone) / 1e6, 1) == alone
    assert round((size(backbone) + branch.parameter_count) / 1e6, 1) == extended


def test_resnet50_is_the_known_one():
    assert size(build("resnet50", stem="large")) == 23_508_032  # torchvision's, less its head


@pytest.mark.parametrize(
    ("name", "settings", "features"),
    [
        ("resnet10", {"stem": "small"}, 512),
        ("resnet18", {"stem": "large", "in_channels": 1}, 512),
        ("resnet10", {"width": 16}, 128),
        ("resnet50", {"stem": "large", "width": 16}, 512),
        ("resnet32", {}, 64),
    ],
)
def test_gives_one_feature_vector_per_picture(name, settings, features):
    backbone = build(name, **settings).eval()
    h = backbone(torch.randn(2, settings.get("in_channels", 3), 32, 32))
    assert h.shape == (2, features)
    assert backbone.features == features


@pytest.mark.parametrize(("stem", "side"), [("small", 32), ("large", 8)])
def test_stem_sets_the_resolution_of_the_first_stage(stem, side):
    backbone = build("resnet10", stem=stem, width=16).eval()
    assert backbone.run(torch.randn(1, 3, 32, 32), stop=2).shape == (1, 16, side, side)


def test_modules_have_the_usual_names():
    names = dict(build("resnet18", width=16).named_modules())
    assert {"stem.conv1", *(f"layer4.0.{part}" for part in ("conv1", "bn1", "conv2", "bn2", "downsample"))} <= set(
        names
    )
    assert isinstance(names["layer4.1.downsample"], nn.Identity)


@pytest.mark.parametrize(("name", "last_norm"), [("resnet10", "bn2"), ("resnet50", "bn3")])
def test_zero_gamma_makes_every_block_its_shortcut(name, last_norm):
    gammas = {key: value for key, value in build(name, width=16, zero_gamma=True).state_dict().items() if "bn" in key}
    assert not gammas[f"layer4.0.{last_norm}.weight"].any()
    assert gammas["layer4.0.bn1.weight"].all()


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(BranchoutError, match="resnet10, resnet18, resnet50, resnet32"):
        build("resnet11")
    with pytest.raises(BranchoutError, match="small or large"):
        build("resnet10", stem="medium")
