"""The command that lists the networks which can be a base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from branchout.cli import options
from branchout.cli.app import app, console, say, then
from branchout.cli.display import new_table
from branchout.errors import BranchoutError
from branchout.units import parameters

if TYPE_CHECKING:
    from branchout.model.catalogue import ListedBase

MOST = 60
"""Networks that are listed one by one; of more, only the families are."""


@app.command(epilog="Example: branchout bases resnet50")
def bases(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="List networks with this in their name.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List networks that can be a base, their sizes and weights."""
    import json
    from dataclasses import asdict

    from branchout.model.catalogue import families_that_cannot_be_split, listed_bases

    found = [base for base in listed_bases() if text is None or text in base.name]
    refused = families_that_cannot_be_split()
    known = {base.family for base in found}
    if as_json:
        for base in found:
            typer.echo(json.dumps({**asdict(base), "status": base.status()}))
        return
    if not found:
        unfit = [family for family, names in refused.items() if any(str(text) in name for name in names)]
        why = f": those of {', '.join(unfit)} cannot be split into stages and a linear head" if unfit else ""
        raise BranchoutError(f"No base network has {text!r} in its name{why}")
    ready = [base for base in found if base.status() in ("installed", "cached")]
    if len(found) <= MOST:
        _show(found)
    else:
        _show_families(found)
        if ready:
            say("\nReady without a download:")
            _show(ready)
    if text is None:
        say(f"\nCannot be split, and so cannot be a base: {', '.join(sorted(set(refused) - known))}")
        say(
            "\n--base also takes a checkpoint file (.pth, .safetensors) with --arch NAME and --classes FILE, a Hugging "
            "Face folder (config.json and weights, of timm or transformers), hf-hub:OWNER/NAME, and any saved model. "
            "A backbone without classes, such as DINOv2 or CLIP, needs a linear head: --head FILE."
        )
        then("branchout bases resnet50", f"branchout check NEW/ --base {(ready or found)[0].name}")


def _show(found: list[ListedBase]) -> None:
    rows = []
    for base in found:
        classes = f"{base.classes:,}" if base.classes else "none (give --head)"
        rows.append((base.name, parameters(base.parameters), f"{base.size} px", classes, base.status()))
    console.print(new_table("network", "parameters", "input", "classes", "weights", rows=rows, left=("weights",)))


def _show_families(found: list[ListedBase]) -> None:
    families: dict[str, list[ListedBase]] = {}
    for base in found:
        families.setdefault(base.family, []).append(base)
    rows = []
    for family, networks in sorted(families.items(), key=lambda each: -len(each[1])):
        networks.sort(key=lambda base: base.parameters)
        sizes = f"{parameters(networks[0].parameters)}–{parameters(networks[-1].parameters)}"
        rows.append((family.removeprefix("torchvision."), str(len(networks)), sizes, networks[0].name))
    say(f"{len(found):,} networks. Families, and the smallest network of each:")
    console.print(new_table("family", "networks", "parameters", "smallest", rows=rows, left=("smallest",)))
