"""No connection to the hub, without a network: its address is one that refuses, or none."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import huggingface_hub
import pytest
import timm
from huggingface_hub import constants

from branchout import api
from branchout.errors import BranchoutError
from branchout.model import hub, hub_connection
from branchout.model.bases import open_base
from branchout.model.hub_connection import why_offline


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a proxy nor the offline setting of whoever runs the tests, and an empty cache."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@pytest.fixture
def refusing(listening: socket.socket) -> str:
    listening.close()
    return "127.0.0.1"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the client was set to work offline, at each download that was asked for; all of them fail."""
    seen = []

    def fail(*args: object, **options: object) -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        raise RuntimeError("the file is damaged.")

    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    return seen


def test_a_host_that_refuses_or_does_not_exist_is_unreachable(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_offline() == f"there is no connection to {refusing}"
    for host in ("nowhere.invalid", "a..b"):
        monkeypatch.setattr(constants, "ENDPOINT", f"https://{host}")
        assert why_offline() == f"there is no connection to {host}"
    monkeypatch.setattr(constants, "ENDPOINT", "https://[::1")
    assert why_offline() == ""


def test_a_host_that_never_answers_is_unreachable_in_time(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: object, **options: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", never)
    monkeypatch.setattr(hub_connection, "SECONDS", 0.05)
    began = time.monotonic()
    assert why_offline() == f"there is no connection to {refusing}"
    assert time.monotonic() - began < 30


def test_a_name_that_no_server_looks_up_is_unreachable_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Event()
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: answer.wait(60) and [])
    monkeypatch.setattr(hub_connection, "SECONDS", 0.05)
    began = time.monotonic()
    assert why_offline() == "there is no connection to hub.example"
    assert time.monotonic() - began < 30
    answer.set()  # so that the thread ends


def test_a_host_that_listens_is_reached(listening: socket.socket, attempts: list[bool]) -> None:
    assert why_offline() == ""
    with pytest.raises(BranchoutError, match=r"failed: the file is damaged\. Without"):
        open_base("mobilenetv3_small_050")
    assert attempts == [False]


async def reached() -> str:
    return why_offline()


def test_a_caller_with_an_event_loop_may_ask(listening: socket.socket) -> None:
    assert asyncio.run(reached()) == ""


def test_only_a_proxy_for_the_hub_hides_whether_it_is_reached(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    assert why_offline() == f"there is no connection to {refusing}"  # its address has http
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert why_offline() == ""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert why_offline() == f"there is no connection to {refusing}"


def test_an_unreachable_hub_is_named(refusing: str) -> None:
    told = rf"no connection to {re.escape(refusing)}, and there is no complete earlier download"
    with pytest.raises(BranchoutError, match=rf"{told}.*efficientnet_lite0"):
        open_base("mobilenetv3_small_050")
    with pytest.raises(BranchoutError, match=told):
        hub.fetch("hf-hub:anna/birds")
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("asked", [False, True], ids=["no connection", "HF_HUB_OFFLINE"])
def test_a_part_of_an_earlier_download_is_no_model(
    refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extended: api.Model, *, asked: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", asked)
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
    cure = "Unset it" if asked else "Check the network connection"
    reason = "HF_HUB_OFFLINE is set" if asked else f"no connection to {refusing}"

    def incomplete(folder: Path) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(folder))
        with pytest.raises(BranchoutError, match=rf"{reason}, and there is no complete earlier download\. {cure}"):
            hub.fetch("hf-hub:anna/birds")

    incomplete(ours)
    assert extended.folder is not None
    for file in (hub.MANIFEST, "base.safetensors"):  # an extended model has more
        shutil.copy(extended.folder / file, ours)
        incomplete(ours)
    shutil.copytree(extended.folder, ours, dirs_exist_ok=True)
    assert hub.fetch("hf-hub:anna/birds") == ours

    incomplete(other)
    (other / "config.json").write_text("{}")
    incomplete(other)
    (other / "model.safetensors").touch()
    assert hub.fetch("hf-hub:anna/birds") == other
    assert asked == constants.HF_HUB_OFFLINE


def test_an_unreachable_hub_is_asked_for_nothing_and_another_reason_is_not_hidden(
    refusing: str, attempts: list[bool]
) -> None:
    with pytest.raises(BranchoutError, match=r"failed: the file is damaged\. Without"):
        open_base("mobilenetv3_small_050")
    with pytest.raises(BranchoutError, match=r"failed: the file is damaged\. Check"):
        hub.fetch("hf-hub:anna/birds")
    assert attempts == [True, True]
    assert not constants.HF_HUB_OFFLINE


def test_two_downloads_at_once_take_turns(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, inside, most = Barrier(2), [], []

    def create_model(*args: object, **options: object) -> None:
        inside.append(constants.HF_HUB_OFFLINE)
        most.append(len(inside))
        time.sleep(0.2)
        inside.pop()
        raise RuntimeError("the file is damaged")

    def load() -> None:
        together.wait()
        with pytest.raises(BranchoutError):
            open_base("mobilenetv3_small_050")

    monkeypatch.setattr(timm, "create_model", create_model)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(load) for _ in range(2)]:
            done.result()
    assert most == [1, 1]
    assert not constants.HF_HUB_OFFLINE
