"""How long onnxruntime takes for a picture, against torch on the same cores and the same model.

    python benchmarks/speed/onnx_speed.py --out results

Exports the shipped model of 800 characters (or --model), and asks both for the same pictures, one at a time and many
at once, in turns, so that a busy machine slows both. Writes OUT/speed/onnx.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import onnxruntime
import torch

from branchout import api
from branchout.bench import rows as results
from branchout.evaluate.compare import logits


def in_turns(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median seconds of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 2):  # the first two warm up
        for times, work in zip(taken, (one, other), strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return statistics.median(taken[0][2:]), statistics.median(taken[1][2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glyphs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = api.Model(api.load(options.model).saved, None, torch.device("cpu"))
    sizes = model.classifier.preprocessing
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        exported = model.export(file)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    rows = []
    for batch in (1, 64):
        images = torch.rand(batch, sizes.channels, sizes.size, sizes.size)
        given = {"images": images.numpy()}
        ours, theirs = in_turns(
            lambda given=given: session.run(["logits"], given),  # type: ignore[misc]
            lambda images=images: logits(model.classifier, images),  # type: ignore[misc]
            options.repeats,
        )
        rows.append({"batch": batch, "ratio": ours / theirs, "of_seconds": ours, "against_seconds": theirs})
        print(f"batch {batch}: onnxruntime {ours:.4f} s, torch {theirs:.4f} s, ratio {ours / theirs:.2f}", flush=True)
    about = results.provenance()
    about["versions"] |= {name: version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    row = {
        "of": f"onnxruntime, {options.model}, one picture",
        "against": "torch, the same picture",
        **{key: rows[0][key] for key in ("ratio", "of_seconds", "against_seconds")},
        "batches": rows,
        "threads": options.threads,
        "largest_difference": exported.difference,
        **about,
    }
    print(results.write(options.out / "speed", "onnx", row))


if __name__ == "__main__":
    main()
