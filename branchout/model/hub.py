"""Models on the Hugging Face hub: folders are downloaded, and our model folders uploaded, as they are.

A model folder holds safetensors and JSON, so opening one from an unknown source runs no code.
"""

from __future__ import annotations

import re
from pathlib import Path

from branchout.errors import BranchoutError, first_line
from branchout.model import checkpoint, huggingface
from branchout.model.hub_connection import incomplete, offline_if_unreachable, reason_of
from branchout.model.manifest import MANIFEST, is_saved_model, read_manifest

PREFIX = "hf-hub:"
NAME = re.compile(r"^[\w.-]+/[\w.-]+$", re.ASCII)
FILES = [MANIFEST, "*.safetensors", "README.md"]
"""The files of a model folder."""
FOREIGN = [huggingface.CONFIG, huggingface.PREPROCESSOR]
"""What else is downloaded: the description of a network that timm or transformers saved."""


def is_hub_name(name: str | Path) -> bool:
    return str(name).startswith(PREFIX)


def fetch(name: str) -> Path:
    """The local folder of `hf-hub:owner/name` or `hf-hub:owner/name@revision`; downloaded unless it is cached."""
    from huggingface_hub import snapshot_download

    place, _, revision = name.removeprefix(PREFIX).partition("@")
    _check(place)
    with offline_if_unreachable() as offline:
        try:
            folder = Path(snapshot_download(place, revision=revision or None, allow_patterns=[*FILES, *FOREIGN]))
        except Exception as error:  # the hub client raises many kinds of errors
            raise BranchoutError(
                f"Download of {name} failed: {reason_of(error, offline)}. Check the name"
                f"{'' if offline else ' and the network connection'}; for a private model, log in first with "
                "`hf auth login`"
            ) from error
    if offline and not _has_weights(folder):  # a part of it was downloaded earlier
        raise BranchoutError(f"Download of {name} failed: {incomplete(offline)}")
    if not (is_saved_model(folder) or (folder / huggingface.CONFIG).is_file()):
        raise BranchoutError(
            f"{name} is neither a model saved by Branchout nor one of timm or transformers: the repository has no "
            f"{MANIFEST} and no {huggingface.CONFIG}"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    """Whether all files that describe a model are here, and those that they name."""
    if is_saved_model(folder):
        return all((folder / file).is_file() for file in read_manifest(folder)[0].files)
    return (folder / huggingface.CONFIG).is_file() and any(folder.glob("*.safetensors"))


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a model folder, after checking it as `load` does. Returns the address of its page."""
    from huggingface_hub import HfApi

    place = name.removeprefix(PREFIX)
    _check(place)
    checkpoint.load(folder)
    try:
        api = HfApi()
        page = str(api.create_repo(place, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=place, folder_path=folder, allow_patterns=FILES, commit_message="A model saved by Branchout"
        )
    except Exception as error:
        raise BranchoutError(
            f"Upload of {folder} to {place} failed: {first_line(error)}. Log in with `hf auth login` and a token with "
            "write access, and check that the owner is you or an organisation of yours"
        ) from error
    return page


def _check(place: str) -> None:
    if not NAME.match(place):
        raise BranchoutError(f"Expected a model name owner/name, such as anna/birds-v2, found {place!r}")
