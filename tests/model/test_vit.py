"""A vision transformer from scratch: its shape, its description, and what memory layouts and compilation do to it."""

from pathlib import Path

import pytest
import torch
from helpers import BASE, SIZES, fixed_batch, logits
from timm.models.vision_transformer import VisionTransformer

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model import architectures, checkpoint
from branchout.model.bases import rebuild
from branchout.model.checkpoint import SavedModel
from branchout.model.classifier import Classifier
from branchout.model.heads import CosineHead
from branchout.model.staged import Branch, branch_point
from branchout.model.vit import build


def small(**settings: int) -> dict[str, object]:
    return {**architectures.describe("vit_tiny", SIZES, width=16), "depth": 2, **settings}


def test_it_is_the_known_one() -> None:
    backbone = build("vit_tiny", size=64)
    known = VisionTransformer(
        img_size=64, patch_size=8, num_classes=0, global_pool="avg", class_token=False, embed_dim=192, num_heads=3
    )
    assert sum(p.numel() for p in backbone.parameters()) == sum(p.numel() for p in known.parameters())
    assert backbone.names == ("stem", *(f"blocks.{number}" for number in range(12)))
    assert backbone.get_submodule("blocks.3").attn.num_heads == 3
    assert backbone.features == 192


@pytest.mark.parametrize(("size", "patch", "tokens"), [(32, 8, 16), (96, 8, 144), (112, 16, 49), (224, 16, 196)])
def test_small_pictures_have_small_patches(size: int, patch: int, tokens: int) -> None:
    assert architectures.describe("vit_tiny", Preprocessing(size, 3, (0.5,) * 3, (0.25,) * 3))["patch"] == patch
    backbone = build("vit_tiny", size=size, width=8, depth=1).eval()
    pictures = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert backbone.run(pictures, stop=1).shape == (2, tokens, 8)
        assert backbone(pictures).shape == (2, 8)


def test_features_are_the_mean_over_patches() -> None:
    backbone, _ = rebuild(small())
    backbone.eval()
    last = backbone.get_submodule("blocks.1")
    with torch.no_grad():
        tokens = last.block(backbone.run(fixed_batch(), stop=2))
        expected = last.fc_norm(last.norm(tokens).mean(1))
        assert torch.allclose(backbone(fixed_batch()), expected, atol=1e-6)


def test_a_model_answers_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone, head = rebuild(small())
    assert head is None
    model = Classifier(small(), backbone, CosineHead(16, len(BASE)), BASE, SIZES, "glyph")
    checkpoint.save(SavedModel(model, (), ({"what": "test"},)), tmp_path / "kept")
    torch.manual_seed(1)
    loaded = checkpoint.load(tmp_path / "kept").model()
    assert loaded.arch == small()
    assert torch.equal(logits(loaded, fixed_batch()), logits(model, fixed_batch()))


def test_a_branch_is_the_last_block() -> None:
    backbone, _ = rebuild(small())
    backbone.eval()
    branch = Branch.clone(backbone, branch_point(backbone, "last"))
    assert branch.names == ("blocks.1",)
    hidden = backbone.run(fixed_batch(), stop=2)
    assert torch.equal(branch(hidden), backbone(fixed_batch()))
    with torch.no_grad():
        for parameter in branch.own_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert not torch.allclose(branch(hidden), backbone(fixed_batch()), atol=1e-2)


def test_memory_layout_and_compilation_change_nothing() -> None:
    torch.manual_seed(0)
    backbone, _ = rebuild(small())
    plain = backbone(fixed_batch())
    placed = backbone.to(memory_format=torch.channels_last)
    pictures = fixed_batch().contiguous(memory_format=torch.channels_last)
    assert torch.allclose(placed(pictures), plain, atol=1e-5)
    compiled = torch.compile(placed, backend="aot_eager", fullgraph=True)
    found = compiled(pictures)
    assert torch.allclose(found, plain, atol=1e-5)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_what_cannot_be_built_is_answered_with_what_can() -> None:
    with pytest.raises(BranchoutError, match=r"patches of 8×8 pixels, and 28 .*--size 32"):
        build("vit_tiny", size=28)
    with pytest.raises(BranchoutError, match=r"200, does not divide into 3 heads.*multiple of 64"):
        build("vit_tiny", size=32, width=200)
    with pytest.raises(BranchoutError, match="known are: vit_tiny"):
        build("vit_small", size=32)
    with pytest.raises(BranchoutError, match="known are: resnet10, resnet18, resnet50, resnet32, vit_tiny"):
        architectures.describe("vit_small", SIZES)


def test_resnets_are_described_as_ever() -> None:
    described = architectures.describe("resnet10", SIZES, width=4)
    assert described == {"family": "resnet", "name": "resnet10", "stem": "small", "width": 4, "in_channels": 1}
    assert architectures.describe("resnet32", SIZES, last_relu=False)["last_relu"] is False
    assert architectures.describe("resnet50", Preprocessing(224, 3, (0.5,) * 3, (0.25,) * 3))["stem"] == "large"
