"""The report that the page shows: about the model at once, and about labelled images as soon as they are read."""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from branchout.api import Model, samples_in
from branchout.data.decode import UnreadableImage
from branchout.data.samples import Image, Samples
from branchout.errors import BranchoutError, printable
from branchout.model.checkpoint import SavedModel
from branchout.report.data import ReportData
from branchout.report.page import parts
from branchout.serve.limits import Refused
from branchout.serve.responses import finite
from branchout.training.loop import Event, OnProgress, silent


class Stopped(Exception):  # noqa: N818 – not an error
    """The server stops while images are being read."""


def sentence(error: Exception) -> str:
    return str(error) if isinstance(error, BranchoutError) else f"{type(error).__name__}: {error}"


class LiveReport:
    """The report of one model, first without labelled images, then with those of `test`."""

    def __init__(
        self,
        test: Path | Samples | None = None,
        model_path: str | None = None,
        on_progress: OnProgress = silent,
        classes_from: str | None = None,
    ) -> None:
        self.test = test
        self.classes_from = classes_from
        self.state: dict[str, Any] = {
            "state": "none", "work": "", "done": 0, "total": 0, "error": None, "problems": [],
        }  # fmt: skip
        """The progress of reading the labelled images: see schema.LabelledImages."""
        self.model_path = model_path
        self._on_progress = on_progress
        self._model: Model | None = None
        self._facts: ReportData | None = None
        self._samples: Samples | None = None
        self._parts: dict[str, Any] | None = None
        self._parts_of: SavedModel | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, model: Model) -> None:
        self._model = model
        self._facts = self._gather(model, None)
        if self.test is not None:
            self.state = {**self.state, "state": "working"}
            self._thread = threading.Thread(target=self._read, args=(model, self.test), name="report", daemon=True)
            self._thread.start()

    def _gather(self, model: Model, samples: Samples | None) -> ReportData:
        facts = model.report_data(samples, model_path=self.model_path, on_progress=self._note)
        # The command that adds labelled images to this page, not to a report file.
        return replace(facts, command=f"branchout serve {shlex.quote(facts.path)} TEST/")

    def _read(self, model: Model, test: Path | Samples) -> None:
        try:
            problems: list[str] = []
            samples = samples_in(test, problems, model.classes, self.classes_from, self._note)
            facts = self._gather(model, samples)
        except Stopped:
            return
        except Exception as error:  # whatever it is, the server goes on without these images
            self.state = {**self.state, "state": "failed", "error": sentence(error)}
            return
        with self._lock:
            self._facts = facts
            self._samples = samples
            self._parts = None
            self.state = {**self.state, "state": "ready", "problems": problems}

    def _note(self, event: Event) -> None:
        if self._stopping:
            raise Stopped
        self.state = {**self.state, "work": event.work, "done": event.done, "total": event.total}
        self._on_progress(event)

    def parts(self) -> dict[str, Any]:
        """The report now: HTML, the data for its script, and whether it is that of the labelled images already."""
        with self._lock:
            assert self._model is not None
            assert self._facts is not None
            if self._parts is None or self._parts_of is not self._model.saved:
                self._parts_of = self._model.saved  # another operating point may have been saved since
                self._facts = self._facts.with_saved_point(self._parts_of)
                self._parts = finite(parts(self._facts))
            return {**self.state, **self._parts}

    def image(self, number: int) -> tuple[str, Image]:
        """The name and the pixels of one labelled image."""
        samples = self._samples
        if samples is None or not 0 <= number < len(samples):
            raise Refused(404, f"Labelled image {number} does not exist.")
        try:
            return printable(str(samples.ids[number])), samples.read(number)
        except (UnreadableImage, OSError) as error:
            raise Refused(404, f"Labelled image {number} cannot be read any more: {error}") from None

    def stop(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._thread.join(5)
