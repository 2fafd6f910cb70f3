"""The inbox on the page: photos are analysed as they arrive, decided about, and taught in a process of their own."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from branchout import api
from branchout.data.decode import UnreadableImage, decode
from branchout.inbox import runs
from branchout.inbox.analysis import MAX_PIXELS, Analyzer
from branchout.inbox.folder import Decision, Inbox, Photo, class_name, similar
from branchout.inbox.groups import Analysis
from branchout.inbox.teach import kept_images, memory_notes
from branchout.report.gallery import small_copy
from branchout.report.page import rendered
from branchout.serve import schema
from branchout.serve.inbox_schema import (
    Choice,
    DecidedClass,
    FalseAlarms,
    InboxInfo,
    LastDecision,
    NewRun,
    RunAction,
    RunInfo,
)
from branchout.serve.limits import Refused
from branchout.serve.live_report import Stopped, sentence
from branchout.serve.progress import progress_of
from branchout.serve.responses import has_inbox
from branchout.serve.service import Service
from branchout.training.loop import Event

LOOK_EVERY = 1.0
"""Seconds between two looks into the folder."""
HOW = "This server has no inbox. Start it with one: branchout serve MODEL --inbox PHOTOS/ --memory OLD/"

router = APIRouter(prefix="/inbox", responses=schema.REFUSALS)
page_router = APIRouter(include_in_schema=False)


def _changed(folder: Path | None) -> int:
    """When a class was last added to a folder of class folders."""
    return 0 if folder is None else folder.stat().st_mtime_ns


@dataclass(frozen=True)
class InboxSettings:
    """What `branchout serve --inbox` was given."""

    folder: Path
    memory: Path | None = None
    """Exemplars of old classes, for runs and for the threshold."""
    known: Path | None = None
    """Other labelled images of known classes for the threshold, which the model was not trained with."""
    threshold: float | None = None
    epochs: int | None = None
    classes_from: str | None = None


class ServedInbox:
    """The inbox of one server, and the thread that looks at its photos."""

    def __init__(self, settings: InboxSettings, service: Service) -> None:
        self.settings = settings
        self.service = service
        self.inbox = Inbox(settings.folder)
        self.thumbnails = ThreadPoolExecutor(2, "thumbnails")
        self._analysis: Analysis | None = None
        self._work = "Opening the model"
        self._error: str | None = None
        self._notes: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()
        self._replacing = threading.Lock()  # apart from the other: the state can be read during slower changes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5)
        self.thumbnails.shutdown(cancel_futures=True)

    @property
    def _known(self) -> frozenset[str]:
        """The classes of the served model."""
        return frozenset(() if (model := self.service.model) is None else model.classes)

    # Grouping photos.

    def _watch(self) -> None:
        model, analyzer, before, kept = None, None, None, None
        asked = self.settings
        while not self._stopping.is_set():
            try:
                served = self.service.model
                if served is not None and served is not model:  # the first one, or one that went live
                    known = asked.known or asked.memory
                    analyzer = Analyzer.of(
                        served, known, asked.threshold, classes_from=asked.classes_from, on_progress=self._note
                    )
                    model, before = served, None
                if analyzer is not None:
                    done = runs.taught(self.inbox, self._known)
                    photos = [photo for photo in self.inbox.photos() if photo.id not in done]
                    now = photos, self.inbox.copies, self.inbox.broken, self.inbox.false_alarms
                    if now != before:
                        self._analysis = analyzer.analyze(self.inbox, photos, on_progress=self._note)
                        before = now
                    if (now_kept := (served, _changed(asked.memory), len(done))) != kept:
                        self._notes = self._memory_notes(analyzer.model)
                        kept = now_kept
                    self._work, self._error = "", None
            except Stopped:
                return
            except Exception as error:  # whatever it is, the server goes on; it is tried again
                self._error = sentence(error)
            self._stopping.wait(LOOK_EVERY)

    def _memory_notes(self, model: api.Model) -> list[str]:
        memory = None if self.settings.memory is None else str(self.settings.memory)
        kept = kept_images(model, memory, self.settings.classes_from, self.inbox.state / "runs")
        return memory_notes(model, kept, memory)

    def _note(self, event: Event) -> None:
        if self._stopping.is_set():
            raise Stopped
        self._work = f"{event.work}: {event.done:,} of {event.total:,}"

    # What the page shows.

    def info(self) -> InboxInfo:
        """The state of the inbox. A run whose model goes live is closed once that model is served, not before."""
        with self._replacing:
            return self._info()

    def _info(self) -> InboxInfo:
        found = self._analysis or Analysis(threshold=0, known_images=0, photos=[], groups=[])
        decisions, done = self.inbox.decisions(), runs.taught(self.inbox, self._known)
        open_ = {each.photo: each for each in found.photos if each.photo not in done and each.photo not in decisions}
        unknown = [[open_[photo] for photo in group if photo in open_] for group in found.groups]
        enough, waiting = runs.ready(self.inbox, self._known)
        here = {photo.id for photo in self.inbox.photos()}
        return InboxInfo(
            state="failed" if self._error else "starting" if self._analysis is None else "ready",
            work=self._work,
            error=self._error,
            folder=self.inbox.folder.name or str(self.inbox.folder),
            model=Path(self._model_name()).name,
            threshold=found.threshold,
            known_images=found.known_images,
            false_alarms=found.false_alarms,
            groups=[group for group in unknown if group],
            fitting=[each for each in found.fitting if each.photo in open_],
            decided=[self._decided(name, photos) for name, photos in sorted({**enough, **waiting}.items())],
            dismissed=[each for photo, each in decisions.items() if each.name is None and photo in here - done],
            last=self._last(),
            notes=self._notes,
            taught=len(done),
            unreadable=found.unreadable,
            next=runs.next_name(self._model_name()).name,
            run=self._run_info(),
        )

    def _decided(self, name: str, photos: list[Decision]) -> DecidedClass:
        missing = max(0, runs.FEWEST - len(photos))
        return DecidedClass(**{"class": name}, known=name in self._known, missing=missing, photos=photos)

    def _last(self) -> LastDecision | None:
        last = runs.last_decision(self.inbox, self._known)
        if not last:
            return None
        return LastDecision(photos=[each.photo for each in last], when=last[0].when, **{"class": last[0].name})

    def _model_name(self) -> str:
        """As `branchout.load` takes it. What was typed comes first: a built-in model lies in the package."""
        model = self.service.model
        return self.service.report.model_path or str(model.folder if model is not None else "")

    def _run_info(self) -> RunInfo | None:
        run = runs.open_run(self.inbox)
        if run is None:
            return None
        state = self._state(run)
        works = progress_of(run.out).works if state in ("running", "stopped") else []
        result = run.result
        return RunInfo(
            number=run.number,
            state=state,
            out=run.out.name,
            classes=run.settings.classes,
            works=works,
            result=result,
            verdict=None if result is None else result.verdict(),
            error=run.error,
        )

    def _state(self, run: runs.Run) -> runs.State:
        state = run.state()
        return "running" if state in ("stopped", "failed") and self._starting() is not None else state

    def _starting(self) -> subprocess.Popen[bytes] | None:
        """The process that was started here and has not ended. It needs some seconds before it has the run's lock."""
        return self._process if self._process is not None and self._process.poll() is None else None

    def photo(self, photo: str) -> Photo:
        found = self.inbox.find(photo)
        if found is None:
            raise Refused(404, f"There is no photo {photo[:16]} in the inbox.")
        return found

    def any_photo(self) -> str:
        """The id of a photo, for examples."""
        return next((photo.id for photo in self.inbox.photos()), "ID")

    def thumbnail(self, photo: str) -> tuple[str, bytes]:
        """The type and the bytes of a small copy."""
        try:
            image = decode(self.inbox.path(self.photo(photo)), max_pixels=MAX_PIXELS, shrink=256)
        except (UnreadableImage, OSError) as error:
            raise Refused(404, f"The photo cannot be read: {error}") from None
        return small_copy(image)

    # What a person decides.

    def decide(self, choice: Choice) -> InboxInfo:
        name = None
        if choice.action == "name":
            name = self._name(choice)
        here = {photo.id: photo for photo in self.inbox.photos()}
        missing = [photo for photo in choice.photos if photo not in here]
        if missing:
            raise Refused(404, f"{len(missing)} of these photos are no longer in the inbox.")
        photos = [here[photo] for photo in choice.photos]
        with self._changing:
            runs.check_free(self.inbox, photos, self._known)
            if choice.action == "undo":
                found = self.inbox.decisions()
                if choice.when and any(found[id_].when != choice.when for id_ in choice.photos if id_ in found):
                    raise Refused(409, "These photos were decided about again meanwhile. Nothing was undone.")
                self.inbox.undo(photos)
            else:
                self.inbox.decide(photos, name)
        return self.info()

    def _name(self, choice: Choice) -> str:
        """The class of a choice. One that differs from a known class in case or spaces alone is asked about."""
        name = class_name(choice.name or "")
        names = self._known | {each.name for each in self.inbox.decisions().values() if each.name is not None}
        if not choice.new_class and name not in names and (meant := similar(name, names)):
            refused = Refused(409, f"Did you mean {meant}? {name} differs from it only in case or spaces.")
            refused.similar = meant
            raise refused
        return name

    def teach(self, wanted: NewRun) -> InboxInfo:
        with self._changing:
            model = self._model_name()
            beside = runs.next_name(model)
            out = beside if wanted.out is None else beside.with_name(class_name(wanted.out))  # a name, never a path
            if (run := runs.open_run(self.inbox)) is not None:
                raise Refused(409, str(runs.UndecidedRunError(run)))
            asked = self.settings
            run = runs.plan(self.inbox, model, out, asked.memory, asked.epochs, asked.classes_from, asked.known)
            self._process = runs.start(self.inbox, run, device=self.service.device)
        return self.info()

    def act(self, action: str) -> InboxInfo:
        """Do something with the open run. A model that is accepted is served at once."""
        with self._changing:
            run = runs.open_run(self.inbox)
            if run is None:
                raise Refused(409, "There is no run to decide about.")
            state = self._state(run)
            if action == "resume":
                if state not in ("stopped", "failed"):
                    raise Refused(409, f"The run is {state}.")
                self._process = runs.start(self.inbox, run, device=self.service.device)
            elif action == "stop":
                if process := self._starting():
                    process.terminate()
                else:
                    runs.stop(run)
            elif action == "discard":
                if state == "running":
                    raise Refused(409, "The run is running. Stop it first.")
                runs.discard(run)
            else:
                model = api.load(run.out, device=self.service.device)  # before it is recorded: it may be damaged
                with self._replacing:
                    runs.accept(run)
                    self.service.replace(model)
        return self.info()


# Routes.


def _inbox(request: Request) -> ServedInbox:
    served: ServedInbox | None = getattr(request.app.state, "inbox", None)
    if served is None:
        raise Refused(404, HOW)
    return served


Served = Annotated[ServedInbox, Depends(_inbox)]


@router.get("/state", summary="Get the inbox", response_model=InboxInfo)
async def state(inbox: Served) -> object:
    """Groups of photos that fit no class, what was decided, and the run that teaches them."""
    return await asyncio.to_thread(inbox.info)


@router.get("/photo/{photo}", summary="Get a photo of the inbox", response_class=Response)
async def photo(inbox: Served, photo: str) -> Response:
    """A small copy, by its id in /inbox/state."""
    run = asyncio.get_running_loop().run_in_executor
    kind, data = await run(inbox.thumbnails, inbox.thumbnail, photo)
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=3600"})


@router.post("/decisions", summary="Decide about photos", response_model=InboxInfo)
async def decide(inbox: Served, choice: Choice) -> object:
    """`{"photos": [ids], "action": "name", "class": "robin"}`; or dismiss them, or undo what was decided."""
    return await asyncio.to_thread(inbox.decide, choice)


@router.put("/false-alarms", summary="Set the share of false alarms", response_model=InboxInfo)
async def false_alarms(inbox: Served, wanted: FalseAlarms) -> object:
    """With a larger share more photos are listed as unknown, known ones among them. It is kept in the folder."""
    await asyncio.to_thread(inbox.inbox.set_false_alarms, wanted.share)
    return await asyncio.to_thread(inbox.info)


@router.post("/runs", summary="Teach the named photos", response_model=InboxInfo)
async def teach(inbox: Served, wanted: NewRun) -> object:
    """Starts `extend` in a process of its own, which goes on when the page or the server is closed."""
    return await asyncio.to_thread(inbox.teach, wanted)


@router.post("/run", summary="Stop, resume, accept or discard a run", response_model=InboxInfo)
async def act(inbox: Served, wanted: RunAction) -> object:
    """With `accept` the new model is served from now on; with `discard` it is deleted and the decisions stay."""
    return await asyncio.to_thread(inbox.act, wanted.action)


@page_router.get("/inbox")
async def page(request: Request) -> Response:
    here = has_inbox(request)
    if not here and "text/html" not in request.headers.get("accept", ""):
        raise Refused(404, HOW)
    html = rendered("inbox.html" if here else "no_inbox.html", has_inbox=here)
    return Response(html, 200 if here else 404, media_type="text/html; charset=utf-8")
