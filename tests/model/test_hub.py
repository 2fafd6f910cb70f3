"""Models on the hub, with a hub that is a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from helpers import refused, run, well

from branchout import api
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model import hub, hub_connection


class Shelf:
    """Stands in for the hub: repositories are folders, and every call is noted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, repo_id: str, **options: Any) -> str:
        self.calls.append(("create", {"repo_id": repo_id, **options}))
        (self.root / repo_id).mkdir(parents=True, exist_ok=options["exist_ok"])
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **options: Any) -> None:
        self.calls.append(("upload", {"repo_id": repo_id, **options}))
        for file in Path(folder_path).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, self.root / repo_id / file.name)

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert not huggingface_hub.constants.HF_HUB_OFFLINE
        self.calls.append(("download", {"repo_id": repo_id, "revision": revision}))
        if not (self.root / repo_id).is_dir():
            raise ConnectionError("the hub cannot be reached\nand a page of details")
        cache = self.root / "cache" / (revision or "main")
        cache.mkdir(parents=True, exist_ok=True)
        for file in (self.root / repo_id).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, cache / file.name)
        return str(cache)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(hub_connection, "why_offline", lambda: "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_pushed_is_the_folder_and_comes_back_the_same(
    shelf: Shelf, extended: api.Model, val: Samples, tmp_path: Path
) -> None:
    assert extended.folder is not None
    told = well(run("push", extended.folder, "anna/birds-v2", "--private"))
    assert "pushed to https://hub.example/anna/birds-v2" in told
    assert "branchout predict hf-hub:anna/birds-v2 photo.jpg" in told
    assert contents(shelf.root / "anna/birds-v2") == contents(extended.folder)
    assert shelf.calls[0] == ("create", {"repo_id": "anna/birds-v2", "private": True, "exist_ok": True})

    back = api.load("hf-hub:anna/birds-v2@v1.0")
    assert shelf.calls[-1] == ("download", {"repo_id": "anna/birds-v2", "revision": "v1.0"})
    for number in (0, 40, 80):
        assert back.predict(val.read(number)) == extended.predict(val.read(number))

    well(run("pull", "anna/birds-v2", "--out", tmp_path / "mine"))
    assert contents(tmp_path / "mine") == contents(extended.folder)
    refused(run("pull", "anna/birds-v2", "--out", tmp_path / "mine"), "already exists")


def test_the_hubs_cache_is_never_changed(shelf: Shelf, extended: api.Model, val: Samples) -> None:
    """A model of the hub's can be tuned in memory; a folder that others share stays as it is."""
    extended.push("anna/birds")
    before = contents(shelf.root / "anna/birds")
    model = api.load("hf-hub:anna/birds")
    model.tune("novel")
    model.tune("base")
    assert contents(shelf.root / "cache" / "main") == before
    refused(run("tune", "hf-hub:anna/birds"), "is on the hub", "branchout pull anna/birds --out v2/")


def test_only_the_models_own_files_travel(shelf: Shelf, extended: api.Model, tmp_path: Path) -> None:
    folder = tmp_path / "v2"
    shutil.copytree(extended.folder, folder)
    (folder / "notes.txt").write_text("secret")
    hub.push(folder, "anna/birds")
    assert not (shelf.root / "anna/birds" / "notes.txt").exists()
    (shelf.root / "anna/birds" / "run.py").write_text("print('run')")
    assert {file.name for file in hub.fetch("hf-hub:anna/birds").iterdir()} == set(contents(extended.folder))


def test_what_goes_wrong_is_said(shelf: Shelf, extended: api.Model, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    picture.write_bytes(b"")
    answer = run("predict", "hf-hub:anna/nothing", picture)
    refused(answer, "Download of hf-hub:anna/nothing failed: the hub cannot be reached", "connection")
    (shelf.root / "anna" / "other").mkdir(parents=True)
    (shelf.root / "anna" / "other" / "model.safetensors").write_bytes(b"")
    refused(run("predict", "hf-hub:anna/other", picture), "anna/other", "branchout.json", "config.json")
    for name in ("birds", "a/b/c", "/x", "", "a b/c"):
        with pytest.raises(BranchoutError, match="owner/name"):
            api.load(f"hf-hub:{name}")
        with pytest.raises(BranchoutError, match="owner/name"):
            hub.push(extended.folder, name)
    refused(run("push", tmp_path, "anna/birds"), "is not a saved model")
    refused(run("push", tmp_path / "v9", "anna/birds"), "There is no saved model")
    refused(run("pull", "anna/nothing", "--out", tmp_path / "x"), "Download of hf-hub:anna/nothing failed")
    unsaved = api.Model(extended.saved, None)
    with pytest.raises(BranchoutError, match="Only a saved model can be pushed"):
        unsaved.push("anna/birds")
    assert not any(what == "upload" for what, _ in shelf.calls)


def test_a_spoiled_model_is_not_pushed(shelf: Shelf, extended: api.Model, tmp_path: Path) -> None:
    folder = tmp_path / "v2"
    shutil.copytree(extended.folder, folder)
    weights = folder / "step-1.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    refused(run("push", folder, "anna/birds"), "step-1.safetensors was changed or truncated")
    assert shelf.calls == []


def test_a_hub_that_refuses_is_answered_with_how_to_log_in(
    shelf: Shelf, extended: api.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("401 Unauthorized")

    monkeypatch.setattr(shelf, "create_repo", refuse)
    refused(run("push", extended.folder, "anna/birds"), "to anna/birds failed: 401 Unauthorized",
            "hf auth login")  # fmt: skip
