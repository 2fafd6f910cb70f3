"""Local Hugging Face folders: config.json and weights, written by timm or by transformers.

What transformers wrote is renamed to timm's network of the same architecture, so transformers itself is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from branchout import files
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, some
from branchout.labels import unique_names
from branchout.model.weights import read_checkpoint

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels."""


Folder = tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...], Preprocessing]
"""What a folder holds: the description of a network for `bases`, its tensors, class names and preprocessing."""


def read_folder(folder: Path) -> Folder:
    """The network in a folder with config.json and model.safetensors (or pytorch_model.bin)."""
    if not (folder / CONFIG).is_file():
        raise BranchoutError(
            f"{folder} is not a saved model, which has a file branchout.json, and not a Hugging Face folder, which has "
            f"a file {CONFIG}; found {some(sorted(entry.name for entry in folder.iterdir()), 8)}"
        )
    config = files.read_json(folder / CONFIG)
    weights = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
    if not isinstance(config, dict) or not weights:
        raise BranchoutError(f"{folder} needs {CONFIG} with a JSON object, and model.safetensors or pytorch_model.bin")
    try:
        read = _from_timm if "architecture" in config else _from_transformers
        return read(folder, config, read_checkpoint(weights[0])[0])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BranchoutError(f"{folder / CONFIG} does not describe a network as expected: {error!r}") from error


# timm.


def _from_timm(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Folder:
    about = {**config, **config.get("pretrained_cfg", {})}
    arch = {"family": "timm", "name": config["architecture"], "options": dict(config.get("model_args", {}))}
    names = tuple(map(str, about.get("label_names") or ()))
    return (arch, tensors, names if len(names) == config.get("num_classes") else (), timm_preprocessing(about))


def timm_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing that a timm configuration asks for."""
    from timm.data import resolve_data_config

    found = resolve_data_config(pretrained_cfg=dict(config))
    channels, size, _ = found["input_size"]
    mean, std = tuple(found["mean"]), tuple(found["std"])
    return Preprocessing(size, channels, mean, std, found["interpolation"], found["crop_pct"])


# transformers.


RENAMED = Path(__file__).parent.parent / "assets" / "transformers-names.json"
"""For each family the patterns in transformers' names of tensors, and what timm has in their place, in order."""
UNUSED = re.compile(r"mask_token|pooler\.|text_model\.|logit_scale|text_projection|visual_projection|position_ids")
"""Tensors of a transformers file that a classifier does not use."""


def _from_transformers(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Folder:
    kind = config.get("model_type")
    if kind not in READERS:
        raise BranchoutError(
            f"{folder} holds a transformers network of the type {kind!r}; supported are {', '.join(READERS)}. Many "
            "others have a timm name: type branchout bases"
        )
    settings = {**config, **config.get("vision_config", {})}
    arch, family = READERS[kind](settings, any(name.startswith("classifier.") for name in tensors))
    rules = files.read_json(RENAMED)[family]
    tensors = {name: value for name, value in tensors.items() if not UNUSED.search(name)}
    for pattern, by in rules.items():
        tensors = {re.sub(pattern, by, name): value for name, value in tensors.items()}
    preprocessing = _transformers_preprocessing(folder, settings)
    if "pos_embed" in tensors:
        arch["options"]["img_size"] = preprocessing.size
        tensors = _as_timm_vit(tensors, preprocessing.size // arch["options"]["patch_size"])
        if not arch["options"].get("final_norm", True):
            tensors = {name: value for name, value in tensors.items() if not name.startswith("norm.")}
    labels = config.get("id2label") or {}
    names = tuple(str(labels[str(number)]) for number in range(len(labels)))
    if len(names) == 1000 and names[0].startswith("tench"):
        names = ()  # ImageNet's, which `bases` names
    return ({"family": "timm", **arch}, tensors, unique_names(names, range(len(names))), preprocessing)


Read = tuple[dict[str, Any], str]
"""The description of a timm network, and the family whose names its tensors have."""


def _resnet(config: Mapping[str, Any], headed: bool) -> Read:
    _require(config, hidden_act="relu", downsample_in_first_stage=False, downsample_in_bottleneck=False)
    basic = config["layer_type"] == "basic"
    return {"name": "resnet18" if basic else "resnet50", "options": {"layers": list(config["depths"])}}, "resnet"


def _convnext(config: Mapping[str, Any], headed: bool) -> Read:
    _require(config, hidden_act="gelu", patch_size=4)
    options = {"depths": list(config["depths"]), "dims": list(config["hidden_sizes"])}
    eps = {"head.norm": config.get("layer_norm_eps", 1e-12)}
    return {"name": "convnext_tiny", "options": options, "norm_eps": eps}, "convnext"


def _vit(config: Mapping[str, Any], headed: bool) -> Read:
    _require(config, hidden_act="gelu", use_swiglu_ffn=False)
    options = _vit_options(config) | {"qkv_bias": bool(config.get("qkv_bias", True))}
    arch = {"name": "vit_base_patch16_224", "options": options, "norm_eps": {"": config["layer_norm_eps"]}}
    if config["model_type"] == "dinov2":
        options["init_values"] = 1.0  # layers are scaled; the values are in the file
        if headed:
            arch["pool"] = "token and mean"
    return arch, "vit"


def _clip(config: Mapping[str, Any], headed: bool) -> Read:
    act = config.get("hidden_act", "quick_gelu")
    options = _vit_options(config) | {"pre_norm": True, "act_layer": act}
    if headed:  # transformers' classifier uses the mean patch token, without the last normalisation
        options |= {"global_pool": "avg", "final_norm": False, "fc_norm": False}
    eps = {"": config.get("layer_norm_eps", 1e-5)}
    return {"name": "vit_base_patch16_224", "options": options, "norm_eps": eps}, "clip"


READERS: dict[str, Callable[[Mapping[str, Any], bool], Read]] = {
    "resnet": _resnet,
    "convnext": _convnext,
    "vit": _vit,
    "dinov2": _vit,
    "clip": _clip,
    "clip_vision_model": _clip,
}
"""The types of transformers networks that can be read."""


def _vit_options(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"]
    return {
        "patch_size": config["patch_size"],
        "embed_dim": width,
        "depth": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": config["intermediate_size"] / width if "intermediate_size" in config else config["mlp_ratio"],
    }


def _require(config: Mapping[str, Any], **expected: object) -> None:
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise BranchoutError(
                f"Networks of the type {config['model_type']} are supported with {name} = {value!r} only; this one "
                f"has {config[name]!r}"
            )


def _as_timm_vit(tensors: dict[str, Tensor], grid: int) -> dict[str, Tensor]:
    """Query, key and value in one matrix, tokens with a batch dimension, positions for `grid`×`grid` patches."""
    from timm.layers import resample_abs_pos_embed

    width = tensors["pos_embed"].shape[-1]
    found = {name: value for name, value in tensors.items() if not re.search(r"attn\.(query|key|value)\.", name)}
    for name in tensors:
        if ".attn.query." in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            found[name.replace("query", "qkv")] = torch.cat(parts)
    found["cls_token"] = tensors["cls_token"].view(1, 1, width)
    positions = tensors["pos_embed"].view(1, -1, width)
    found["pos_embed"] = resample_abs_pos_embed(positions, [grid, grid], num_prefix_tokens=1, antialias=False)
    return found


def _transformers_preprocessing(folder: Path, config: Mapping[str, Any]) -> Preprocessing:
    """From the preprocessor's file, where there is one; an image is cropped to a square, never squeezed into one."""
    path = folder / PREPROCESSOR
    about = files.read_json(path) if path.is_file() else {}
    size, crop = about.get("size", config.get("image_size", 224)), about.get("crop_size")
    resized = size.get("shortest_edge") or size["height"] if isinstance(size, dict) else size
    seen = crop["height"] if isinstance(crop, dict) else crop
    seen = seen if seen and about.get("do_center_crop", True) else resized
    share = about.get("crop_pct") or min(1.0, seen / resized)
    mean, std = tuple(about.get("image_mean", MEAN)), tuple(about.get("image_std", STD))
    return Preprocessing(seen, 3, mean, std, "bicubic" if about.get("resample", 3) == 3 else "bilinear", share)
