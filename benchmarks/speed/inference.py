"""Inference: torch eager, torch.compile, onnxruntime and onnxruntime with 8-bit integers; and the server.

`engines`: the built-in model of 800 characters, one image and a batch of 64, in turns. Accuracies on the same 1,600
drawn images say what each engine costs. The 8-bit model is quantised statically, with scales from 256 other images.
`server`: `branchout serve` in a process of its own, with 1, 16 and 64 clients, against `predict` in a loop; and against
LitServe with the same model where that is installed (it is no dependency: `pip install litserve`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from benchmarks import serve
from benchmarks.speed.common import Row, Rows, Settings, compared, in_turns
from branchout import api
from branchout.data.glyphs import glyphs
from branchout.data.images import in_order, open_images
from branchout.evaluate.compare import logits
from branchout.export import PACKAGES

Run = Callable[[Tensor], Tensor]


def rows(settings: Settings) -> Rows:
    yield engines(settings)
    if find_spec("uvicorn") and find_spec("fastapi"):
        yield from server(settings)
    else:
        print("no server: the extra 'serve' is not installed")


class Images:
    """Images of the model's classes, as its network reads them."""

    def __init__(self, model: api.Model, classes: int, part: str) -> None:
        drawn = getattr(glyphs(1, 2, classes=list(model.classes[:classes])), part)
        sizes = model.classifier.preprocessing
        opened = open_images(drawn, sizes, torch.device("cpu"))
        self.images = torch.cat(list(opened.plain(in_order(len(drawn), 256))))
        self.labels = drawn.labels_in(model.classifier.space)


def engines(settings: Settings) -> tuple[str, Row]:
    device = settings.device
    model = api.Model(api.load("glyphs").saved, None, device)
    classifier = model.classifier.on_device(device).eval()
    test = Images(model, settings.pick(800, 20), "val")
    usual: Run = lambda images: logits(classifier, images.to(device)).cpu()  # noqa: E731
    found: dict[str, Run] = {"torch eager": usual}
    if not settings.tiny:  # compiling takes a minute
        found |= compiled(classifier, test.images, device)
    with tempfile.TemporaryDirectory() as folder:
        if all(map(find_spec, PACKAGES)):
            found |= onnx_engines(model, Path(folder), Images(model, settings.pick(256, 20), "train").images, device)
        else:
            print(f"no onnxruntime: {' and '.join(name for name in PACKAGES if not find_spec(name))} not installed")
        results: dict[str, dict[str, float]] = {name: {"accuracy": accuracy(run, test)} for name, run in found.items()}
        for batch in (1, 64):
            works = {name: partial(run, test.images[:batch]) for name, run in found.items()}
            for name, seconds in in_turns(works, settings.pick(30, 2), device).items():
                results[name][f"ms_batch_{batch}"] = 1e3 * seconds
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    fastest = min(results, key=lambda name: results[name]["ms_batch_1"])
    row = compared(
        f"one image of the model of 800 characters, {fastest}",
        "torch eager",
        results[fastest]["ms_batch_1"] / 1e3,
        results["torch eager"]["ms_batch_1"] / 1e3,
        engines=results,
        settings={"threads": torch.get_num_threads(), "images": len(test.labels)},
        packages={name: version(name) for name in ("onnx", "onnxruntime") if find_spec(name)},
    )
    return f"inference-{device.type}", row


def accuracy(run: Run, test: Images) -> float:
    answers = torch.cat([run(part).argmax(1) for part in torch.split(test.images, 64)])
    return float((answers.numpy() == test.labels).mean())


def compiled(classifier: torch.nn.Module, images: Tensor, device: torch.device) -> dict[str, Run]:
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    forward = torch.compile(classifier, mode=mode)

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return forward(images.to(device)).float().cpu()  # type: ignore[no-any-return]

    try:
        for batch in (1, 64):
            run(images[:batch])
    except Exception as error:  # no compiler
        print(f"torch.compile does not run here: {str(error).splitlines()[0]}")
        return {}
    return {"torch.compile": run}


def onnx_engines(model: api.Model, folder: Path, calibration: Tensor, device: torch.device) -> dict[str, Run]:
    import onnxruntime
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain, prepared, small = (folder / f"{name}.onnx" for name in ("float", "prepared", "int8"))
    model.export(plain)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = iter(torch.split(calibration, 1))

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.left, None)
            return None if image is None else {"images": image.numpy()}

    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    quantization.quantize_static(prepared, small, Reader(), per_channel=True)
    found: dict[str, Run] = {}
    gpu = device.type == "cuda" and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    provider = "CUDAExecutionProvider" if gpu else "CPUExecutionProvider"
    for name, file in (("onnxruntime", plain), ("onnxruntime int8", small)):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=[provider])
        label = f"{name} ({provider.removesuffix('ExecutionProvider')}, {file.stat().st_size / 1e6:.1f} MB)"
        found[label] = lambda images, session=session: torch.from_numpy(  # type: ignore[misc]
            session.run(["logits"], {"images": images.numpy()})[0]
        )
    return found


ROUNDS = 3
Level = dict[str, Any]
Send = Callable[[int, float], dict[str, float]]
"""Latency and throughput of so many clients that send images for so many seconds."""


def server(settings: Settings) -> Rows:
    model = api.load("glyphs", device=str(settings.device))
    files = serve.image_files(model, 64)
    with ExitStack() as running:
        ways: dict[str, Send] = {"served": running.enter_context(our_server(files, settings))}
        if find_spec("litserve"):
            ways["litserve"] = running.enter_context(lit_server(files, settings))
        else:
            print("no LitServe: not installed")
        levels = measured_levels(model, files, ways, settings)
    about = {
        "seconds": settings.pick(2, 1),
        "rounds": settings.pick(ROUNDS, 1),
        "model": "glyphs",
        "clients_on_the_same_machine": True,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # other work on the machine slows all of them
    }
    most = levels[-1]  # always the same level: the best ratio would be that of a loop that other work slowed
    yield (
        f"server-{settings.device.type}",
        compared(
            f"one image served over HTTP to {most['clients']} clients (1 / throughput)",
            "the same model called in a loop",
            1 / most["served"]["per_second"],
            1 / most["loop"]["per_second"],
            levels=levels,
            litserve=version("litserve") if "litserve" in ways else "not installed",
            settings=about,
        ),
    )
    if "litserve" in ways:
        yield (
            f"server-litserve-{settings.device.type}",
            compared(
                f"one image served over HTTP to {most['clients']} clients (1 / throughput)",
                "the same model served by LitServe",
                1 / most["served"]["per_second"],
                1 / most["litserve"]["per_second"],
                levels=levels,
                litserve=version("litserve"),
                settings=about,
            ),
        )


def measured_levels(
    model: api.Model, files: Sequence[bytes], ways: Mapping[str, Send], settings: Settings
) -> list[Level]:
    """1, 16 and 64 clients of each server, and a loop, in turns: the medians of several rounds, and all of them.

    Single measurements of a few seconds differ several times over on a machine with other work.
    """
    seconds = settings.pick(2, 1)
    works: dict[str, Send] = {"loop": lambda _, duration: serve.direct(model, files, duration), **ways}
    for send in works.values():
        send(4, 1.0)  # all warm up
    levels = []
    for clients in (1, 16, 64):
        rounds = [
            {name: send(clients, seconds) for name, send in works.items()} for _ in range(settings.pick(ROUNDS, 1))
        ]
        medians = {name: serve.median([each[name] for each in rounds]) for name in works}
        levels.append({"clients": clients, **medians, "rounds": rounds})
        print({"clients": clients, **medians}, flush=True)
    return levels


@contextmanager
def our_server(files: Sequence[bytes], settings: Settings) -> Iterator[Send]:
    process, port = serve.start("glyphs", ["--device", str(settings.device)])
    try:
        yield lambda clients, seconds: asyncio.run(serve.served(port, files, clients, seconds))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@contextmanager
def lit_server(files: Sequence[bytes], settings: Settings) -> Iterator[Send]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.speed.litserve_app", str(port), str(settings.device)]
    process = subprocess.Popen(command, start_new_session=True)
    as_json = [json.dumps({"image": base64.b64encode(file).decode()}).encode() for file in files]
    try:
        wait_for(port, process)
        yield lambda clients, seconds: asyncio.run(serve.served(port, as_json, clients, seconds))
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGTERM)  # it has processes of its own
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 90) -> None:
    """Until LitServe says that its model is loaded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:  # not yet
            time.sleep(0.2)
    raise RuntimeError("LitServe did not start")
