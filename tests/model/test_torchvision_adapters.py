"""torchvision's families are cut exactly; its names, weights and preprocessing are used as published."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import convnext, efficientnet, regnet, resnet, swin_transformer, vision_transformer

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model.bases import open_base, rebuild
from branchout.model.timm_adapters import split_network
from branchout.model.torchvision_adapters import preprocessing_of
from branchout.model.weights import shapes_only

SMALL: dict[str, Callable[[], nn.Module]] = {
    "ResNet": lambda: resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=5, groups=4, width_per_group=4),
    "RegNet": lambda: regnet.RegNet(regnet.BlockParams.from_init_params(4, 8, 8.0, 2.0, 8), num_classes=5),
    "ConvNeXt": lambda: convnext.ConvNeXt(
        [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 2)], num_classes=5
    ),
    "EfficientNet": lambda: efficientnet.EfficientNet(
        [efficientnet.MBConvConfig(1, 3, 1, 32, 16, 1), efficientnet.MBConvConfig(4, 3, 2, 16, 24, 2)],
        0.1,
        num_classes=5,
    ),
    "MobileNetV2": lambda: torchvision.models.mobilenet_v2(num_classes=5, width_mult=0.25),
    "MobileNetV3": lambda: torchvision.models.mobilenet_v3_small(num_classes=5),
    "SwinTransformer": lambda: swin_transformer.SwinTransformer([4, 4], 24, [1, 2], [2, 4], [4, 4], num_classes=5),
    "VisionTransformer": lambda: vision_transformer.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=5),
}


@pytest.mark.parametrize("family", SMALL)
def test_cut_network_computes_the_same_with_the_same_tensors(family: str) -> None:
    torch.manual_seed(0)
    network = SMALL[family]().eval()
    assert type(network).__name__ == family
    for name, tensor in network.state_dict().items():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if name.endswith(("weight", "var")) else tensor.normal_(std=0.1)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = network(x)
        before = sorted(tensor.data_ptr() for tensor in network.state_dict().values())
        backbone, head = split_network(network)
        after = sorted(t.data_ptr() for t in (*backbone.state_dict().values(), *head.state_dict().values()))
        assert after == before
        assert expected.std() > 0
        assert torch.equal(head(backbone(x)), expected)
        middle = len(backbone.names) // 2
        assert torch.equal(head(backbone.run(backbone.run(x, 0, middle), middle)), expected)


@pytest.mark.parametrize("name", ["regnet_x_400mf", "mobilenet_v3_small"])
def test_shapes_are_known_without_memory(name: str) -> None:
    with shapes_only():
        backbone, head = rebuild({"family": "torchvision", "name": name, "num_classes": 10**6})
    assert all(tensor.is_meta for tensor in (*backbone.parameters(), *head.parameters()))
    assert head.weight.shape == (10**6, backbone.features)


def test_families_that_cannot_be_cut_are_named() -> None:
    with pytest.raises(BranchoutError, match=r"torchvision\.SqueezeNet.*torchvision\.ResNet"):
        rebuild({"family": "torchvision", "name": "squeezenet1_0", "num_classes": 3})


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Random weights in place of a download; what was asked of torchvision."""
    asked: list[dict[str, object]] = []

    def state_dict(weights: object, **options: object) -> dict[str, torch.Tensor]:
        asked.append(options)
        torch.manual_seed(0)
        return torchvision.models.mobilenet_v3_small().state_dict()

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", state_dict)
    return asked


def test_published_weights_are_read_without_pickle(no_download: list[dict[str, object]]) -> None:
    opened = open_base("torchvision:mobilenet_v3_small")
    assert no_download[0]["weights_only"] is True
    assert no_download[0]["check_hash"] is True
    assert opened.space.classes[0] == "tench"
    assert opened.arch == {"family": "torchvision", "name": "mobilenet_v3_small", "num_classes": 1000}
    torch.manual_seed(0)
    network = torchvision.models.mobilenet_v3_small().eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(opened.base_head(opened.backbone(x)), network(x))


def test_a_failed_download_says_which_file_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", fail)
    words = r"no route to host.*--base mobilenet_v3_small-\w+\.pth --arch torchvision:mobilenet_v3_small"
    with pytest.raises(BranchoutError, match=words):
        open_base("torchvision:mobilenet_v3_small")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BranchoutError, match="did you mean resnet50"):
        open_base("torchvision:resnet05")


def test_preprocessing_is_the_published_one() -> None:
    transform = torchvision.models.get_model_weights("resnet50").DEFAULT.transforms
    transform = transform() if isinstance(transform, partial) else transform
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert preprocessing_of(transform) == Preprocessing(224, 3, mean, std, "bilinear", 224 / 232)
