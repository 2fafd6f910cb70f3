"""What the page tells beside answers: the report about the model, and what labelled images show, once they are read."""

from __future__ import annotations

import base64
import shlex
import threading
from pathlib import Path
from typing import Any

from branchout.api import Model, samples_in
from branchout.data.decode import UnreadableImage
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.model.checkpoint import SavedModel
from branchout.report.data import standing
from branchout.report.gallery import thumbnail
from branchout.report.page import parts
from branchout.serve.model_info import finite
from branchout.serve.limits import Refused
from branchout.training.loop import Event

Told = dict[str, Any]


class _Leaving(Exception):  # noqa: N818 – not a fault
    """The server ends, and nobody will read the rest."""


class Telling:
    """The report of one model, first without labelled images, then with them; `test` is where they lie, if anywhere."""

    def __init__(self, test: Path | Samples | None = None, typed: str | None = None) -> None:
        self.test = test
        self._typed = typed
        self._model: Model | None = None
        self._facts: Told = {}
        self._samples: Samples | None = None
        self._about: Told = {"state": "none", "work": "", "done": 0, "total": 0, "error": None, "problems": []}
        self._parts: Told | None = None
        self._shown: SavedModel | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leaving = False

    def begin(self, model: Model) -> None:
        """Tell what the model itself holds at once; read the labelled images beside everything else."""
        self._model = model
        self._facts = self._gathered(None)
        if self.test is not None:
            self._about["state"] = "working"
            self._thread = threading.Thread(target=self._read, name="report", daemon=True)
            self._thread.start()

    def _gathered(self, samples: Samples | None) -> Told:
        assert self._model is not None
        facts = self._model.facts(samples, typed=self._typed, report=self._note)
        # Whoever has no labelled images in sight is told how to have them here, not in another file.
        return {**facts, "command": f"branchout serve {shlex.quote(facts['path'])} TEST/"}

    def _read(self) -> None:
        assert self._model is not None
        assert self.test is not None
        try:
            problems: list[str] = []
            samples = samples_in(self.test, problems)
            facts = self._gathered(samples)
        except _Leaving:
            return
        except Exception as error:  # whatever it is, the server goes on without these images
            sentence = str(error) if isinstance(error, BranchoutError) else f"{type(error).__name__}: {error}"
            self._about |= {"state": "failed", "error": sentence}
            return
        with self._lock:
            self._facts = facts
            self._samples = samples
            self._parts = None
            self._about |= {"state": "ready", "problems": problems}

    def _note(self, event: Event) -> None:
        if self._leaving:
            raise _Leaving
        self._about |= {"work": event.work, "done": event.done, "total": event.total}

    @property
    def state(self) -> Told:
        """How far the reading of labelled images is."""
        return dict(self._about)

    def report(self) -> Told:
        """How far the reading is, and the report as it is now: markup, and the data that its script follows."""
        with self._lock:
            assert self._model is not None
            if self._parts is None or self._shown is not self._model.saved:
                self._shown = self._model.saved  # another operating point may have been saved since
                self._facts = {**self._facts, **standing(self._shown)}
                self._parts = finite(parts(self._facts))
            return {**self.state, **self._parts}

    def picture(self, number: int) -> tuple[str, bytes]:
        """The type and the bytes of a small copy of one labelled image."""
        samples = self._samples
        if samples is None or not 0 <= number < len(samples):
            raise Refused(404, f"there is no labelled image {number}")
        try:
            head, _, body = thumbnail(samples.read(number)).partition(",")
        except (UnreadableImage, OSError) as error:
            raise Refused(404, f"labelled image {number} cannot be read any more: {error}") from None
        return head.removeprefix("data:").removesuffix(";base64"), base64.b64decode(body)

    def stop(self) -> None:
        self._leaving = True
        if self._thread is not None:
            self._thread.join(5)
