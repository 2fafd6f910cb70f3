"""Image sets of Debian packages as folders for `branchout bench photos`: two sets that no recipe was developed on.

    apt-get install openclipart-png dataset-fashion-mnist
    python -m benchmarks.image_sets clip-art out/ --old OLD/ --old-test TEST/
    python -m benchmarks.image_sets garments out/ --old OLD/ --old-test TEST/
    branchout bench photos --new out/new --memory OLD/ --test out/test --base efficientnet_lite0 --name clip-art

`clip-art` has a class for every innermost folder of Open Clip Art with enough pictures, `garments` the ten classes of
Fashion-MNIST (28 × 28 grey pixels). Both rules were fixed before any accuracy was seen. OLD/ and TEST/ hold other
images of the base's classes; images of TEST/ whose class OLD/ has are linked into `out/test`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN = 15
"""Training images of each class, as many as the flowers have."""
TEST = 30
"""Test images of each class at most."""
LEAST = 20
"""A folder of clip art with fewer pictures is left out."""
UNSORTED = "unsorted"
MOST_PIXELS = 50_000_000
"""Of a picture of clip art; a few flags have hundreds of millions."""
LARGEST = 512
"""Sides of written images in pixels at most."""
GARMENTS = (
    "T-shirt or top", "trousers", "pullover", "dress", "coat", "sandals", "shirt", "sneakers", "bag", "ankle boots",
)  # fmt: skip


Classes = Iterator[tuple[str, list[Image.Image]]]
"""Names, each with training images and then test images."""


def clip_art(share: Path) -> Classes:
    """Pictures of every folder without folders, in the order of their digests; no picture twice, or in two folders."""
    Image.MAX_IMAGE_PIXELS = None  # sizes are checked below
    top = share / "openclipart" / "png"
    folders = sorted({path.parent for path in top.rglob("*.png")})
    innermost = [
        each for each in folders if each.name != UNSORTED and not any(path.is_dir() for path in each.iterdir())
    ]
    pictures = {folder: dict(_digests(folder)) for folder in innermost}
    places = Counter(digest for found in pictures.values() for digest in found)
    for folder, found in pictures.items():
        own = [found[digest] for digest in sorted(found) if places[digest] == 1]
        if len(own) >= LEAST:
            yield f"clip art, {' '.join(folder.relative_to(top).parts)}", [_small(path) for path in own[: TRAIN + TEST]]


def _digests(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            if image.width * image.height <= MOST_PIXELS:
                yield hashlib.sha256(_small(path).resize((64, 64)).tobytes()).hexdigest(), path


def _small(path: Path) -> Image.Image:
    """Over white, as clip art is mostly transparent."""
    with Image.open(path) as image:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
    white.thumbnail((LARGEST, LARGEST))
    return white.convert("RGB")


def garments(share: Path) -> Classes:
    """The first training images of each class, then its first test images."""
    parts = [
        [_values(share, f"{part}-{name}") for name in ("images-idx3", "labels-idx1")] for part in ("train", "t10k")
    ]
    for label, name in enumerate(GARMENTS):
        of = [pixels.reshape(-1, 28, 28)[labels == label] for pixels, labels in parts]
        yield name, [Image.fromarray(image) for image in np.concatenate([of[0][:TRAIN], of[1][:TEST]])]


def _values(share: Path, name: str) -> np.ndarray:
    """The numbers of an IDX file, behind a header of four bytes for each of its dimensions and four more."""
    content = gzip.decompress((share / "datasets" / "fashion-mnist" / f"{name}-ubyte.gz").read_bytes())
    return np.frombuffer(content, np.uint8, offset=4 * (content[3] + 1))


SETS: Mapping[str, Callable[[Path], Classes]] = {"clip-art": clip_art, "garments": garments}


def write(folder: Path, name: str, images: Iterable[Image.Image]) -> None:
    (folder / name).mkdir(parents=True)
    for number, image in enumerate(images):
        image.save(folder / name / f"{number:02}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="images kept of the base's classes")
    parser.add_argument("--old-test", type=Path, required=True, help="test images of the same classes")
    parser.add_argument("--share", type=Path, default=Path("/usr/share"), help="where the packages are installed")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"the folder {given.out} already exists: delete it or choose another")
    for name, images in SETS[given.set](given.share):
        write(given.out / "new", name, images[:TRAIN])
        write(given.out / "test", name, images[TRAIN:])
    for folder in sorted(path for path in given.old.iterdir() if path.is_dir()):
        if (given.old_test / folder.name).is_dir():
            (given.out / "test" / folder.name).symlink_to((given.old_test / folder.name).resolve())


if __name__ == "__main__":
    main()
