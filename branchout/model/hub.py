"""Models on the Hugging Face hub: fetched and pushed as the folders they are.

A saved model is safetensors and JSON with checksums, so one that a stranger pushed can be opened: nothing in it runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from branchout.errors import BranchoutError
from branchout.model import checkpoint
from branchout.model.manifest import MANIFEST

PREFIX = "hf-hub:"
NAME = re.compile(r"^[\w.-]+/[\w.-]+$", re.ASCII)
FILES = [MANIFEST, "*.safetensors", "README.md"]
"""What a saved model consists of; whatever else lies beside it on the hub is not fetched."""


def is_hub_name(name: str | Path) -> bool:
    return str(name).startswith(PREFIX)


def fetch(name: str) -> Path:
    """The folder of `hf-hub:owner/name`, or of one state of it with `@revision`; downloaded unless it was before."""
    from huggingface_hub import snapshot_download

    place, _, revision = name.removeprefix(PREFIX).partition("@")
    _check(place)
    try:
        folder = Path(snapshot_download(place, revision=revision or None, allow_patterns=FILES))
    except Exception as error:  # the hub's client fails in many ways, all of which mean: no model
        raise BranchoutError(
            f"{name} could not be had from the hub ({_first_line(error)}). Check the name and the network connection; "
            "a private model needs `hf auth login` first. A model that was copied here opens by its folder's path"
        ) from error
    if not checkpoint.is_saved_model(folder):
        raise BranchoutError(
            f"{name} is on the hub, but not a model that Branchout saved: it has no {MANIFEST}. "
            "Weights of a timm network are opened by their timm name"
        )
    return folder


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Push a saved model, after checking that it is whole. Returns the address of its page."""
    from huggingface_hub import HfApi

    place = name.removeprefix(PREFIX)
    _check(place)
    checkpoint.load(folder)  # every checksum, and whether its parts fit together
    try:
        api = HfApi()
        page = str(api.create_repo(place, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=place,
            folder_path=folder,
            allow_patterns=FILES,
            commit_message="A model saved by Branchout",
        )
    except Exception as error:
        raise BranchoutError(
            f"{folder} could not be pushed to {place} ({_first_line(error)}). Type `hf auth login` once, with a token "
            "that may write, and check that the owner is you or an organisation of yours"
        ) from error
    return page


def _check(place: str) -> None:
    if not NAME.match(place):
        raise BranchoutError(f"a model on the hub is named owner/name, such as anna/birds-v2, not {place!r}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
