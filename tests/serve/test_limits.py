"""Limits over all requests: bodies that are uploading, and pixels that are decoded at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from branchout.serve.limits import BodyLimits, Limits, PixelBudget, Refused


async def hold(budget: PixelBudget, cost: float, name: str, log: list[str], gate: asyncio.Event) -> None:
    async with budget.reserve(cost):
        log.append(name)
        await gate.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_images_are_decoded_together_within_the_total_and_in_order() -> None:
    async def scene() -> None:
        budget, log = PixelBudget(10), []
        gates = {name: asyncio.Event() for name in "abcd"}
        costs = {"a": 6, "b": 6, "c": 3, "d": 100}
        tasks = {n: asyncio.create_task(hold(budget, costs[n], n, log, gates[n])) for n in "abcd"}
        await settle()
        assert log == ["a"]  # c would fit, but b was first
        gates["a"].set()
        await settle()
        assert log == ["a", "b", "c"]
        gates["b"].set()
        await settle()
        assert log == ["a", "b", "c"]  # d is larger than the total, and waits until it is alone
        gates["c"].set()
        await settle()
        assert log == ["a", "b", "c", "d"]
        gates["d"].set()
        await asyncio.gather(*tasks.values())
        assert budget.free == 10

    asyncio.run(scene())


def test_whoever_is_cancelled_gives_its_place_back() -> None:
    async def scene() -> None:
        budget, log, gate = PixelBudget(10), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(budget, cost, name, log, gate)) for name, cost in (("a", 8), ("b", 9))]
        await settle()
        third = asyncio.create_task(hold(budget, 1, "c", log, gate))
        await settle()
        assert log == ["a"]
        tasks[1].cancel()  # while it waits
        await settle()
        assert log == ["a", "c"]
        tasks[0].cancel()  # while it runs
        await settle()
        assert budget.free == 9
        gate.set()
        await third
        assert budget.free == 10

    asyncio.run(scene())


async def upload(bodies: BodyLimits, size: int, gate: asyncio.Event, path: str = "/predict") -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * size, "more_body": False}

    scope = {"type": "http", "path": path, "headers": [], "gate": gate}
    await bodies(scope, receive, None)  # type: ignore[arg-type]


async def keep(scope: Scope, receive: Receive, _: Send) -> None:
    """An app that keeps the body until its gate opens."""
    await receive()
    await scope["gate"].wait()


def test_all_bodies_together_are_limited_by_count_and_by_bytes() -> None:
    async def scene() -> None:
        bodies = BodyLimits(keep, Limits(uploads=2, upload_bytes=100))
        gate = asyncio.Event()
        first = asyncio.create_task(upload(bodies, 60, gate))
        await settle()
        with pytest.raises(Refused, match="bytes") as refusal:
            await upload(bodies, 50, gate)
        assert refusal.value.status_code == 503
        second = asyncio.create_task(upload(bodies, 40, gate))
        await settle()
        with pytest.raises(Refused, match="uploading"):
            await upload(bodies, 0, gate)
        gate.set()
        await asyncio.gather(first, second)
        assert (bodies.open, bodies.bytes) == (0, 0)
        await upload(bodies, 100, gate)

    asyncio.run(scene())


def test_a_body_without_images_must_be_short() -> None:
    bodies = BodyLimits(keep, Limits())
    with pytest.raises(Refused, match="larger than") as refusal:
        asyncio.run(upload(bodies, 10_001, asyncio.Event(), "/operating-point"))
    assert refusal.value.status_code == 413
