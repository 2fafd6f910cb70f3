"""A job, which measures all rows of one method in one experiment: where they are, and which are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from branchout.bench import rows as results
from branchout.bench.methods import RENAMED, method_named
from branchout.bench.plan import Plan, difference, flat
from branchout.errors import BranchoutError


@dataclass(frozen=True)
class Job:
    """One method in one experiment."""

    data: str
    dataset: str
    """The dataset's name in results."""
    table: str
    plan: Plan
    method: str
    seeds: tuple[int, ...]
    out: Path
    command: str = ""
    """The command that was typed."""
    images: str = ""
    """Identifies the dataset's images by their names and classes."""

    @property
    def folder(self) -> Path:
        table = self.table if self.plan.split == 1 else f"{self.table}-split{self.plan.split}"
        return self.out / self.dataset / table / self.plan.arch

    @property
    def scenario_file(self) -> Path:
        """Where a clustered scenario is kept."""
        return self.folder.parent / "scenario.json"

    def files(self) -> dict[str, Path]:
        """The file of each operating point."""
        points = method_named(self.method).points()
        found = {point: self.folder / f"{self.method}-{point}.json" for point in points}
        for old in (old for old, name in RENAMED.items() if name == self.method):
            older = {point: self.folder / f"{old}-{point}.json" for point in points}
            found = {point: older[point] if older[point].exists() else path for point, path in found.items()}
        return found

    @property
    def partial(self) -> Path:
        """Where finished seeds are kept until the rows are complete."""
        return self.folder / f"{self.method}.partial"

    def missing(self) -> list[str]:
        """The operating points without a row, or with one that is marked as outdated.

        A row measured with other settings is an error, and so is another method's row of another plan beside it.
        """
        files = self.files()
        rows = {point: self._checked(path, own=True) for point, path in files.items()}
        absent = [point for point, row in rows.items() if row is None or row.get("outdated") or self._fewer(row)]
        for path in sorted(set(self.folder.glob("*.json")) - set(files.values())) if absent else ():
            self._checked(path, own=False)
        return absent

    def _fewer(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has only the first of the seeds that are asked for: it is measured again with all."""
        asked = results.asked_seeds(row)
        return asked != self.seeds and asked == self.seeds[: len(asked)]

    def _more(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has further seeds than are asked for: it stays, unless it would have to be measured again."""
        return results.asked_seeds(row)[: len(self.seeds)] == self.seeds and not row.get("outdated")

    def _checked(self, path: Path, *, own: bool) -> dict[str, Any] | None:
        """A row, checked for being of this plan, and with `own` of these seeds and recipe; None if it was deleted."""
        try:
            row = results.read_row(path)
        except BranchoutError:
            if path.exists():
                raise
            return None
        wanted = asdict(self.plan)
        del wanted["model"]  # its weights are compared, not its path
        if own:
            wanted |= {} if self._fewer(row) or self._more(row) else {"seeds": self.seeds}
            # An outdated row is measured again, with today's recipe.
            wanted |= {} if row.get("outdated") else method_named(self.method).settings()
        # Older rows do not name every setting: those had their defaults. An optimiser is named only if it is not SGD.
        recorded = flat(asdict(Plan("", None, 0))) | flat(row["settings"])
        recorded["seeds"] = list(results.asked_seeds(row))
        differing = difference(recorded, wanted)
        if differing:
            raise BranchoutError(f"{path} was measured with {differing}. Delete it, or choose another --out")
        if (row.get("images") or self.images) != self.images:
            raise BranchoutError(
                f"{path} was measured with other images of '{self.dataset}' than there are now; "
                "delete it, or write elsewhere with --out"
            )
        return row


@dataclass(frozen=True)
class Done:
    """How a job ended: the files it wrote, or why it wrote none."""

    job: Job
    written: tuple[Path, ...] = ()
    why_not: str = ""
