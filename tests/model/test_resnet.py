import pytest
import torch
from torch import nn

from branchout.errors import BranchoutError
from branchout.model.bases import rebuild
from branchout.model.resnet import build
from branchout.model.staged import Branch, branch_point


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


@pytest.mark.parametrize("name", ["resnet32", "resnet50"])
def test_without_the_last_relu_features_are_what_stood_before_it(name):
    torch.manual_seed(0)
    with_relu, without = build(name, width=8).eval(), build(name, width=8, last_relu=False).eval()
    without.load_state_dict(with_relu.state_dict())  # it has no weights of its own
    last = without.names[-1]
    pictures = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        before = without.run(pictures, stop=len(without.names) - 1)
        stage = without.get_submodule(last)
        for block in list(stage)[:-2]:  # all but pooling
            before = block(before)
        assert torch.allclose(without(pictures), before.mean((2, 3)), atol=1e-5)
        assert torch.allclose(with_relu(pictures), before.relu().mean((2, 3)), atol=1e-5)
        assert (with_relu(pictures) >= 0).all()
        assert (without(pictures) < 0).any()
    blocks = [module.last_relu for module in without.modules() if hasattr(module, "last_relu")]
    assert blocks[:-1] == [True] * (len(blocks) - 1)
    assert blocks[-1] is False


def test_a_description_without_the_last_relu_is_rebuilt_so():
    arch = {"family": "resnet", "name": "resnet32", "stem": "small", "width": 4, "in_channels": 1}
    kept, _ = rebuild(arch | {"last_relu": False})
    usual, _ = rebuild(arch)
    pictures = torch.randn(4, 1, 16, 16)
    assert (kept.eval()(pictures) < 0).any()
    assert (usual.eval()(pictures) >= 0).all()


def test_a_branch_of_a_network_without_the_last_relu_has_none_either():
    backbone = build("resnet10", width=8, last_relu=False).eval()
    branch = Branch.clone(backbone, branch_point(backbone, "layer4")).eval()
    pictures = torch.randn(4, 3, 16, 16)
    hidden = backbone.run(pictures, stop=backbone.names.index("layer4"))
    assert torch.allclose(backbone(pictures), branch(hidden), atol=1e-6)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(BranchoutError, match="resnet10, resnet18, resnet50, resnet32"):
        build("resnet11")
