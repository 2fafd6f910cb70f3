"""An extension that is ready to train: its settings and images, and what the model's history keeps of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from branchout import __version__
from branchout.data.samples import digest
from branchout.method.config import ExtendConfig
from branchout.method.features import weights_digest
from branchout.method.results import Extended
from branchout.method.running.effort import Plan
from branchout.method.split import DataSplit
from branchout.model.classifier import Classifier


@dataclass(frozen=True)
class Prepared:
    """An extension whose settings and images were checked, ready to train."""

    base: Classifier
    split: DataSplit
    config: ExtendConfig
    warnings: tuple[str, ...]
    """Files that were left out, and classes that may be forgotten."""

    def settings(self) -> dict[str, object]:
        """All that decides what is trained, to compare with a stopped run. Its goal may still change."""
        memory, base = self.split.memory, self.base
        settings = self.config.as_dict()
        del settings["goal"], settings["pooler"]
        parts = (self.split.dev, self.split.test, self.split.calibration)
        return {
            **settings,
            "pooler": base.fused.pooler.kind,
            "base": weights_digest(base.backbone, base.branches, base.fused.heads, base.fused.corrections),
            "new images": self.split.new.fingerprint(),
            "memory": "none" if memory is None else memory.fingerprint(),
            "validation": digest(*(part.fingerprint() for part in parts if part is not None)),
        }

    def event(self, outcome: Extended, plan: Plan) -> dict[str, Any]:
        """What the model's history keeps of this extension."""
        settings = self.config.as_dict()
        del settings["pooler"], settings["minutes"]
        return {
            "what": "extend",
            "when": now(),
            **settings,
            "branch": plan.branch,
            "effort": asdict(plan.effort),
            "engine": outcome.engine,
            "images": len(self.split.new),
            "exemplars kept": 0 if self.split.memory is None else len(self.split.memory),
            "near-duplicates": self.split.near_duplicates,
            "chosen on": self.split.chosen_on,
            "measured": None if outcome.measured is None else outcome.measured.to_dict(),
            "losses": [round(loss, 5) for loss in outcome.losses],
            "seconds": {key: round(value, 2) for key, value in outcome.seconds.items()},
            "version": __version__,
        }


def now() -> str:
    """The time as the history keeps it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
