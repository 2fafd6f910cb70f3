"""Add the classes of a folder of photographs to a timm network.

    python examples/extend_timm.py new_photos/ --memory old_photos/ --out v2/

`new_photos/` has one folder per class (robin/*.jpg, wren/*.jpg); `old_photos/` is optional: a few images of
classes that the network knows, in folders named as it names them. The default base needs no download; with a network
connection any timm name works, such as --base resnet50.a1_in1k.
"""

import argparse
from pathlib import Path

import branchout
from branchout.training.loop import Event


def show(event: Event) -> None:
    """Print progress. The command line draws its bars from the same events."""
    figures = "  ".join(f"{name} {value:.3f}" for name, value in event.figures.items())
    print(f"\r{event.work}: {event.done}/{event.total}  {figures}", end="\n" if event.done == event.total else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path)
    parser.add_argument("--base", default="efficientnet_lite0")
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--out", type=Path, default=Path("v2"))
    parser.add_argument("--epochs", type=int, help="of training the new branch; the recipe's if not given")
    options = parser.parse_args()

    base = branchout.load(options.base)
    print(f"{options.base}: {len(base.classes):,} classes, images of {base.classifier.preprocessing.size} pixels")

    # Only a copy of the last stage is trained; the network itself does not change.
    model = base.extend(options.new, memory=options.memory, out=options.out, epochs=options.epochs, on_progress=show)
    print(f"now {len(model.classes):,} classes; saved in {options.out}")

    # The operating points, measured on held-out images. `model.tune("avg")` chooses another.
    for goal in ("all", "balanced", "avg"):
        figures = model.frontier.at(model.frontier.choose(goal))
        print(f"{goal}: " + ", ".join(f"{name} {value:.1%}" for name, value in figures.items() if value is not None))
    photo = next(path for path in sorted(options.new.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    answers = model.predict(photo, top=3)
    print(f"{photo}: " + ", ".join(f"{name} {probability:.1%}" for name, probability in answers))


if __name__ == "__main__":  # photographs are decoded by worker processes, which import this file again
    main()
