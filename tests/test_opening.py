"""Bases as people have them: each is opened, gives the output of its network, is extended, saved and loaded."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from branchout import api
from branchout.data.samples import ArrayPixels, Samples
from branchout.errors import BranchoutError

OLD = ("ash", "beech", "oak")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
Case = tuple[dict[str, object], Callable[[Tensor], Tensor]]
"""The arguments of `load`, and the network that was saved."""


def fine_tuned(folder: Path) -> Case:
    """As timm's training script leaves it, with the architecture's name and its options."""
    network = timm.create_model("mobilenetv3_small_050", num_classes=3).eval()
    content = {"arch": "mobilenetv3_small_050", "state_dict": network.state_dict(), "args": Namespace(lr=0.1)}
    torch.save(content, folder / "model_best.pth.tar")
    return {"base": folder / "model_best.pth.tar", "classes": OLD}, network


def state_dict(folder: Path) -> Case:
    """A plain state dict and a list of classes."""
    network = timm.create_model("mobilenetv3_small_050", num_classes=3).eval()
    torch.save(network.state_dict(), folder / "network.pth")
    (folder / "classes.txt").write_text("ash\nbeech\noak\n")
    arch = "mobilenetv3_small_050"
    return {"base": folder / "network.pth", "arch": arch, "classes": folder / "classes.txt"}, network


def of_torchvision(folder: Path) -> Case:
    network = torchvision.models.mobilenet_v3_small(num_classes=3).eval()
    save_file(network.state_dict(), folder / "network.safetensors")
    (folder / "classes.json").write_text(json.dumps({str(n): name for n, name in enumerate(OLD)}))
    arch = "torchvision:mobilenet_v3_small"
    return {"base": folder / "network.safetensors", "arch": arch, "classes": folder / "classes.json"}, network


def huggingface_folder(folder: Path) -> Case:
    network = timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL).eval()
    cfg = {"input_size": [3, 32, 32], "crop_pct": 1.0}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "label_names": OLD, "model_args": SMALL}
    (folder / "config.json").write_text(json.dumps({**config, "pretrained_cfg": cfg}))
    save_file(network.state_dict(), folder / "model.safetensors")
    return {"base": folder}, network


def backbone_with_head(folder: Path) -> Case:
    """A backbone as DINOv2 is published, and a linear head over class token and mean patch token."""
    huggingface_folder(folder)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL).eval()
    save_file(network.state_dict(), folder / "model.safetensors")
    head = nn.Linear(128, 3)
    torch.save(head.state_dict(), folder / "head.pth")

    def expected(x: Tensor) -> Tensor:
        tokens = network.forward_features(x)
        return head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1))

    return {"base": folder, "head": folder / "head.pth", "classes": OLD}, expected


def pictures(names: tuple[str, ...], per_class: int, seed: int) -> Samples:
    """Every class has its own colour."""
    rng = np.random.default_rng(seed)
    labels = [*names] * per_class
    colours = {name: np.random.default_rng(n).integers(0, 200, 3) for n, name in enumerate(names)}
    images = np.stack([colours[name] + rng.integers(0, 55, (32, 32, 3)) for name in labels]).astype(np.uint8)
    return Samples.build(ArrayPixels(images), labels, [f"{name} {n} {seed}" for n, name in enumerate(labels)])


@pytest.mark.parametrize("case", [fine_tuned, state_dict, of_torchvision, huggingface_folder, backbone_with_head])
def test_a_base_is_opened_extended_and_saved(case: Callable[[Path], Case], tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "given").mkdir()
    options, network = case(tmp_path / "given")
    base = api.load(**options, device="cpu")
    assert base.classes == OLD
    for model in (base.classifier, base.saved.classifier):  # 224 pixels would take long
        model.preprocessing = replace(model.preprocessing, size=32)
    size = base.classifier.preprocessing.size
    x = base.classifier.backbone.arrange(torch.randn(2, 3, size, size))
    if isinstance(network, nn.Module):
        network = network.to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = network(x)
        assert torch.equal(base.classifier(x), expected)
    base.save(tmp_path / "base")
    new, memory = pictures(("elm", "fir"), 4, 1), pictures(OLD, 3, 2)
    grown = base.extend(new, memory=memory, out=tmp_path / "v2", branch="fc")
    again, back = (api.load(tmp_path / name, device="cpu") for name in ("base", "v2"))
    assert back.classes == (*OLD, "elm", "fir")
    with torch.no_grad():
        assert torch.equal(again.classifier(x), expected)
        assert torch.equal(back.classifier(x), grown.classifier(x))
        assert torch.equal(back.classifier.fused.frozen_columns(back.classifier.features(x))[:, :3], expected)


def test_a_backbone_without_a_head_says_what_to_give(tmp_path: Path) -> None:
    backbone_with_head(tmp_path)
    with pytest.raises(BranchoutError, match=r"--head FILE.*classes × 64"):
        api.load(tmp_path)
    torch.save({"weight": torch.ones(3, 7)}, tmp_path / "head.pth")
    with pytest.raises(BranchoutError, match=r"7 inputs.*64 features"):
        api.load(tmp_path, head=tmp_path / "head.pth")
    torch.save({"fc.weight": torch.ones(3, 7)}, tmp_path / "head.pth")
    with pytest.raises(BranchoutError, match=r"weight and bias.*fc\.weight"):
        api.load(tmp_path, head=tmp_path / "head.pth")


def test_a_checkpoint_without_its_architecture_says_what_to_type(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(3, 7)}, tmp_path / "network.pth")
    with pytest.raises(BranchoutError, match=r"--arch resnet18.*torchvision:"):
        api.load(tmp_path / "network.pth")


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 3}', "[]"])
def test_a_file_that_lists_no_classes(text: str, tmp_path: Path) -> None:
    options, _ = state_dict(tmp_path)
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(BranchoutError, match=r"classes\.json"):
        api.load(**{**options, "classes": tmp_path / "classes.json"})
