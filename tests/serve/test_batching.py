"""The queue before the model: what is run together, what waits, what is turned away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from serving import wait_for

from branchout.serve.batching import Batcher, Closed, Full


class Slow:
    """Doubles numbers, once the gate is open; remembers what came together."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.gate.wait(20)
        self.batches.append(items)
        if 13 in items:
            raise ValueError("13 cannot be doubled")
        return [2 * item for item in items]


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.gate.set()


def results(futures: list[Future[int]]) -> list[int]:
    return [future.result(20) for future in futures]


def test_everyone_gets_their_own_answer_and_what_waits_is_run_together(slow: Slow) -> None:
    batcher = Batcher(slow, size=4, capacity=100)
    first = batcher.submit([100])
    wait_for(lambda: batcher.waiting == 0)  # the first is with the model, and holds it up
    rest = [batcher.submit([n, n + 50]) for n in range(5)]
    assert batcher.waiting == 10
    slow.gate.set()
    assert results(first) == [200]
    assert [results(each) for each in rest] == [[2 * n, 2 * n + 100] for n in range(5)]
    assert [len(batch) for batch in slow.batches] == [1, 4, 4, 2]
    batcher.close()


def test_more_than_may_wait_is_turned_away_as_a_whole(slow: Slow) -> None:
    batcher = Batcher(slow, size=4, capacity=3)
    held = batcher.submit([1])
    wait_for(lambda: batcher.waiting == 0)
    waiting = batcher.submit([2, 3])
    with pytest.raises(Full):
        batcher.submit([4, 5])
    assert batcher.waiting == 2
    last = batcher.submit([6])
    slow.gate.set()
    assert results([*held, *waiting, *last]) == [2, 4, 6, 12]
    batcher.close()


def test_one_that_fails_fails_alone(slow: Slow) -> None:
    slow.gate.set()
    batcher = Batcher(slow, size=8, capacity=8)
    good, bad, other = batcher.submit([1, 13, 2])
    assert results([good, other]) == [2, 4]
    with pytest.raises(ValueError, match="13"):
        bad.result(20)
    assert results(batcher.submit([5])) == [10]  # and the thread goes on
    batcher.close()


def test_who_has_gone_is_not_answered(slow: Slow) -> None:
    batcher = Batcher(slow, size=1, capacity=8)
    held = batcher.submit([1])
    wait_for(lambda: batcher.waiting == 0)
    gone, stays = batcher.submit([2, 3])
    assert gone.cancel()
    slow.gate.set()
    assert results([*held, stays]) == [2, 6]
    assert slow.batches == [[1], [3]]
    batcher.close()


def test_closing_answers_what_waits_and_takes_nothing_more(slow: Slow) -> None:
    batcher = Batcher(slow, size=2, capacity=8)
    futures = batcher.submit([1, 2, 3])
    slow.gate.set()
    batcher.close()
    assert results(futures) == [2, 4, 6]
    assert not batcher.alive
    with pytest.raises(Closed):
        batcher.submit([4])


def test_who_comes_alone_does_not_wait_for_others(slow: Slow) -> None:
    slow.gate.set()
    batcher = Batcher(slow, size=4, linger=10.0)
    start = time.monotonic()
    assert results(batcher.submit([1])) == [2]
    assert time.monotonic() - start < 5
    batcher.close()


def test_a_batch_lingers_for_those_on_the_way_and_not_for_ever(slow: Slow) -> None:
    slow.gate.set()
    batcher = Batcher(slow, size=4, linger=10.0)
    with batcher.coming():
        first = batcher.submit([1])
        second = batcher.submit([2])
        time.sleep(0.1)
        assert slow.batches == []
    assert results([*first, *second]) == [2, 4]
    assert slow.batches == [[1, 2]]
    batcher.close()
    hasty = Batcher(slow, size=4, linger=0.01)
    with hasty.coming():  # who never arrives
        assert results(hasty.submit([3])) == [6]
    hasty.close()
