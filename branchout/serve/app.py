"""The HTTP API: what is asked, what is answered, and with which status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from branchout import __version__
from branchout.api import Model
from branchout.data.decode import Kind, UnreadableImage
from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.report.page import served_page, static_file
from branchout.serve import schema
from branchout.serve.model_info import finite, matching
from branchout.serve.api_docs import documentation
from branchout.serve.engine import Question
from branchout.serve.access import HEADERS, Guard, Names
from branchout.serve.limits import Limits, Refused
from branchout.serve.service import Service
from branchout.serve.uploads import uploaded_files
from branchout.serve.progress import progress_of

STATUS = {Kind.EMPTY: 400, Kind.NOT_AN_IMAGE: 415, Kind.UNSUPPORTED: 415, Kind.TOO_LARGE: 413}
"""Of a picture that cannot be used; 422 for all that is not listed: it is an image, but broken."""
SMALL_BODY = 10_000
HEARTBEAT = 15.0
router = APIRouter()


def create_app(
    model: Model | None,
    *,
    names: Names | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    watch: Path | None = None,
    test: Path | Samples | None = None,
    typed: str | None = None,
) -> FastAPI:
    """The app of one model. Without a model it waits for the one that is being made in `watch`.

    With `test`, labelled images, it also shows what was gained and lost on them, as soon as they are read. `typed` is
    how commands on the page name the model. With `token`, every request must carry it.
    """
    service = Service(model, limits or Limits(), watch, test, typed)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        awaiting = asyncio.create_task(service.await_model()) if model is None and watch is not None else None
        yield
        if awaiting is not None:
            awaiting.cancel()
            with suppress(asyncio.CancelledError):
                await awaiting
        await asyncio.to_thread(service.stop)

    # FastAPI's own pages of documentation fetch their scripts from the network; ours is at /docs too.
    app = FastAPI(
        title="Branchout",
        version=__version__,
        description="Ask one image classifier, see what it said before its last step, and turn its dial.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={
            Refused: _refused,
            BranchoutError: _mendable,
            RequestValidationError: _invalid,
            HTTPException: _http,
            Exception: _failed,
        },
    )
    app.state.service = service
    app.include_router(router)
    app.add_middleware(Guard, names=names or Names("127.0.0.1"), token=token)
    return app


class Answer(JSONResponse):
    """JSON as it stands, with null where a number is none."""

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(finite(content), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# Pictures.


@router.post(
    "/predict",
    summary="Name what is in pictures",
    openapi_extra=schema.PICTURES,
    responses={200: {"model": schema.Predictions}, **schema.REFUSALS},
)
async def predict(
    request: Request,
    top: Annotated[int, Query(ge=1, le=1000, description="How many answers for each picture.")] = 5,
    flip: Annotated[bool, Query(description="Average over the mirror image: twice the time.")] = False,
    at: Annotated[
        int | None,
        Query(alias="point", description="A point of the frontier by its number, for this request alone."),
    ] = None,
) -> Response:
    """Pictures as multipart/form-data in the field `files`, or one picture as the body, with its image type.

    Each file is answered by itself: one that cannot be read has an `error` in place of `answers`, and only if none can
    be read is the whole request refused. All answers of a request are given at one operating point.
    """
    service = _service(request)
    engine = service.engine
    engine.check_flip(flip)
    point = engine.points.current if at is None else engine.points.numbered(at)
    service.check_room()
    predictions: list[dict[str, Any]] = []
    asked: list[tuple[int, Question]] = []
    statuses: set[int] = set()
    try:
        with ExitStack() as slot:
            with service.coming():
                async with uploaded_files(request, service.limits, service.uploads) as files:
                    slot.enter_context(service.admitted())
                    decoded = await service.decode(files)
            for file, pixels in zip(files, decoded, strict=True):
                if isinstance(pixels, UnreadableImage):
                    predictions.append({"file": file.filename, "error": str(pixels)})
                    statuses.add(STATUS.get(pixels.kind, 422))
                else:
                    asked.append((len(predictions), Question(pixels, top, flip, point)))
                    predictions.append({"file": file.filename})
            answers = await service.ask([question for _, question in asked])
    except ClientDisconnect:
        return Response(status_code=400)  # nobody is there to read it
    for (place, _), told in zip(asked, answers, strict=True):
        predictions[place] |= told
    if not predictions:
        raise Refused(400, "no picture was sent; put one or more into the field 'files'")
    if not asked:
        status = statuses.pop() if len(statuses) == 1 else 422
        return Answer({"error": _none_of(predictions), "predictions": predictions}, status)
    return Answer({"predictions": predictions, "operating_point": point.about})


def _none_of(predictions: list[dict[str, Any]]) -> str:
    if len(predictions) == 1:
        return str(predictions[0]["error"])
    return f"none of these {len(predictions)} pictures can be read; the first is {predictions[0]['error']}"


# The model and its dial.


@router.get("/model", summary="All about the model", responses={200: {"model": schema.ModelFacts}})
async def model_facts(request: Request) -> Response:
    """Its classes and who knows them, how it came to be, its sizes, its preprocessing and its frontier."""
    service = _service(request)
    return Answer({**service.facts, "operating_point": service.engine.points.current.about})


@router.get("/classes", summary="Look for a class", responses={200: {"model": schema.Classes}})
async def classes(
    request: Request,
    search: Annotated[str, Query(max_length=200, description="A part of the name, in any case.")] = "",
    limit: Annotated[int, Query(ge=1, le=100_000, description="How many to list.")] = 100,
) -> Response:
    """Names that hold `search`, those that begin with it first; `found` counts them all."""
    found = matching(_service(request).facts["classes"], search)
    return Answer({"found": len(found), "classes": found[:limit]})


@router.get("/operating-point", summary="Where the dial is", responses={200: {"model": schema.Point}})
async def operating_point(request: Request) -> Response:
    """The point that is in force now; null for a base model, which has none."""
    return Answer({"operating_point": _service(request).engine.points.current.about})


@router.put(
    "/operating-point",
    summary="Turn the dial",
    openapi_extra=schema.TURN,
    responses={200: {"model": schema.Point}, **schema.REFUSALS},
)
async def turn(request: Request) -> Response:
    """`{"goal": "avg"}`, a condition such as `{"goal": "novel>=0.80"}`, or for models with a dial `{"b": 1.3}`.

    Requests that have arrived keep the point they found. With `"save": true` the choice is also written into the
    model's folder, as `branchout tune` does; that is for points of the frontier. `saved` in the answer is true after
    that, and for the choice that the folder names already.
    """
    service = _service(request)
    points = service.engine.points
    wanted = await _small(request)
    async with service.turning:
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
    return Answer({"operating_point": point.about})


async def _small(request: Request) -> schema.Turn:
    """The body of a request that has no reason to be long."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > SMALL_BODY:
                raise Refused(413, f"the request's body is larger than {SMALL_BODY:,} bytes")
        return schema.Turn.model_validate_json(bytes(body))
    except ValidationError as error:
        raise Refused(422, f'expected {{"goal": "avg"}} or {{"b": 1.3}}: {_sentence(error.errors())}') from None
    except ClientDisconnect:
        raise Refused(400, "the request was cut short") from None


# The report.


@router.get("/report-data", summary="The report, live", responses={200: {"model": schema.ReportData}})
async def report_data(
    request: Request,
    brief: Annotated[bool, Query(description="Only how far the reading of labelled images is.")] = False,
) -> Response:
    """What the page shows: the report's parts, and what follows the dial. Labelled images join it once they are read
    (`branchout serve MODEL TEST/`).
    """
    service = _service(request)
    if brief and not service.ready and service.failure is None:
        return Answer({**service.telling.state, "state": "waiting"})
    about = service.engine.points.current.about
    if brief:
        return Answer(service.telling.state)
    service.engine.points.refresh()
    told = await asyncio.to_thread(service.telling.report)
    numbers = told["data"].get("numbers", [])
    now = about["point"] if about else None
    return Answer({**told, "current": numbers.index(now) if now in numbers else None})


@router.get("/test-image/{number}", summary="One labelled image", response_class=Response)
async def test_image(request: Request, number: int) -> Response:
    """A small copy, by its number in /report-data."""
    kind, data = await asyncio.to_thread(_service(request).telling.picture, number)
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=3600"})


# Watching.


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Whether it answers", responses={200: {"model": schema.Health}})
async def health(request: Request) -> Response:
    """200 while pictures can be asked about; 503 while the model is still awaited, or if it cannot be opened."""
    service = _service(request)
    status = "ok" if service.ready else "failed" if service.failure else "waiting"
    told = {"status": status, "version": __version__, "queued": service.queued}
    return Answer(told, 200 if service.ready else 503)


@router.get("/progress", summary="How far an extension is", responses={200: {"model": schema.Progress}})
async def progress(request: Request) -> Response:
    """Of the run into the folder that the server watches (`branchout serve --watch OUT`); state `none` without one."""
    return Answer(await asyncio.to_thread(progress_of, _service(request).watch))


@router.get("/progress/events", summary="The same, as server-sent events", response_class=StreamingResponse)
async def progress_events(request: Request) -> Response:
    """One event with the JSON of /progress at each change, until the run is finished."""
    service = _service(request)
    out = service.watch
    if out is None:
        raise Refused(404, "no extension is watched; start the server with --watch OUT to watch one")

    async def events() -> AsyncIterator[str]:
        last: dict[str, Any] | None = None
        quiet = 0.0
        while not service.leaving():
            told = await asyncio.to_thread(progress_of, out)
            if told != last:
                yield f"data: {json.dumps(finite(told), ensure_ascii=False)}\n\n"
                last, quiet = told, 0.0
            elif quiet >= HEARTBEAT:
                yield ": still here\n\n"
                quiet = 0.0
            if told["state"] == "finished":
                return
            await asyncio.sleep(0.5)
            quiet += 0.5

    return StreamingResponse(events(), media_type="text/event-stream")


# Pages.


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return Response(documentation(request.app.openapi()), media_type="text/html; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return Response(served_page(), media_type="text/html; charset=utf-8")


@router.get("/style.css", include_in_schema=False)
async def style() -> Response:
    return Response(static_file("style.css"), media_type="text/css; charset=utf-8")


@router.get("/script.js", include_in_schema=False)
async def script() -> Response:
    return Response(static_file("script.js"), media_type="text/javascript; charset=utf-8")


# Refusals, always {"error": a sentence}.


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return Answer({"error": error.sentence}, error.status, error.headers)


async def _mendable(_: Request, error: Exception) -> Response:
    return Answer({"error": str(error)}, 422)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return Answer({"error": _sentence(error.errors())}, 422)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {
        404: f"there is nothing at {request.url.path[:80]}; /docs lists what there is",
        405: f"{request.url.path[:80]} does not take {request.method}; /docs says what it takes",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return Answer({"error": sentence}, error.status_code, dict(error.headers or {}))


async def _failed(_: Request, error: Exception) -> Response:
    return Answer({"error": f"the server failed at this request ({type(error).__name__})"}, 500, HEADERS)


def _sentence(errors: Any) -> str:
    """What a validator found, as one line."""
    found = [(".".join(str(part) for part in e["loc"] if part not in ("query", "body")), e["msg"]) for e in errors[:3]]
    return "; ".join(f"{where}: {what}" if where else str(what) for where, what in found)
