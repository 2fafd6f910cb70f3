"""What a server holds: a model once there is one, the thread that runs it, the threads that decode, and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import UploadFile
from torch import Tensor

from branchout import api
from branchout.data.decode import Kind, UnreadableImage
from branchout.data.images import cores
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.checkpoint import is_saved_model
from branchout.serve.batching import Batcher, Closed, Full
from branchout.serve.model_info import finite, model_facts
from branchout.serve.engine import Engine, Question, Told
from branchout.serve.limits import RETRY_SOON, Limits, PixelBudget, Refused, Uploads, megabytes
from branchout.serve.live_report import Telling
from branchout.serve.uploads import UNNAMED

BUSY = "Too many images are waiting. Try again in a second."
LOOK_EVERY = 0.5
"""Seconds between two looks at whether an awaited model is there."""


class Service:
    """One model, served."""

    def __init__(
        self,
        model: api.Model | None,
        limits: Limits,
        watch: Path | None = None,
        test: Path | Samples | None = None,
        typed: str | None = None,
    ) -> None:
        self.limits = limits
        self.watch = watch
        self.failure: str | None = None
        """Why the model that was awaited cannot be served."""
        self.leaving: Callable[[], bool] = lambda: False
        """Whether the server is about to end; what would go on for ever asks it."""
        self.telling = Telling(test, typed)
        self.turning = asyncio.Lock()
        """Held while the operating point changes, so that two changes do not cross."""
        self._model = model
        self._engine: Engine | None = None
        self._facts: dict[str, Any] = {}
        self._batcher: Batcher[Question, Told] | None = None
        self.uploads = Uploads(limits)
        self._small: ThreadPoolExecutor | None = None
        self._large: ThreadPoolExecutor | None = None
        self._budget = PixelBudget(limits.decoding_pixels)
        self._admitted = 0

    def start(self) -> None:
        # Two pools, so that small images never wait behind large ones.
        self._small = ThreadPoolExecutor(max_workers=min(4, cores()), thread_name_prefix="decode")
        self._large = ThreadPoolExecutor(max_workers=min(4, cores()), thread_name_prefix="decode-large")
        if self._model is not None:
            self._open(self._model)

    def _open(self, model: api.Model) -> None:
        self._facts = finite(model_facts(model))
        engine = Engine(model)
        self._batcher = Batcher(
            engine.answer, size=self.limits.batch, linger=self.limits.linger, capacity=self.limits.waiting
        )
        self.telling.begin(model)
        self._engine = engine

    async def await_model(self) -> None:
        """Open the model that is being made, as soon as it is finished."""
        assert self.watch is not None
        while not is_saved_model(self.watch):
            await asyncio.sleep(LOOK_EVERY)
        try:
            await asyncio.to_thread(lambda: self._open(api.load(self.watch)))  # type: ignore[arg-type]
        except BranchoutError as error:
            self.failure = str(error)

    def stop(self) -> None:
        self.telling.stop()
        if self._batcher is not None:
            self._batcher.close()
        for pool in (self._small, self._large):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    # What requests need.

    @property
    def ready(self) -> bool:
        return self._batcher is not None and self._batcher.alive

    @property
    def queued(self) -> int:
        return 0 if self._batcher is None else self._batcher.waiting

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            if self.failure:
                raise Refused(503, f"the model was made but cannot be opened: {self.failure}")
            raise Refused(503, "the model is still being made; /progress says how far it is", {"Retry-After": "10"})
        return self._engine

    @property
    def facts(self) -> dict[str, Any]:
        """What /model tells, less the operating point."""
        assert self.engine
        return self._facts

    def check_room(self) -> None:
        """Refuse a request while too many others are being answered."""
        full = self._batcher is not None and self._batcher.waiting >= self.limits.waiting
        if self._admitted >= self.limits.requests or full:
            raise Refused(503, BUSY, RETRY_SOON)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """One of the requests that are decoded and answered at the same time. Uploading ones do not count."""
        self.check_room()
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While a request is read; the model may wait a moment for it."""
        assert self._batcher is not None
        with self._batcher.coming():
            yield

    async def decode(self, files: Sequence[UploadFile]) -> list[Tensor | UnreadableImage]:
        """Each file as the network sees it, or the reason why not, decoded beside the event loop."""
        found: list[Tensor | UnreadableImage] = []
        left = float(self.limits.request_pixels)
        for file in files:
            try:
                cost, pixels = await self._decode(file, left)
                left -= cost
                found.append(pixels)
            except UnreadableImage as error:
                found.append(error)
        return found

    async def _decode(self, file: UploadFile, left: float) -> tuple[float, Tensor]:
        """The cost and the pixels of one file; `left` is what the other images of the request left over."""
        name, limits, engine = file.filename or UNNAMED, self.limits, self.engine
        run = asyncio.get_running_loop().run_in_executor
        if (file.size or 0) > limits.file_bytes:
            raise UnreadableImage(Kind.TOO_LARGE, f"the limit is {megabytes(limits.file_bytes)} a file", name)
        cost = await run(self._small, engine.pixel_cost, file.file, name, limits)
        if cost > left:
            most = f"{limits.request_pixels / 1e6:,.3g} million"
            detail = f"more than {most} pixels in one request; send this image in another one"
            raise UnreadableImage(Kind.TOO_LARGE, detail, name)
        if cost <= limits.small_pixels:
            return cost, await run(self._small, engine.pixels, file.file, name, limits)
        async with self._budget.reserve(cost):
            return cost, await run(self._large, engine.pixels, file.file, name, limits)

    async def ask(self, questions: Sequence[Question]) -> list[Told]:
        """The answers, in the order of the questions; all of them are taken on, or none."""
        assert self._batcher is not None
        try:
            futures = self._batcher.submit(questions)
        except Full:
            raise Refused(503, BUSY, RETRY_SOON) from None
        except Closed:
            raise Refused(503, "The server is stopping.", RETRY_SOON) from None
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
