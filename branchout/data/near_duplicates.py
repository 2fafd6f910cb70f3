"""Near-duplicates: photos of one burst, recognised by a perceptual hash. They must not be on both sides of a hold-out.

The hash has 128 bits: which of two neighbouring cells of a coarse grey grid is lighter, along rows (64) and along
columns (64). Brightness, JPEG quality, size and small crops change few of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from branchout.data.samples import Image, ImageHashes, Samples
from branchout.labels import Ints

MOST_BITS = 20
"""Two near-duplicates differ in at most this many bits, …"""
SHARED = 2
"""… and have at least this many times more set bits in common: flat background sets none."""
_BLOCK = 2**23
"""Pairs that are compared at a time: 32 MB."""


def image_hash(image: Image) -> npt.NDArray[np.uint64]:
    """The 128 bits of an image as two numbers; both are 0 for an image of one colour, which is like no other."""
    from PIL import Image as Pillow  # not for tables of arrays

    grey = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).convert("L")
    across, down = (np.asarray(grey.resize(size, Pillow.Resampling.BOX)) for size in ((9, 8), (8, 9)))
    bits = np.concatenate([across[:, 1:] > across[:, :-1], down[1:] > down[:-1]], axis=None)
    return np.packbits(bits).view("<u8").astype(np.uint64)


def near_duplicates(samples: Samples) -> Ints:
    """A group number for every sample. Near-duplicates of one class share theirs, directly or through others.

    Only decoded files have hashes; in other tables every sample is a group of its own.
    """
    group = np.arange(len(samples))
    if samples.image_hash is None:
        return group
    for members in _by_label(samples.labels):
        bits = _bits(samples.image_hash[members])
        first_of = np.arange(len(members))
        for pairs in _near(bits, bits):  # joined at once: all frames of one video would be very many pairs
            if (pairs[0] != pairs[1]).any():
                first_of = _joined(first_of, pairs)
        group[members] = members[first_of]
    return group


def _joined(first_of: Ints, pairs: Ints) -> Ints:
    """The first member of each member's group, after the groups that these pairs link have become one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(first_of)
    ends = np.concatenate([pairs, np.stack([np.arange(count), first_of])], axis=1)
    links = coo_array((np.ones(ends.shape[1], dtype=bool), tuple(ends)), shape=(count, count))
    _, first, component = np.unique(
        connected_components(links, directed=False)[1], return_index=True, return_inverse=True
    )
    joined: Ints = first[component]
    return joined


def near_training(held: Samples, train: Samples) -> Ints:
    """Positions of the held-out samples that are near-duplicates of a training sample of the same class."""
    if held.image_hash is None or train.image_hash is None:
        return np.empty(0, dtype=np.int64)
    found = [np.empty(0, dtype=np.int64)]
    for name in set(held.classes) & set(train.classes):
        members = np.flatnonzero(held.labels == held.classes.index(name))
        others = train.image_hash[train.labels == train.classes.index(name)]
        found += [members[np.unique(near[0])] for near in _near(_bits(held.image_hash[members]), _bits(others))]
    return np.unique(np.concatenate(found))


def take_groups(members: Ints, groups: Ints, count: int) -> Ints:
    """About `count` of the members, which are in random order, as whole groups: the first ones that fit.

    If none fits, the smallest group is taken, unless it is more than a third of the members.
    """
    of_member = groups[members]
    names, first, sizes = np.unique(of_member, return_index=True, return_counts=True)
    order = np.argsort(first)
    taken: list[int] = []
    for place in order if count else ():
        if sizes[place] <= count:
            taken.append(names[place])
            count -= sizes[place]
    if count and not taken:
        smallest = order[np.argmin(sizes[order])]
        taken = [names[smallest]] if 3 * sizes[smallest] <= len(members) else []
    return members[np.isin(of_member, taken)]


def count_grouped(groups: Ints) -> tuple[int, int]:
    """How many samples have near-duplicates, and in how many groups they are."""
    sizes = np.unique(groups, return_counts=True)[1]
    return int(sizes[sizes > 1].sum()), int((sizes > 1).sum())


def _by_label(labels: Ints) -> list[Ints]:
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def _bits(hashes: ImageHashes) -> npt.NDArray[np.float32]:
    return np.unpackbits(np.ascontiguousarray(hashes).view(np.uint8), axis=1).astype(np.float32)


def _near(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> Iterator[Ints]:
    """Pairs of rows that are near each other, as two rows of positions; sums of bits are exact in float32."""
    rows = max(1, _BLOCK // max(1, len(second)))
    for start in range(0, len(first), rows):
        some = first[start : start + rows]
        common = some @ second.T
        differing = some.sum(1)[:, None] + second.sum(1) - 2 * common
        near = (differing <= MOST_BITS) & (SHARED * differing <= common) & (common > 0)
        yield np.stack(np.nonzero(near)) + np.array([[start], [0]])
