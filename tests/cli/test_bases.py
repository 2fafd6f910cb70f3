import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refused, run

from branchout.model.catalogue import families_that_cannot_be_split, listed_bases
from branchout.model.timm_adapters import split_network
from branchout.model.weights import shapes_only


def test_families_are_listed_with_their_sizes() -> None:
    answer = run("bases")
    assert answer.status == 0
    for word in (
        "VisionTransformer",
        "torchvision:resnet18",
        "maxvit_rmlp_pico_rw_256",
        "installed",
        "efficientnet_lite0",
    ):
        assert word in answer.out
    assert "Eva" in answer.out.split("Cannot be split")[1]
    assert "--head FILE" in answer.out


def test_networks_are_listed_one_by_one() -> None:
    answer = run("bases", "efficientnet_lite0")
    lines = {line.split()[0]: line for line in answer.out.splitlines() if "efficientnet_lite0" in line}
    assert set(lines) == {"efficientnet_lite0", "tf_efficientnet_lite0"}
    assert "4.7M" in lines["efficientnet_lite0"]
    assert "224 px" in lines["efficientnet_lite0"]
    assert "download" in lines["tf_efficientnet_lite0"]


def test_json_has_every_network() -> None:
    rows = [json.loads(line) for line in run("bases", "--json").out.splitlines()]
    assert len({row["name"] for row in rows}) == len(listed_bases()) > 500  # each name once
    found = next(row for row in rows if row["name"] == "torchvision:resnet50")
    assert (found["parameters"], found["size"], found["classes"]) == (25557032, 224, 1000)
    assert found["status"] in ("cached", "download")


def test_a_backbone_has_no_classes() -> None:
    found = next(base for base in listed_bases() if base.name == "vit_small_patch14_dinov2")
    assert found.classes == 0
    assert "--head" in run("bases", "vit_small_patch14_dinov2").out


def test_weights_in_a_cache_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    named = {base.name: base for base in listed_bases()}
    on_hub, of_torchvision = named["resnet18"], named["torchvision:resnet18"]
    assert (on_hub.status(), of_torchvision.status()) == ("download", "download")
    folder = tmp_path / "hf" / "hub" / f"models--{on_hub.weights.replace('/', '--')}" / "snapshots" / "1f2e"
    checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
    for file in (folder / "model.safetensors", checkpoints / of_torchvision.weights):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    assert (on_hub.status(), of_torchvision.status()) == ("cached", "cached")


def test_what_is_not_listed_says_why() -> None:
    refused(run("bases", "eva02_base"), "eva02_base", "Eva")
    refused(run("bases", "no-such-network"), "no-such-network")


def test_the_list_agrees_with_the_adapters() -> None:
    """One small network of some families, listed or refused as it is here."""
    import timm

    listed = {base.name: base for base in listed_bases()}
    for name in ("resnet18", "convnext_atto", "mobilenetv3_small_050", "vit_tiny_patch16_224", "repvgg_a0"):
        with shapes_only():
            network = timm.create_model(name)
            assert sum(each.numel() for each in network.parameters()) == listed[name].parameters
            split_network(network)
    refused_names = {name for names in families_that_cannot_be_split().values() for name in names}
    assert not refused_names & set(listed)


def test_neither_torch_nor_timm_is_imported() -> None:
    """So that the command answers at once."""
    code = "import sys; from branchout.cli import app; app(['bases', 'lite'], standalone_mode=False)"
    code += "; assert not {'torch', 'timm', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
