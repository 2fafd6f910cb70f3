"""No connection to the hub, without a network: its address is one that refuses, or none."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import timm
from huggingface_hub import constants

from branchout.errors import BranchoutError
from branchout.model import hub
from branchout.model.bases import open_base
from branchout.model.hub_connection import offline_if_unreachable, unreachable_host


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
    """Whether the client was set to work offline, at each network that timm was asked for; timm then fails."""
    seen = []

    def create_model(*args: object, **options: object) -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        raise RuntimeError("the file is damaged.")

    monkeypatch.setattr(timm, "create_model", create_model)
    return seen


def test_a_host_that_refuses_or_does_not_exist_is_unreachable(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unreachable_host() == refusing
    for host in ("nowhere.invalid", "a..b"):
        monkeypatch.setattr(constants, "ENDPOINT", f"https://{host}")
        assert unreachable_host() == host
    monkeypatch.setattr(constants, "ENDPOINT", "https://[::1")
    assert unreachable_host() == ""


def test_a_host_that_listens_is_reached(listening: socket.socket) -> None:
    assert unreachable_host() == ""
    with offline_if_unreachable() as host:
        assert host == ""
        assert not constants.HF_HUB_OFFLINE


def test_only_a_proxy_for_the_hub_hides_whether_it_is_reached(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    assert unreachable_host() == refusing  # its address has http
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert unreachable_host() == ""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert unreachable_host() == refusing


def test_an_unreachable_hub_is_named_and_asked_for_nothing(refusing: str) -> None:
    told = rf"no connection to {re.escape(refusing)}, and no complete earlier download"
    with pytest.raises(BranchoutError, match=rf"{told}.*efficientnet_lite0"):
        open_base("mobilenetv3_small_050")
    with pytest.raises(BranchoutError, match=told):
        hub.fetch("hf-hub:anna/birds")
    assert not constants.HF_HUB_OFFLINE


def test_another_reason_is_not_hidden(refusing: str, attempts: list[bool]) -> None:
    with pytest.raises(BranchoutError, match=r"failed: the file is damaged\. Without"):
        open_base("mobilenetv3_small_050")
    assert attempts == [True]
    assert not constants.HF_HUB_OFFLINE


def test_two_downloads_at_once_leave_the_setting_as_it_was(refusing: str, attempts: list[bool]) -> None:
    together = Barrier(2)

    def load() -> None:
        together.wait()
        with pytest.raises(BranchoutError):
            open_base("mobilenetv3_small_050")

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(load) for _ in range(2)]:
            done.result()
    assert attempts == [True, True]
    assert not constants.HF_HUB_OFFLINE
