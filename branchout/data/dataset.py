"""A dataset: training and validation samples, and what is known of its classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from branchout.data.samples import Samples
from branchout.errors import BranchoutError
from branchout.labels import unknown_class


@dataclass(frozen=True)
class Dataset:
    """Training samples to learn from and validation samples to choose and to report on."""

    name: str
    train: Samples
    val: Samples
    kind: str = "photo"
    """What the pictures are, which decides their augmentation: `photo` or `glyph`."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Class name → domain, such as animate or inanimate, or a group of scripts."""
    base_domain: str = ""
    """The domain the base model is trained on when a scenario changes the domain."""
    siblings: tuple[tuple[str, str, str], ...] = ()
    """(name of the merged class, first sibling, second sibling): pairs that a style change can merge."""
    style_sides: tuple[frozenset[str], frozenset[str]] | None = None
    """Two disjoint sets of styles, where a class occurs in several: a style change gives the base the first."""


FACTS = """{"domains": {"class name": "domain", …}, "base_domain": "the base's domain",
 "siblings": [["name of both together", "one class", "another class"], …]}"""


def with_facts(dataset: Dataset, path: Path, *, of_more: bool = False) -> Dataset:
    """The dataset with domains and siblings of its classes from the user's own JSON file.

    With `of_more` it may tell of classes that are not there, as one does that was copied with some of them.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        domains = {str(name): str(domain) for name, domain in facts.get("domains", {}).items()}
        siblings = tuple((str(both), str(one), str(other)) for both, one, other in facts.get("siblings", []))
        base_domain = str(facts.get("base_domain", ""))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BranchoutError(f"{path} does not describe classes ({error}). Expected JSON such as\n{FACTS}") from None
    known = dataset.train.classes
    if of_more:
        domains = {name: domain for name, domain in domains.items() if name in known}
        siblings = tuple(pair for pair in siblings if {pair[1], pair[2]} <= set(known))
        base_domain = base_domain if base_domain in domains.values() else ""
    for name in [*domains, *(name for _, *pair in siblings for name in pair)]:
        if name not in known:
            raise BranchoutError(f"{path}: {unknown_class(name, known)}")
    if base_domain not in {"", *domains.values()}:
        raise BranchoutError(f"{path}: base_domain is {base_domain!r}, but no class has that domain")
    return replace(
        dataset,
        domains=domains or dataset.domains,
        base_domain=base_domain or dataset.base_domain,
        siblings=siblings or dataset.siblings,
        style_sides=None if siblings else dataset.style_sides,
    )
