"""Local Hugging Face folders: timm's as they are, transformers' under timm's names."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model.bases import open_base

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
VIT_CONFIG = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}


def random_network(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    network = timm.create_model(name, **options).eval()
    for key, tensor in network.state_dict().items():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if key.endswith(("weight", "var", "gamma")) else tensor.normal_(std=0.1)
    return network


def renamed(
    tensors: Mapping[str, Tensor], rules: Mapping[str, str | Callable[[re.Match[str]], str]]
) -> dict[str, Tensor]:
    found = {}
    for key, value in tensors.items():
        for pattern, by in rules.items():
            key = re.sub(pattern, by, key)
        found[key] = value.clone()
    return found


def unjoined(tensors: Mapping[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """With queries, keys and values apart."""
    found = {}
    for key, value in tensors.items():
        if ".qkv." in key:
            for name, part in zip(names, value.chunk(3), strict=True):
                found[key.replace("attn.qkv", name)] = part.clone()
        else:
            found[key] = value
    return found


def folder_of(path: Path, config: object, tensors: Mapping[str, Tensor], preprocessor: object = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / "model.safetensors")
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


TO_VIT = {
    r"^cls_token": "vit.embeddings.cls_token",
    r"^pos_embed": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj": "vit.embeddings.patch_embeddings.projection",
    r"^blocks\.": "vit.encoder.layer.",
    r"attn\.proj": "attention.output.dense",
    r"\.norm1": ".layernorm_before",
    r"\.norm2": ".layernorm_after",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
    r"^norm\.": "vit.layernorm.",
    r"^head\.": "classifier.",
}
TO_DINO = {
    r"^cls_token": "dinov2.embeddings.cls_token",
    r"^pos_embed": "dinov2.embeddings.position_embeddings",
    r"^patch_embed\.proj": "dinov2.embeddings.patch_embeddings.projection",
    r"^blocks\.": "dinov2.encoder.layer.",
    r"attn\.proj": "attention.output.dense",
    r"ls(\d)\.gamma": r"layer_scale\1.lambda1",
    r"^norm\.": "dinov2.layernorm.",
}
TO_CLIP = {
    r"^cls_token": "vision_model.embeddings.class_embedding",
    r"^pos_embed": "vision_model.embeddings.position_embedding.weight",
    r"^patch_embed\.proj": "vision_model.embeddings.patch_embedding",
    r"^norm_pre": "vision_model.pre_layrnorm",
    r"^blocks\.": "vision_model.encoder.layers.",
    r"attn\.proj": "self_attn.out_proj",
    r"\.norm(\d)": r".layer_norm\1",
    r"^head\.": "classifier.",
}
TO_RESNET = {
    r"^conv1": "resnet.embedder.embedder.convolution",
    r"^bn1": "resnet.embedder.embedder.normalization",
    r"^layer(\d)": lambda found: f"resnet.encoder.stages.{int(found[1]) - 1}.layers",
    r"\.conv(\d)": lambda found: f".layer.{int(found[1]) - 1}.convolution",
    r"\.bn(\d)": lambda found: f".layer.{int(found[1]) - 1}.normalization",
    r"\.downsample\.0": ".shortcut.convolution",
    r"\.downsample\.1": ".shortcut.normalization",
    r"^fc": "classifier.1",
}
TO_CONVNEXT = {
    r"^stem\.0": "convnext.embeddings.patch_embeddings",
    r"^stem\.1": "convnext.embeddings.layernorm",
    r"^stages": "convnext.encoder.stages",
    r"\.downsample\.": ".downsampling_layer.",
    r"\.blocks\.": ".layers.",
    r"\.conv_dw": ".dwconv",
    r"(layers\.\d+)\.norm": r"\1.layernorm",
    r"\.mlp\.fc(\d)": r".pwconv\1",
    r"\.gamma": ".layer_scale_parameter",
    r"^head\.norm": "convnext.layernorm",
    r"^head\.fc": "classifier",
}
QKV = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
LABELS = {str(number): f"bird {number}" for number in range(5)}


def equal_outputs(folder: Path, network: Callable[[Tensor], Tensor], size: int = 32, **options: object):
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    opened = open_base(folder, **options)
    with torch.inference_mode():
        assert torch.equal(opened.base_head(opened.backbone(x)), network(x))
    return opened


def test_a_folder_that_timm_saved(tmp_path):
    network = random_network("vit_tiny_patch16_224", num_classes=5, **SMALL)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "label_names": list("abcde"),
        "model_args": SMALL,
        "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9},
    }
    folder = folder_of(tmp_path / "m", config, network.state_dict())
    opened = equal_outputs(folder, network)
    assert opened.space.classes == tuple("abcde")
    assert opened.preprocessing == Preprocessing(32, 3, (0.5,) * 3, (0.25,) * 3, "bicubic", 0.9)


def test_a_vision_transformer(tmp_path):
    network = random_network("vit_tiny_patch16_224", num_classes=5, **SMALL)
    tensors = renamed(unjoined(network.state_dict(), QKV), TO_VIT) | {"vit.pooler.dense.weight": torch.ones(2)}
    about = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    folder = folder_of(tmp_path / "m", {"model_type": "vit", "id2label": LABELS, **VIT_CONFIG}, tensors, about)
    opened = equal_outputs(folder, network)
    assert opened.space.classes[4] == "bird 4"
    assert opened.preprocessing == Preprocessing(32, 3, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0)


def test_the_epsilon_of_the_description_is_used(tmp_path):
    network = random_network("vit_tiny_patch16_224", num_classes=5, **SMALL)
    tensors = renamed(unjoined(network.state_dict(), QKV), TO_VIT)
    folder = folder_of(tmp_path / "m", {"model_type": "vit", **VIT_CONFIG, "layer_norm_eps": 0.5}, tensors)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.5
    equal_outputs(folder, network)


def test_a_dinov2_with_its_linear_head(tmp_path):
    """Its features are the class token and the mean patch token, side by side."""
    network = random_network("vit_tiny_patch16_224", num_classes=0, init_values=1.0, **SMALL)
    head = nn.Linear(128, 5)
    names = renamed(unjoined(network.state_dict(), QKV), TO_DINO)
    tensors = names | {f"classifier.{key}": value for key, value in head.state_dict().items()}
    config = {"model_type": "dinov2", "id2label": LABELS, **VIT_CONFIG}
    folder = folder_of(tmp_path / "m", config, tensors | {"dinov2.embeddings.mask_token": torch.zeros(1, 64)})

    def expected(x: Tensor) -> Tensor:
        tokens = network.forward_features(x)
        return head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1))

    assert equal_outputs(folder, expected).backbone.features == 128
    backbone = folder_of(tmp_path / "backbone", config, names)
    with pytest.raises(BranchoutError, match=r"no classes.*--head FILE.*classes × 64"):
        open_base(backbone)
    save_file(dict(head.state_dict()), tmp_path / "head.safetensors")
    opened = equal_outputs(backbone, expected, head=tmp_path / "head.safetensors", classes=list("abcde"))
    assert opened.space.classes == tuple("abcde")


def test_positions_are_resampled_for_another_size(tmp_path):
    network = random_network("vit_tiny_patch16_224", num_classes=5, **SMALL)
    tensors = renamed(unjoined(network.state_dict(), QKV), TO_VIT)
    folder = folder_of(tmp_path / "m", {"model_type": "vit", **VIT_CONFIG}, tensors, {"size": 48, "crop_size": 48})
    opened = open_base(folder)
    assert opened.preprocessing.size == 48
    assert opened.base_head(opened.backbone(torch.randn(1, 3, 48, 48))).shape == (1, 5)


@pytest.mark.parametrize("headed", [True, False])
def test_a_clip(headed, tmp_path):
    options = {"pre_norm": True, "act_layer": "quick_gelu", **SMALL}
    pooling = {"global_pool": "avg", "final_norm": False, "fc_norm": False} if headed else {}
    network = random_network("vit_tiny_patch16_224", num_classes=5, **options, **pooling)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    tensors = renamed(unjoined(network.state_dict(), parts), TO_CLIP)
    tensors["vision_model.embeddings.class_embedding"] = network.cls_token.detach().view(-1)
    tensors["vision_model.embeddings.position_embedding.weight"] = network.pos_embed.detach()[0]
    tensors |= {"text_model.final_layer_norm.weight": torch.ones(3), "logit_scale": torch.ones(1)}
    vision = {**VIT_CONFIG, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    config = {"model_type": "clip", "vision_config": vision}
    if headed:
        tensors["vision_model.post_layernorm.weight"] = torch.ones(64)
        equal_outputs(folder_of(tmp_path / "m", config, tensors), network)
        return
    head = {key: tensors.pop(f"classifier.{key}") for key in ("weight", "bias")}
    tensors |= {f"vision_model.post_layernorm.{key}": tensors.pop(f"norm.{key}") for key in ("weight", "bias")}
    torch.save(head, tmp_path / "head.pth")
    equal_outputs(folder_of(tmp_path / "m", config, tensors), network, head=tmp_path / "head.pth")


@pytest.mark.parametrize(("name", "kind"), [("resnet18", "basic"), ("resnet50", "bottleneck")])
def test_a_resnet(name, kind, tmp_path):
    network = random_network(name, num_classes=5, layers=(1, 1, 1, 1))
    config = {"model_type": "resnet", "depths": [1] * 4, "layer_type": kind, "hidden_act": "relu", "id2label": LABELS}
    equal_outputs(folder_of(tmp_path / "m", config, renamed(network.state_dict(), TO_RESNET)), network)


def test_a_convnext(tmp_path):
    network = random_network("convnext_tiny", num_classes=5, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64))
    network.head.norm.eps = 1e-12
    config = {"model_type": "convnext", "depths": [1] * 4, "hidden_sizes": [8, 16, 32, 64], "layer_norm_eps": 1e-12}
    equal_outputs(folder_of(tmp_path / "m", config, renamed(network.state_dict(), TO_CONVNEXT)), network)


def test_imagenets_labels_become_our_names(tmp_path):
    network = random_network("convnext_tiny", num_classes=1000, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8))
    labels = {str(number): "crane" for number in range(1000)} | {"0": "tench, Tinca tinca"}
    config = {"model_type": "convnext", "depths": [1] * 4, "hidden_sizes": [8] * 4, "id2label": labels}
    opened = open_base(folder_of(tmp_path / "m", config, renamed(network.state_dict(), TO_CONVNEXT)))
    assert opened.space.classes[:2] == ("tench", "goldfish")


def test_equal_labels_get_their_number(tmp_path):
    network = random_network("convnext_tiny", num_classes=3, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8))
    labels = {"0": "crane", "1": "crane", "2": "wren"}
    config = {"model_type": "convnext", "depths": [1] * 4, "hidden_sizes": [8] * 4, "id2label": labels}
    opened = open_base(folder_of(tmp_path / "m", config, renamed(network.state_dict(), TO_CONVNEXT)))
    assert opened.space.classes == ("crane (0)", "crane (1)", "wren")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "segformer"}, "segformer.*convnext.*dinov2"),
        ({"model_type": "vit", **VIT_CONFIG, "hidden_act": "relu"}, "hidden_act.*relu"),
        ({"model_type": "vit"}, "config.json"),
        ({"architecture": "../../etc/passwd"}, "not valid"),
        ({"architecture": "resnet18", "model_args": {"checkpoint_path": "x.pth"}}, "not valid.*checkpoint_path"),
        ({"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": 10**9}}, "not valid.*img_size"),
        ({"architecture": "resnet18", "model_args": 3}, "config.json"),
        ([1, 2], "JSON object"),
    ],
)
def test_other_folders_are_refused_with_a_reason(config, words, tmp_path):
    folder = folder_of(tmp_path / "m", config, {"cls_token": torch.zeros(1)})
    with pytest.raises(BranchoutError, match=words):
        open_base(folder)


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BranchoutError, match=r"branchout\.json.*config\.json.*notes\.txt"):
        open_base(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BranchoutError, match=r"model\.safetensors"):
        open_base(tmp_path)
