"""The part of docs/performance.md about inference: engines, the server, and other servers."""

from __future__ import annotations

from benchmarks.speed.markdown import DEVICES, Row, Rows, link, table


def inference_part(rows: Rows) -> str:
    lines: list[tuple[str, ...]] = [("engine", "on", "1 image", "64 images", "accuracy")]
    served: list[tuple[str, ...]] = [
        ("clients", "on", "p50", "p99", "images a second", "in a loop: p50", "images a second")
    ]
    for device, told in DEVICES.items():
        row = rows.get(f"inference-{device}")
        for name, found in (row["engines"] if row else {}).items():
            times = (f"{found[f'ms_batch_{batch}']:.2f} ms" for batch in (1, 64))
            where = "CPU of the GPU's machine" if device == "cuda" and "CPU" in name else told
            lines.append((name, link(f"inference-{device}", where), *times, f"{100 * found['accuracy']:.2f}%"))
        for level in (rows.get(f"server-{device}") or {"levels": ()})["levels"]:
            over, loop = level["served"], level["loop"]
            figures = [f"{over['p50_ms']:.1f} ms", f"{over['p99_ms']:.1f} ms", f"{over['per_second']:.0f}"]
            figures += [f"{loop['p50_ms']:.1f} ms", f"{loop['per_second']:.0f}"]
            served.append((str(level["clients"]), link(f"server-{device}", told), *figures))
    parts = ["## Inference"]
    if len(lines) > 1:
        parts += ["The built-in model of 800 characters; accuracy on the same drawn images.", table(*lines)]
    if len(served) > 1:
        parts += ["`branchout serve`, its clients on the same machine, and `predict` in a loop:", table(*served)]
    parts += other_servers(rows)
    return "\n\n".join(parts)


def other_servers(rows: Rows) -> list[str]:
    """The same model behind LitServe, measured in turns with `branchout serve`."""
    lines: list[tuple[str, ...]] = [
        ("clients", "on", "branchout serve: p50", "p99", "images a second", "LitServe: p50", "p99", "images a second")
    ]
    found: list[Row] = []
    for device, told in DEVICES.items():
        name = f"server-litserve-{device}"
        if name not in rows:
            continue
        found.append(rows[name])
        for level in rows[name]["levels"]:
            cells = []
            for way in ("served", "litserve"):
                each = level[way]
                cells += [f"{each['p50_ms']:.1f} ms", f"{each['p99_ms']:.1f} ms", f"{each['per_second']:.0f}"]
            lines.append((str(level["clients"]), link(name, told), *cells))
    if not found:
        return [
            "`python -m benchmarks.speed --only inference` measures LitServe beside the server where installed. No "
            "figures are kept yet: on two cores shared with other work they differed ninefold from run to run."
        ]
    about = (
        f"The same model behind LitServe {found[0]['litserve']} (`pip install litserve`) with one worker and batches "
        "as large. LitServe reads no raw images, so its clients send them as base64 text in JSON:"
    )
    return [about, table(*lines)]
