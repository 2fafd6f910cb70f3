"""A queue before the model: waiting items are run in batches by one thread, and each caller gets its own result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Full(Exception):  # noqa: N818 – try again later
    """The queue has no room for these items."""


class Closed(Exception):  # noqa: N818 – not an error
    """The queue accepts nothing any more."""


class Batcher(Generic[Item, Result]):
    """A queue and the thread that empties it, at most `size` items at a time.

    An incomplete batch waits up to `linger` seconds, but only while another request is being read (`coming`): a single
    client never waits.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], list[Result]],
        *,
        size: int = 32,
        linger: float = 0.003,
        capacity: int = 256,
    ) -> None:
        self.size = size
        self.linger = linger
        self.capacity = capacity
        self._run = run
        self._queue: deque[tuple[Item, Future[Result]]] = deque()
        self._coming = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While this is open, an incomplete batch lingers."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify()

    def submit(self, items: Sequence[Item]) -> list[Future[Result]]:
        """Queue all of these items or none."""
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._queue) + len(items) > self.capacity:
                raise Full
            added: list[tuple[Item, Future[Result]]] = [(item, Future()) for item in items]
            self._queue.extend(added)
            self._changed.notify()
        return [future for _, future in added]

    def close(self) -> None:
        """Run what is queued, accept nothing more, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            live = [(item, future) for item, future in batch if future.set_running_or_notify_cancel()]
            if live:
                self._answer(live)

    def _next(self) -> list[tuple[Item, Future[Result]]]:
        """The next batch; empty once the queue is closed and empty."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            until = time.monotonic() + self.linger
            while len(self._queue) < self.size and self._coming and not self._closed:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [self._queue.popleft() for _ in range(min(self.size, len(self._queue)))]

    def _answer(self, batch: list[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self._run([item for item, _ in batch])
            answers = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:  # one item that fails must not fail the others
                self._answer([each])
            return
        for (_, future), result in answers:
            future.set_result(result)
