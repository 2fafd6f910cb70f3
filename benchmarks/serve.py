"""The speed of a served model, compared with the same model called in a loop, and beside large images.

    python benchmarks/serve.py --out results

The server is the real command in its own process. Each client sends one image after another over one connection. The
loop decodes the same files and predicts one image at a time. Server and loop are measured in turn, so that other load
on the machine affects both. The clients run on the same machine as the server.

The last measurement sends ordinary images while ten large PNGs are being decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from branchout import api
from branchout.bench import rows as results
from branchout.data.decode import decode
from branchout.data.glyphs import glyphs


def image_files(model: api.Model, count: int) -> list[bytes]:
    """PNG files of classes that the model knows."""
    drawn = glyphs(1, 1, classes=list(model.classes[:count]))
    files = []
    for row in range(len(drawn.val)):
        file = io.BytesIO()
        Image.fromarray(drawn.val.read(row)[:, :, 0]).save(file, "PNG")
        files.append(file.getvalue())
    return files


def figures(seconds: Sequence[float], wall: float) -> dict[str, float]:
    """Latency and throughput of one measurement."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"answers": len(seconds), "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "per_second": len(seconds) / wall}


def direct(model: api.Model, files: Sequence[bytes], duration: float) -> dict[str, float]:
    taken = []
    start = time.perf_counter()
    for data in itertools.cycle(files):
        before = time.perf_counter()
        if before - start > duration:
            break
        model.predict(decode(data))
        taken.append(time.perf_counter() - before)
    return figures(taken, time.perf_counter() - start)


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> int:
    """The status of the answer to one image, or to one in JSON."""
    kind = "application/json" if data.startswith(b"{") else "image/png"
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: "
    writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", answer)
    assert length, answer
    await reader.readexactly(int(length[1]))
    return int(answer[9:12])


async def client(port: int, files: Sequence[bytes], until: float, taken: list[float], refused: list[int]) -> None:
    """One connection that sends images until the time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for data in itertools.cycle(files):
            before = time.perf_counter()
            if before > until:
                return
            status = await post(reader, writer, data)
            if status == 200:
                taken.append(time.perf_counter() - before)
            else:
                refused.append(status)
                await asyncio.sleep(0.1)
    finally:
        writer.close()


async def served(port: int, files: Sequence[bytes], clients: int, duration: float) -> dict[str, float]:
    taken: list[float] = []
    refused: list[int] = []
    start = time.perf_counter()
    shifted = [[*files[n % len(files) :], *files[: n % len(files)]] for n in range(clients)]
    await asyncio.gather(*(client(port, each, start + duration, taken, refused) for each in shifted))
    return {**figures(taken, time.perf_counter() - start), "refused": len(refused)}


async def beside_large(port: int, files: Sequence[bytes], pixels: int, count: int = 10) -> dict[str, float]:
    """The latency of ordinary images while `count` PNGs of so many pixels are being decoded."""
    side = int(pixels**0.5)
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "grey").save(buffer, "PNG")

    async def large() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await post(reader, writer, buffer.getvalue())
        finally:
            writer.close()

    start = time.perf_counter()
    waiting = asyncio.gather(*(large() for _ in range(count)))
    taken: list[float] = []
    while not waiting.done() or not taken:
        await client(port, files, time.perf_counter() + 0.2, taken, [])
    answered = (await waiting).count(200)
    wall = time.perf_counter() - start
    return {**figures(taken, wall), "max_ms": 1e3 * max(taken), "megapixels": pixels / 1e6, "large": answered}


def start(model: str, words: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", "from branchout.cli import main; main()", "serve", model, "--port", "0", *words],
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    place = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
    assert place, "The server did not start."
    return process, int(place[1])


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}


def compared(rows: Sequence[dict[str, float]], beside: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each measurement compared with the loop that ran just before it."""
    names = {"per_second": "throughput_ratio", "p50_ms": "p50_ratio", "p99_ms": "p99_ratio"}
    pairs = [{names[key]: row[key] / loop[key] for key in names} for row, loop in zip(rows, beside, strict=True)]
    return median(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glyphs")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    model = api.load(options.model)
    files = image_files(model, 64)
    process, port = start(options.model, [])
    rows: dict[int, list[dict[str, float]]] = {clients: [] for clients in options.clients}
    loops: dict[int, list[dict[str, float]]] = {clients: [] for clients in options.clients}
    try:
        direct(model, files, 1.0)  # both warm up
        asyncio.run(served(port, files, 4, 1.0))
        for _ in range(options.rounds):
            for clients in options.clients:
                loops[clients].append(direct(model, files, options.seconds))
                rows[clients].append(asyncio.run(served(port, files, clients, options.seconds)))
                for name, row in ((f"{clients} clients", rows[clients][-1]), ("in a loop", loops[clients][-1])):
                    speeds = f"p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms, {row['per_second']:.0f}/s"
                    print(f"{name:>12}: {speeds}", flush=True)
        large = asyncio.run(beside_large(port, files, 24_000_000))
        print(f"beside {large['large']} large images: p50 {large['p50_ms']:.1f} ms, max {large['max_ms']:.1f} ms")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    loop = median([row for each in loops.values() for row in each])
    levels: list[dict[str, Any]] = [
        {"clients": clients, **median(rows[clients]), **compared(rows[clients], loops[clients])} for clients in rows
    ]
    best = max(levels, key=lambda level: level["throughput_ratio"])
    result = {
        "of": f"images per second served over HTTP to {best['clients']} clients, {options.model}",
        "against": "images per second of the same model called in a loop",
        "ratio": best["throughput_ratio"],
        "of_seconds": 1 / best["per_second"],
        "against_seconds": 1 / loop["per_second"],
        "loop": loop,
        "levels": levels,
        "beside_large": large,
        "settings": {"seconds": options.seconds, "rounds": options.rounds, "model": options.model},
        "load_average": os.getloadavg(),
        **results.provenance(),
    }
    print(results.write(options.out / "speed", "serve", result))


if __name__ == "__main__":
    main()
