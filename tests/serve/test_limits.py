"""The pixel budget: what is decoded at the same time, in which order, and what is given back."""

from __future__ import annotations

import asyncio

from branchout.serve.limits import PixelBudget


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
