"""The HTTP API: its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from branchout import __version__
from branchout.api import Model
from branchout.data.decode import Kind, UnreadableImage
from branchout.data.samples import Samples
from branchout.report.gallery import small_copy
from branchout.report.page import rendered, report_script, static_file
from branchout.serve import schema
from branchout.serve.access import Access, HostNames
from branchout.serve.api_docs import documentation
from branchout.serve.engine import Question
from branchout.serve.inbox import InboxSettings, ServedInbox
from branchout.serve.inbox import page_router as inbox_page_router
from branchout.serve.inbox import router as inbox_router
from branchout.serve.limits import BodyLimits, Limits, Refused
from branchout.serve.live_report import LiveReport
from branchout.serve.model_info import matching
from branchout.serve.progress import progress_of
from branchout.serve.responses import HANDLERS, FiniteJSON, event, has_inbox
from branchout.serve.service import Service
from branchout.serve.uploads import uploaded_files
from branchout.training.loop import OnProgress, silent

STATUS = {Kind.EMPTY: 400, Kind.NOT_AN_IMAGE: 415, Kind.UNSUPPORTED: 415, Kind.TOO_LARGE: 413}
"""For an image that cannot be used; 422 for every other reason."""
HEARTBEAT = 15.0
"""Seconds after which a stream without news sends a comment, so that no proxy closes it."""

router = APIRouter(responses=schema.REFUSALS)
page_router = APIRouter(include_in_schema=False)


def create_app(
    model: Model | None,
    *,
    names: HostNames | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    watch: Path | None = None,
    test: Path | Samples | None = None,
    model_path: str | None = None,
    device: str | None = None,
    on_progress: OnProgress = silent,
    inbox: InboxSettings | None = None,
    classes_from: str | None = None,
) -> FastAPI:
    """The app that serves one model. Without a model it waits for the one that is being made in `watch`.

    With `test`, labelled images, it also shows accuracies before and after the last step. `model_path` is how commands
    on the page name the model. With `token`, every request must carry it. `device` is for a model that is loaded later.
    `on_progress` gets the progress of reading the labelled images; `classes_from` says how their nested folders are
    read. `inbox` is a folder of new photos.
    """
    limits = limits or Limits()
    service = Service(model, limits, LiveReport(test, model_path, on_progress, classes_from), watch, device)
    served_inbox = None if inbox is None else ServedInbox(inbox, service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        if served_inbox is not None:
            served_inbox.start()
        awaiting = asyncio.create_task(service.await_model()) if model is None and watch is not None else None
        yield
        if awaiting is not None:
            awaiting.cancel()
            with suppress(asyncio.CancelledError):
                await awaiting
        if served_inbox is not None:
            await asyncio.to_thread(served_inbox.stop)
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="Branchout",
        version=__version__,
        description="Classify images, compare with the model before its last step, and set the operating point.",
        docs_url=None,  # FastAPI's own pages load their scripts from another host; ours is at /docs too
        redoc_url=None,
        lifespan=lifespan,
        default_response_class=FiniteJSON,
        exception_handlers=HANDLERS,
    )
    app.state.service = service
    app.state.inbox = served_inbox
    for each in (router, inbox_router, page_router, inbox_page_router):
        app.include_router(each)
    app.add_middleware(BodyLimits, limits=limits)
    app.add_middleware(Access, names=names or HostNames("127.0.0.1"), token=token)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


# Images.


@router.post(
    "/predict",
    summary="Classify images",
    openapi_extra=schema.IMAGES,
    response_model=schema.Predictions,
    response_model_exclude_unset=True,
)
async def predict(
    request: Request,
    service: Served,
    top: Annotated[int, Query(ge=1, le=1000, description="How many classes to return for each image.")] = 5,
    flip: Annotated[bool, Query(description="Average with the mirrored image: takes twice as long.")] = False,
    at: Annotated[
        int | None, Query(alias="point", description="A point of the frontier by its number, for this request only.")
    ] = None,
    expect: Annotated[
        str | None, Query(max_length=500, description="A class: each prediction then says in `why` why it did not win.")
    ] = None,
) -> object:
    """Send images as multipart/form-data in the field `files`, or one image as the body with its image type.

    Each file has its own result: one that cannot be read has `error` in place of `answers`. Only if none can be read,
    the request is refused. All answers of a request come from one operating point.
    """
    engine = service.engine
    engine.check(flip=flip, expect=expect)
    point = engine.points.current if at is None else engine.points.numbered(at)
    service.check_room()
    try:
        with ExitStack() as slot:
            with service.coming():
                async with uploaded_files(request, service.limits) as files:
                    slot.enter_context(service.admitted())
                    decoded = await service.decode(files)
            questions = [Question(p, top, flip, point, expect) for p in decoded if not isinstance(p, UnreadableImage)]
            answers = iter(await service.ask(questions))
    except ClientDisconnect:
        return Response(status_code=400)  # nobody is there to read it
    predictions: list[dict[str, Any]] = [
        {"file": file.filename, "error": str(pixels)}
        if isinstance(pixels, UnreadableImage)
        else {"file": file.filename, **next(answers)}
        for file, pixels in zip(files, decoded, strict=True)
    ]
    if not predictions:
        raise Refused(400, "The request has no image. Put one or more into the field 'files'.")
    if not questions:
        statuses = {STATUS.get(error.kind, 422) for error in decoded if isinstance(error, UnreadableImage)}
        status = statuses.pop() if len(statuses) == 1 else 422
        return FiniteJSON({"error": _none_of(predictions), "predictions": predictions}, status)
    return {"predictions": predictions, "operating_point": point.about}


def _none_of(predictions: list[dict[str, Any]]) -> str:
    if len(predictions) == 1:
        return str(predictions[0]["error"])
    return f"None of the {len(predictions)} images can be read. The first one: {predictions[0]['error']}"


# The model and its operating point.


@router.get("/model", summary="Describe the model", response_model=schema.ModelInfo, response_model_exclude_unset=True)
async def model_info(service: Served) -> object:
    """Its classes and branches, how it was made, its sizes, preprocessing, frontier and operating point."""
    return {**service.info.model_dump(by_alias=True), "operating_point": service.engine.points.current.about}


@router.get("/classes", summary="Search classes", response_model=schema.Classes)
async def classes(
    service: Served,
    search: Annotated[str, Query(max_length=200, description="A part of the name; case is ignored.")] = "",
    limit: Annotated[int, Query(ge=1, le=100_000, description="How many to list.")] = 100,
) -> object:
    """Classes whose name contains `search`, those that begin with it first. `found` counts all of them."""
    found = matching(service.info.classes, search)
    return {"found": len(found), "classes": found[:limit]}


@router.get(
    "/operating-point",
    summary="Get the operating point",
    response_model=schema.CurrentPoint,
    response_model_exclude_unset=True,
)
async def operating_point(service: Served) -> object:
    """The current operating point; null for a base model, which has none."""
    return {"operating_point": service.engine.points.current.about}


@router.put(
    "/operating-point",
    summary="Set the operating point",
    response_model=schema.CurrentPoint,
    response_model_exclude_unset=True,
)
async def set_operating_point(service: Served, wanted: schema.PointChoice) -> object:
    """`{"goal": "avg"}`, a condition such as `{"goal": "novel>=0.80"}`, or for models with a dial `{"b": 1.3}`.

    Requests that have already arrived keep their operating point. With `"save": true` the choice is also written to
    the model's folder, as `branchout tune` does; this works for points of the frontier.
    """
    points = service.engine.points
    async with service.point_lock:
        if wanted.goal is not None:
            point = await asyncio.to_thread(points.for_goal, wanted.goal)
        elif wanted.point is not None:
            point = await asyncio.to_thread(points.numbered, wanted.point)
        else:
            assert wanted.b is not None
            point = await asyncio.to_thread(points.at, wanted.b)
        if wanted.save:
            point = await asyncio.to_thread(points.save, point)
        points.current = point
    return {"operating_point": point.about}


# The report.


@router.get(
    "/report-data",
    summary="Get the report",
    response_model=schema.ReportData,
    response_model_exclude_unset=True,
)
async def report_data(
    service: Served,
    brief: Annotated[bool, Query(description="Only the progress of reading the labelled images.")] = False,
) -> object:
    """What the page shows. Results on labelled images are added once these are read (`branchout serve MODEL TEST/`)."""
    if brief and not service.ready and service.failure is None:
        return {**service.report.state, "state": "waiting"}
    points = service.engine.points
    serving, report = service.serving(), service.report  # both now: another model may be served soon
    if brief:
        return {**report.state, **serving}
    parts = await asyncio.to_thread(report.parts)
    numbers = parts["data"].get("numbers", [])
    about = points.current.about
    current = about["point"] if about else None
    return {**parts, **serving, "current": numbers.index(current) if current in numbers else None}


@router.get("/test-image/{number}", summary="Get a labelled image", response_class=Response)
async def labelled_image(service: Served, number: int) -> Response:
    """A small copy, by its number in /report-data."""
    kind, data = await asyncio.to_thread(lambda: small_copy(service.report.image(number)[1]))
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=3600"})


@router.get(
    "/test-image/{number}/prediction",
    summary="Classify a labelled image",
    response_model=schema.Prediction,
    response_model_exclude_unset=True,
)
async def labelled_image_prediction(
    service: Served,
    number: int,
    top: Annotated[int, Query(ge=1, le=1000)] = 5,
    at: Annotated[int | None, Query(alias="point", description="A point of the frontier by its number.")] = None,
    expect: Annotated[str | None, Query(max_length=500, description="A class, as for /predict.")] = None,
) -> object:
    """The prediction for a labelled image, as /predict gives it for uploaded ones."""
    engine = service.engine
    engine.check(flip=False, expect=expect)
    point = engine.points.current if at is None else engine.points.numbered(at)
    service.check_room()
    file, image = await asyncio.to_thread(service.report.image, number)
    pixels = await asyncio.to_thread(engine.model.classifier.preprocessing.prepare, image)
    (found,) = await service.ask([Question(pixels, top, False, point, expect)])
    return {"file": file, **found}


# State.


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Check whether the server is ready", response_model=schema.Health)
async def health(service: Served) -> JSONResponse:
    """Status 200 when images can be classified; 503 while the model is being made, or if it cannot be opened."""
    status = "ok" if service.ready else "failed" if service.failure else "waiting"
    content = {"status": status, "version": __version__, "queued": service.queued}
    return FiniteJSON(content, 200 if service.ready else 503)


@router.get("/progress", summary="Get the progress of an extension", response_model=schema.Progress)
async def progress(service: Served) -> object:
    """Of the run that the server watches (`branchout serve --watch OUT`); state `none` without one."""
    return await asyncio.to_thread(progress_of, service.watch)


@router.get("/progress/events", summary="Follow the progress of an extension", response_class=StreamingResponse)
async def progress_events(service: Served) -> Response:
    """Server-sent events: the JSON of /progress at each change, until the run is finished."""
    out = service.watch
    if out is None:
        raise Refused(404, "No extension is watched. Start the server with --watch OUT.")

    async def events() -> AsyncIterator[str]:
        last: schema.Progress | None = None
        quiet = 0.0
        while not service.stopping():
            now = await asyncio.to_thread(progress_of, out)
            if now != last:
                yield event(now.model_dump())
                last, quiet = now, 0.0
            elif quiet >= HEARTBEAT:
                yield ": no change\n\n"
                quiet = 0.0
            if now.state == "finished":
                return
            await asyncio.sleep(0.5)
            quiet += 0.5

    return StreamingResponse(events(), media_type="text/event-stream")


# Pages.


HTML = "text/html; charset=utf-8"


@page_router.get("/docs")
async def docs(request: Request) -> Response:
    base = str(request.base_url).rstrip("/")
    photo = await asyncio.to_thread(request.app.state.inbox.any_photo) if has_inbox(request) else "ID"
    html = documentation(request.app.openapi(), base, has_inbox=has_inbox(request), photo=photo)
    return Response(html, media_type=HTML)


@page_router.get("/")
async def page(request: Request, service: Served) -> Response:
    """The page with what is known already, so that the first thing a browser draws is not empty."""
    parts = await asyncio.to_thread(service.report.parts) if service.ready else None
    html = rendered("served.html", report=parts, waiting_for=service.watch, has_inbox=has_inbox(request))
    return Response(html, media_type=HTML)


@page_router.get("/style.css")
@page_router.get("/script.js")
@page_router.get("/serve.js")
@page_router.get("/inbox.js")
async def static(request: Request) -> Response:
    name = request.url.path[1:]
    kind = "css" if name.endswith("css") else "javascript"
    return Response(
        report_script() if name == "script.js" else static_file(name), media_type=f"text/{kind}; charset=utf-8"
    )
