import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from branchout.errors import BranchoutError
from branchout.model.resnet import build
from branchout.model.staged import Backbone, Branch, BranchPoint, branch_point
from branchout.model.timm_adapters import split_network

SMALL_VIT = {"img_size": 64, "depth": 3, "embed_dim": 64, "num_heads": 2}
FAMILIES = {
    "resnet18": {"drop_rate": 0.1},
    "seresnext26d_32x4d": {"layers": (1, 1, 1, 1)},
    "regnety_002": {},
    "convnext_atto": {},
    "convnext_atto_ols": {"head_norm_first": True},
    "efficientnet_b0": {"drop_rate": 0.1},
    "tf_efficientnet_lite0": {},
    "mobilenetv3_small_050": {},
    "vit_tiny_patch16_224": SMALL_VIT,
    "deit_tiny_patch16_224": SMALL_VIT | {"global_pool": "avg"},
    "deit3_small_patch16_224": SMALL_VIT,
    "vit_base_patch32_clip_224": SMALL_VIT,
    "vit_base_patch16_siglip_224": SMALL_VIT | {"num_classes": 7},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 1, 1, 2)},
}


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return shaken(build("resnet10", width=8))


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def shaken(network: nn.Module) -> nn.Module:
    """With every parameter and statistic drawn at random, so that nothing is hidden by a start at zero or one."""
    for name, tensor in network.state_dict().items():
        if tensor.ndim > 1:
            tensor.normal_(std=(tensor.shape[0] / tensor.numel()) ** 0.5)
        elif name.endswith(("bias", "running_mean")):
            tensor.normal_(std=0.1)
        elif tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return network


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train_a_little(backbone: Backbone, branch: Branch, pictures: torch.Tensor, start: int) -> None:
    branch.train()
    optimiser = torch.optim.SGD(branch.own_parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = branch(backbone.run(pictures, 0, start)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    branch.eval()


# Cutting.


@pytest.mark.parametrize("name", FAMILIES)
def test_cut_network_computes_the_same_with_the_same_tensors(name):
    import timm

    torch.manual_seed(0)
    network = shaken(timm.create_model(name, **FAMILIES[name])).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = network(x)
    before = sorted(tensor.data_ptr() for tensor in network.state_dict().values())
    backbone, head = split_network(network)
    after = sorted(t.data_ptr() for t in (*backbone.state_dict().values(), *head.state_dict().values()))
    assert after == before
    assert len(set(after)) == len(after)
    with torch.inference_mode():
        h = backbone(x)
        assert torch.isfinite(expected).all()
        assert expected.std() > 0
        assert torch.equal(head(h), expected)
        assert h.shape == (2, backbone.features)
        middle = len(backbone.names) // 2
        assert torch.equal(backbone.run(backbone.run(x, 0, middle), middle), h)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("resnet18", ("stem", "layer1", "layer2", "layer3", "layer4")),
        ("regnety_002", ("stem", "s1", "s2", "s3", "s4")),
        ("convnext_atto", ("stem", "stages.0", "stages.1", "stages.2", "stages.3")),
        ("mobilenetv3_small_050", ("stem", *(f"blocks.{number}" for number in range(6)))),
        ("vit_tiny_patch16_224", ("stem", "blocks.0", "blocks.1", "blocks.2")),
        ("swin_tiny_patch4_window7_224", ("stem", "layers.0", "layers.1", "layers.2", "layers.3")),
    ],
)
def test_stages_have_timms_names_and_begin_the_state_dicts_keys(name, names):
    import timm

    backbone, _ = split_network(timm.create_model(name, **FAMILIES[name]))
    assert backbone.names == names
    assert all(key.startswith(tuple(f"{stage}." for stage in names)) for key in backbone.state_dict())


def test_cloned_last_stage_of_a_timm_network_gives_the_same_features():
    import timm

    backbone, _ = split_network(shaken(timm.create_model("efficientnet_b0")))
    point = branch_point(backbone)
    branch = Branch.clone(backbone, point)
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(branch(backbone.run(x, 0, point.start)), backbone(x))
    assert branch.own == ("blocks.6",)
    assert "blocks.6.conv_head.weight" in branch.own_state_dict()
    only = Branch.clone(backbone, branch_point(backbone, "blocks.6.conv_head"))
    assert only.own == ("blocks.6.conv_head", "blocks.6.bn2")


def test_a_tensor_beside_the_one_cloned_module_is_shared():
    import timm

    backbone, _ = split_network(timm.create_model("convnext_atto"))
    branch = Branch.clone(backbone, branch_point(backbone, "stages.3.blocks.1.conv_dw"))
    assert branch.own == ("stages.3.blocks.1.conv_dw", "stages.3.blocks.1.norm")
    block, original = (row.get_submodule("stages.3.blocks.1") for row in (branch, backbone))
    assert block is not original
    assert block.gamma is original.gamma
    assert block.mlp is original.mlp
    assert block.conv_dw.weight is not original.conv_dw.weight


def test_unknown_family_says_which_are_known_and_how_to_add_one():
    with pytest.raises(BranchoutError, match=r"ConvNeXt, CspNet.*@splitter_for in branchout/model/"):
        split_network(nn.Sequential(nn.Linear(2, 2)))


def test_networks_without_one_linear_head_are_refused():
    import timm

    with pytest.raises(BranchoutError, match="two heads"):
        split_network(timm.create_model("deit_tiny_distilled_patch16_224", depth=1))
    with pytest.raises(BranchoutError, match="linear layer"):
        split_network(timm.create_model("resnet18", num_classes=0))


# Naming.


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("", BranchPoint(4)),
        ("last", BranchPoint(4)),
        ("layer4", BranchPoint(4)),
        ("layer3", BranchPoint(3)),
        ("stem", BranchPoint(0)),
        ("fc", BranchPoint(5)),
        ("layer4.0.conv2", BranchPoint(4, "layer4.0.conv2")),
        ("layer3.0", BranchPoint(3, "layer3.0")),
    ],
)
def test_branch_point_reads(backbone, text, point):
    assert branch_point(backbone, text) == point


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("layer5", r"stem, layer1, layer2, layer3, layer4\).*such as layer4\.0\..*last or fc"),
        ("layer4.0.conv9", r"layer4\.0\.conv1, layer4\.0\.bn1"),
        ("layer4.pool", "with weights to clone"),
        ("layer4+", "cannot branch at"),
        ("layer", "cannot branch at"),
    ],
)
def test_branch_point_answers_an_unknown_name_with_what_can_be_named(backbone, text, answer):
    with pytest.raises(BranchoutError, match=answer):
        branch_point(backbone, text)


def test_index_knows_stages(backbone):
    assert backbone.index("layer2") == 2
    with pytest.raises(BranchoutError, match="layer1, layer2"):
        backbone.index("layer9")


def test_numbered_stages_are_not_confused():
    stages = [(f"blocks.{number}", nn.Sequential(nn.Linear(3, 3))) for number in range(12)]
    backbone = Backbone(stages, 3)
    assert branch_point(backbone, "blocks.11.0") == BranchPoint(11, "blocks.11.0")
    assert branch_point(backbone, "blocks.1") == BranchPoint(1)
    assert list(backbone.state_dict())[:2] == ["blocks.0.0.weight", "blocks.0.0.bias"]


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("layer4.0.conv1", ("layer4.0.conv1", "layer4.0.bn1")),
        ("layer4.0.conv2", ("layer4.0.conv2", "layer4.0.bn2")),
        ("layer4.0.downsample", ("layer4.0.downsample",)),
        ("layer4.0.downsample.0", ("layer4.0.downsample.0", "layer4.0.downsample.1")),
        ("layer4.0.bn2", ("layer4.0.bn2",)),
        ("layer3", ("layer3", "layer4")),
        ("fc", ()),
    ],
)
def test_a_convolution_takes_its_norm_along(backbone, text, own):
    assert Branch.clone(backbone, branch_point(backbone, text)).own == own


def test_a_convolution_without_a_norm_goes_alone():
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    backbone = Backbone([("only", plain)], 4)
    assert Branch.clone(backbone, branch_point(backbone, "only.0")).own == ("only.0",)
    assert Branch.clone(backbone, branch_point(backbone, "only.2")).own == ("only.2", "only.3")


# Growing.

POINTS = ["last", "layer3", "stem", "layer4.0.conv2", "layer3.0.conv1", "layer4.0"]


@pytest.mark.parametrize("text", [*POINTS, "fc"])
def test_a_new_branch_repeats_the_backbone(backbone, pictures, text):
    point = branch_point(backbone, text)
    branch = Branch.clone(backbone, point)
    with torch.inference_mode():
        assert torch.equal(branch(backbone.run(pictures, 0, point.start)), backbone(pictures))


@pytest.mark.parametrize("text", POINTS)
def test_training_a_branch_changes_all_of_it_and_nothing_of_the_backbone(backbone, pictures, text):
    point = branch_point(backbone, text)
    branch = Branch.clone(backbone, point)
    before, own_before = snapshot(backbone), copy.deepcopy(branch.own_state_dict())
    h = backbone(pictures)
    train_a_little(backbone.train(), branch, pictures, point.start)
    assert same(snapshot(backbone), before)
    assert torch.equal(backbone(pictures), h)
    after = branch.own_state_dict()
    assert [key for key in after if torch.equal(after[key], own_before[key])] == []


@pytest.mark.parametrize("text", ["layer4.0.conv2", "layer3.0.conv1"])
def test_one_module_is_cloned_and_the_rest_shared(backbone, text):
    branch = Branch.clone(backbone, branch_point(backbone, text))
    own = {id(tensor) for tensor in (*branch.own_parameters(), *branch.get_submodule(text).buffers())}
    theirs = {id(parameter) for parameter in backbone.parameters()}
    assert own.isdisjoint(theirs)
    for name, parameter in branch.named_parameters():
        assert (id(parameter) in theirs) != (id(parameter) in own), name
        assert parameter.requires_grad == (id(parameter) in own), name
    conv = backbone.get_submodule(text)
    assert branch.parameter_count == conv.weight.numel() + 2 * conv.out_channels
    norm = text.replace("conv", "bn")
    assert {key.rpartition(".")[0] for key in branch.own_state_dict()} == {text, norm}
    branch.train()
    modes = {name: module.training for name, module in branch.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert [name for name, training in modes.items() if training] == [norm]


def test_sharing_survives_conversion_and_copying(backbone, pictures):
    point = branch_point(backbone, "layer4.0.conv2")
    pair = copy.deepcopy(nn.ModuleList([backbone, Branch.clone(backbone, point)]).to(torch.float64))
    trunk, branch = pair
    shared, original = branch.get_submodule("layer4.0.bn1"), trunk.get_submodule("layer4.0.bn1")
    assert shared.weight is original.weight
    assert shared.running_mean is original.running_mean
    pair.train()
    assert [m.training for m in (trunk, shared, branch, branch.get_submodule("layer4.0.bn2"))] == [0, 0, 1, 1]
    x = pictures.double()
    assert torch.equal(pair.eval()[1](trunk.run(x, 0, point.start)), trunk(x))


@pytest.mark.parametrize("text", POINTS)
def test_own_state_dict_round_trips(backbone, pictures, text):
    point = branch_point(backbone, text)
    trained, fresh = Branch.clone(backbone, point), Branch.clone(backbone, point)
    train_a_little(backbone, trained, pictures, point.start)
    activation = backbone.run(pictures, 0, point.start)
    assert not torch.equal(fresh(activation), trained(activation))
    before = snapshot(backbone)
    fresh.load_state_dict(trained.own_state_dict(), strict=False)
    assert torch.equal(fresh(activation), trained(activation))
    assert same(snapshot(backbone), before)


def test_fc_has_nothing_of_its_own(backbone):
    branch = Branch.clone(backbone, branch_point(backbone, "fc"))
    h = torch.randn(2, 64)
    assert branch(h) is h
    assert branch.parameter_count == 0
    assert branch.own_state_dict() == {}


def test_frozen_means_frozen(backbone, pictures):
    assert backbone.train().training
    backbone.freeze()
    before = snapshot(backbone)
    nn.ModuleList([backbone]).train()
    backbone.train()
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    backbone(pictures)
    assert same(snapshot(backbone), before)


def test_a_branch_can_be_frozen_too(backbone):
    branch = Branch.clone(backbone, branch_point(backbone)).freeze().train()
    assert not any(module.training for module in branch.modules())
    assert not any(parameter.requires_grad for parameter in branch.parameters())


@pytest.mark.parametrize(("width", "layout"), [(15, torch.contiguous_format), (16, torch.channels_last)])
def test_narrow_networks_stay_contiguous_on_a_cpu(width: int, layout: torch.memory_format) -> None:
    """oneDNN's backward of a strided 1×1 convolution corrupts memory below 16 channels; see SAFE_CHANNELS."""
    backbone = build("resnet10", width=width)
    assert backbone.layout(torch.device("cpu")) == layout
    assert backbone.layout(torch.device("cuda")) == torch.channels_last
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    assert backbone.arrange(images).is_contiguous(memory_format=layout)


# Images of 112 pixels: smaller ones crash with some batches and threads only. Several threads would wait for each other
# where other programs run.
TRAIN = """
import sys
import torch
from branchout.model.resnet import build

torch.set_num_threads(1)
for width in map(int, sys.argv[1:]):
    backbone = build("resnet10", width=width).train()
    backbone.to(memory_format=backbone.layout(torch.device("cpu")))
    for _ in range(3):
        backbone(backbone.arrange(torch.randn(1, 3, 112, 112))).sum().backward()
    print(width, flush=True)
"""


def test_narrow_networks_train_on_a_cpu() -> None:
    """In a process of its own: memory that is written out of bounds ends the process, or it never ends."""
    widths = ["4", "8", "15", "16"]
    done = subprocess.run([sys.executable, "-c", TRAIN, *widths], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, widths), done.stderr
