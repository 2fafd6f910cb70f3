"""What a running server holds: the model, its report, the thread that runs it, and the threads that decode images."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fastapi import UploadFile
from torch import Tensor

from branchout import api
from branchout.data.decode import Kind, UnreadableImage
from branchout.data.images import cores
from branchout.errors import BranchoutError
from branchout.model.manifest import is_saved_model
from branchout.serve.batching import Batcher, Closed, Full
from branchout.serve.engine import Engine, Question, Result
from branchout.serve.limits import RETRY_SOON, Limits, PixelBudget, Refused, megabytes
from branchout.serve.live_report import LiveReport
from branchout.serve.model_info import model_info
from branchout.serve.schema import ModelInfo
from branchout.serve.uploads import UNNAMED

BUSY = "Too many images are waiting. Try again in a second."
CHECK_EVERY = 0.5
"""Seconds between two checks whether an awaited model is finished."""


class Service:
    """One served model, or one that is awaited."""

    def __init__(
        self,
        model: api.Model | None,
        limits: Limits,
        report: LiveReport,
        watch: Path | None = None,
        device: str | None = None,
    ) -> None:
        self.limits = limits
        self.report = report
        self.watch = watch
        self.failure: str | None = None
        """Why the awaited model cannot be opened."""
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the server is about to stop; endless responses ask it."""
        self.point_lock = asyncio.Lock()
        """Held while the operating point changes."""
        self._model = model
        self.device = device
        self._engine: Engine | None = None
        self._loaded = 0
        self._info: ModelInfo | None = None
        self._batcher: Batcher[Question, Result] | None = None
        # Two pools, so that small images never wait behind large ones.
        self._pools = {name: ThreadPoolExecutor(min(4, cores()), f"decode-{name}") for name in ("small", "large")}
        self._budget = PixelBudget(limits.decoding_pixels)
        self._admitted = 0

    def start(self) -> None:
        if self._model is not None:
            self._open(self._model, self.report)

    def _open(self, model: api.Model, report: LiveReport) -> None:
        """Requests see either the earlier model or this one: everything is made first."""
        limits, info, engine = self.limits, model_info(model), Engine(model)
        report.start(model)
        self._batcher = Batcher(engine.answer, size=limits.batch, linger=limits.linger, capacity=limits.waiting)
        self.report, self._info, self._engine = report, info, engine
        self._loaded += 1

    async def await_model(self) -> None:
        """Open the model that is being made as soon as it is finished."""
        watch = self.watch
        assert watch is not None
        while not is_saved_model(watch):
            await asyncio.sleep(CHECK_EVERY)
        try:
            await asyncio.to_thread(lambda: self._open(api.load(watch, device=self.device), self.report))
        except BranchoutError as error:
            self.failure = str(error)

    @property
    def model(self) -> api.Model | None:
        """The model that is served; None while it is awaited."""
        return None if self._engine is None else self._engine.model

    def serving(self) -> dict[str, str | int | bool | None]:
        """By what a page notices that another model is served, or that another point was saved: see schema."""
        points = self.engine.points
        points.refresh()
        steps = points.model.saved.step_points
        return {
            "model": self.info.name,
            "loaded": self._loaded,
            "saved_point": steps[-1].point if steps else None,
            "folder_changed": points.folder_changed,
        }

    def replace(self, model: api.Model) -> None:
        """Serve another model from now on, as if the server had been started with it."""
        earlier, batcher = self.report, self._batcher
        model_path = str(model.folder or earlier.model_path)
        self._open(model, LiveReport(earlier.test, model_path, classes_from=earlier.classes_from))
        earlier.stop()
        if batcher is not None:
            batcher.close()

    def stop(self) -> None:
        self.report.stop()
        if self._batcher is not None:
            self._batcher.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    @property
    def ready(self) -> bool:
        # The engine is set last: until then a request would still be refused.
        return self._engine is not None and self._batcher is not None and self._batcher.alive

    @property
    def queued(self) -> int:
        return 0 if self._batcher is None else self._batcher.waiting

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            if self.failure:
                raise Refused(503, f"The model cannot be opened: {self.failure}")
            raise Refused(503, "The model is still being made. See /progress.", {"Retry-After": "10"})
        return self._engine

    @property
    def info(self) -> ModelInfo:
        assert self.engine
        assert self._info is not None
        return self._info

    def check_room(self) -> None:
        """Refuse a request while too many others are being answered."""
        if self._admitted >= self.limits.requests or self.queued >= self.limits.waiting:
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

    def coming(self) -> AbstractContextManager[None]:
        """While a request is read, the model may wait a moment for it."""
        assert self._batcher is not None
        return self._batcher.coming()

    async def decode(self, files: Sequence[UploadFile]) -> list[Tensor | UnreadableImage]:
        """Each file as the network sees it, or the reason why not."""
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
        cost, pixels = await run(self._pools["small"], engine.small_image, file.file, name, limits, left)
        if cost > left:
            most = f"{limits.request_pixels / 1e6:,.3g} million"
            detail = f"more than {most} pixels in one request; send this image in another one"
            raise UnreadableImage(Kind.TOO_LARGE, detail, name)
        if pixels is not None:
            return cost, pixels
        async with self._budget.reserve(cost):
            return cost, await run(self._pools["large"], engine.pixels, file.file, name, limits)

    async def ask(self, questions: Sequence[Question]) -> list[Result]:
        """The results in the order of the questions. Either all of them are accepted or none."""
        assert self._batcher is not None
        space = self.engine.model.classifier.space
        if any(question.point.head.space is not space for question in questions):
            raise Refused(503, "The model was replaced by another one. Send the images again.", RETRY_SOON)
        try:
            futures = self._batcher.submit(questions)
        except Full:
            raise Refused(503, BUSY, RETRY_SOON) from None
        except Closed:
            raise Refused(503, "The server is stopping.", RETRY_SOON) from None
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
