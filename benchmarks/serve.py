"""How fast a served model answers, against calling the same model in a loop without a server.

    python benchmarks/serve.py --out results

The server is the real command in a process of its own, asked over keep-alive connections by as many clients as each
level says, each sending one picture after another and waiting for its answer. The loop decodes the same files and asks
the model one picture at a time. Both are run in turns, so that other work on the machine slows both; what counts is
their ratio, and the load average says how far to trust it. The clients share the machine with the server.
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


def pictures(model: api.Model, count: int) -> list[bytes]:
    """Files of pictures the model knows."""
    drawn = glyphs(1, 1, classes=list(model.classes[:count]))
    files = []
    for row in range(len(drawn.val)):
        file = io.BytesIO()
        Image.fromarray(drawn.val.read(row)[:, :, 0]).save(file, "PNG")
        files.append(file.getvalue())
    return files


def figures(seconds: Sequence[float], wall: float) -> dict[str, float]:
    """What is told of one stretch of requests."""
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


async def client(port: int, files: Sequence[bytes], until: float, taken: list[float], turned_away: list[int]) -> None:
    """One connection that asks until the time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for data in itertools.cycle(files):
            before = time.perf_counter()
            if before > until:
                return
            head = (
                f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\nContent-Length: {len(data)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + data)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer)
            assert length, answer
            await reader.readexactly(int(length[1]))
            if answer.startswith(b"HTTP/1.1 200"):
                taken.append(time.perf_counter() - before)
            else:
                turned_away.append(int(answer[9:12]))
                await asyncio.sleep(0.1)
    finally:
        writer.close()


async def served(port: int, files: Sequence[bytes], clients: int, duration: float) -> dict[str, float]:
    taken: list[float] = []
    turned_away: list[int] = []
    start = time.perf_counter()
    shifted = [[*files[n % len(files) :], *files[: n % len(files)]] for n in range(clients)]
    await asyncio.gather(*(client(port, each, start + duration, taken, turned_away) for each in shifted))
    return {**figures(taken, time.perf_counter() - start), "turned_away": len(turned_away)}


def start(model: str, words: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [Path(sys.executable).parent / "branchout", "serve", model, "--port", "0", *words],
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    place = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
    assert place, "the server did not start"
    return process, int(place[1])


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}


def compared(rows: Sequence[dict[str, float]], beside: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each stretch against the loop that ran just before it."""
    names = {"per_second": "throughput_ratio", "p50_ms": "p50_ratio", "p99_ms": "p99_ratio"}
    pairs = [{names[key]: row[key] / loop[key] for key in names} for row, loop in zip(rows, beside, strict=True)]
    return median(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glyphs")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    model = api.load(options.model)
    files = pictures(model, 64)
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
                for name, told in ((f"{clients} clients", rows[clients][-1]), ("in a loop", loops[clients][-1])):
                    speeds = f"p50 {told['p50_ms']:.1f} ms, p99 {told['p99_ms']:.1f} ms, {told['per_second']:.0f}/s"
                    print(f"{name:>12}: {speeds}", flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    loop = median([told for each in loops.values() for told in each])
    levels: list[dict[str, Any]] = [
        {"clients": clients, **median(rows[clients]), **compared(rows[clients], loops[clients])} for clients in rows
    ]
    best = max(levels, key=lambda level: level["throughput_ratio"])
    row = {
        "of": f"pictures a second served over HTTP to {best['clients']} clients, {options.model}",
        "against": "pictures a second of the same model called in a loop",
        "ratio": best["throughput_ratio"],
        "of_seconds": 1 / best["per_second"],
        "against_seconds": 1 / loop["per_second"],
        "loop": loop,
        "levels": levels,
        "settings": {"seconds": options.seconds, "rounds": options.rounds, "model": options.model},
        "load_average": os.getloadavg(),
        **results.provenance(),
    }
    print(results.write(options.out / "speed", "serve", row))


if __name__ == "__main__":
    main()
