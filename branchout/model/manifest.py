"""The schema of branchout.json: everything a model folder says about itself, checked before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from branchout import files
from branchout.data.preprocess import Preprocessing
from branchout.errors import BranchoutError, explain_invalid, no_saved_model, printable, shortened, some
from branchout.goals import METRICS

MANIFEST = "branchout.json"
FORMAT = "branchout-1"
LARGEST = 32 * 2**20
"""Bytes that a manifest may have. One with 20,000 classes and 10,000 operating points takes two million."""
BASE_FILE = "base.safetensors"

LONGEST_NAME = 1000
Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME)]
Word = Annotated[str, StringConstraints(pattern=r"^[a-z_]*$", max_length=40)]
Text = Annotated[str, StringConstraints(max_length=10_000)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Width = Annotated[int, Field(ge=1, le=16_384)]
Channels = Annotated[int, Field(ge=1, le=64)]
Share = Annotated[float, Field(ge=0, le=1)]
Offset = Annotated[float, Field(ge=-1e9, le=1e9)]
Unit = Annotated[float, Field(ge=-100, le=100)]
Measurement = Literal["dev", "held-out", "pseudo"]


def step_file(step: int) -> str:
    return f"step-{step}.safetensors"


def fusion_file(step: int) -> str:
    return f"fusion-{step}.safetensors"


def is_saved_model(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


class Schema(BaseModel):
    """No conversions, no unknown keys, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


# The network.


OPTIONS = (
    "act_layer|channels|class_token|depth|depths|dims|embed_dim|fc_norm|final_norm|global_pool|head_norm_first|img_size|"
    "init_values|layers|mlp_ratio|num_heads|patch_size|pre_norm|qkv_bias|reg_tokens|window_size"
)
"""Arguments of timm's networks that a description may set: they change shapes, and never fetch or read anything."""


class PublishedArch(Schema):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?$", max_length=200)]
    """A registered name with or without a tag. Addresses such as hf-hub:… and local-dir:… do not match."""
    num_classes: Annotated[int, Field(ge=1, le=10_000_000)]


class TimmArch(PublishedArch):
    family: Literal["timm"]
    options: dict[
        Annotated[str, StringConstraints(pattern=f"^({OPTIONS})$")], Width | bool | Unit | Word | list[Width]
    ] = {}
    norm_eps: dict[Annotated[str, StringConstraints(max_length=200)], Share] = {}
    """The ε of the layer normalisations inside a module, where it is not timm's."""
    pool: Literal["token and mean"] | None = None
    """DINOv2's features: class token and mean patch token, side by side."""


class TorchvisionArch(PublishedArch):
    family: Literal["torchvision"]


class ResNetArch(Schema):
    family: Literal["resnet"]
    name: Name
    stem: Literal["small", "large"] = "small"
    width: Width | None = None
    in_channels: Channels = 3
    last_relu: bool = True


class ViTArch(Schema):
    family: Literal["vit"]
    name: Name
    size: Width
    patch: Width | None = None
    width: Width | None = None
    depth: Annotated[int, Field(ge=1, le=256)] | None = None
    in_channels: Channels = 3


AnyArch = TimmArch | TorchvisionArch | ResNetArch | ViTArch
Arch = Annotated[AnyArch, Field(discriminator="family")]
_ARCH: TypeAdapter[AnyArch] = TypeAdapter(Arch)


def read_arch(arch: Mapping[str, Any]) -> AnyArch:
    """The checked description of a network, as `bases.rebuild` takes it."""
    try:
        return _ARCH.validate_python(dict(arch))
    except ValidationError as error:
        raise BranchoutError(f"The description of the network is not valid: {explain_invalid(error)}") from None


# Steps.


class StepData(Schema):
    where: Annotated[str, StringConstraints(max_length=200)]


class FrontierData(Schema):
    """Operating points: their settings (b, or α and β) and their accuracies."""

    kind: Literal["dial", "grid"]
    settings: list[list[Offset]]
    figures: dict[str, list[Share | None]]
    images: Count
    balanced_by: Literal["mean", "product"]
    measured: Measurement
    beaten: FrontierData | None = None
    """Grid points that another point dominates; kept for the report."""
    judged: dict[Literal["all", "avg"], list[Share]] | None = None
    """What the goals are judged by, where validation images are few."""
    balanced_at: Offset | None = None
    """The b of the goal `balanced`, where it is not the best point of the curve."""

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        numbers = 1 if self.kind == "dial" else 2
        points = len(self.settings)
        if any(len(setting) != numbers for setting in self.settings):
            raise ValueError(f"every setting of a {self.kind} has {numbers} numbers")
        if set(self.figures) != set(METRICS):
            raise ValueError(f"figures must be {', '.join(METRICS)}")
        if self.judged is not None and set(self.judged) != {"all", "avg"}:
            raise ValueError("judged must be all and avg")
        curves: list[list[Any]] = [*self.figures.values(), *(self.judged or {}).values()]
        if any(len(values) != points for values in curves):
            raise ValueError(f"every figure needs one value for each of {points} points")
        if None in self.figures["all"] or None in self.figures["avg"]:
            raise ValueError("every point needs an accuracy over all images and an average")
        return self


class StepPointsData(Schema):
    frontier: FrontierData
    point: Count
    goal: Name
    deltas: Count
    """Sets of deltas in the fusion file: those of all points, of the chosen one, or none."""
    shifts: list[Offset] = []
    dropped: bool = False
    """Whether it had deltas or class means that are not kept: they belong to a step that later ones have replaced."""

    @model_validator(mode="after")
    def _fits_frontier(self) -> Self:
        points = len(self.frontier.settings)
        if self.point >= points:
            raise ValueError(f"point is {self.point}, but the frontier has {points} points")
        allowed = (0, 1) if self.frontier.kind == "dial" or self.dropped else (1, points)
        if self.deltas not in allowed:
            raise ValueError(f"deltas is {self.deltas}; expected {' or '.join(map(str, allowed))}")
        return self


# History: shown to people, never needed to predict. Unknown entries are kept.


class HistorySchema(Schema):
    model_config = ConfigDict(extra="allow")


class AccuracyData(HistorySchema):
    all: Share
    base: Share | None
    novel: Share | None
    steps: list[Share | None]
    overlap: Share | None
    avg: Share


class GoalData(AccuracyData):
    point: Count


class MeasuredData(HistorySchema):
    images: Count
    after: AccuracyData
    before: AccuracyData | Annotated[dict[str, Any], Field(max_length=0)]
    goals: dict[Name, GoalData]


class SizeData(HistorySchema):
    branches: Count
    parameters: Count
    bytes: Count


class CompactionSizes(HistorySchema):
    before: SizeData
    after: SizeData


class EventData(HistorySchema):
    what: Text = "made"
    when: Text = ""
    base: Text = ""
    recipe: Text | None = None
    branch: Text | None = None
    goal: Text | None = None
    version: Text = ""
    images: Count = 0
    exemplars_kept: Count = Field(0, alias="exemplars kept")
    chosen_on: Text = Field("", alias="chosen on")
    epochs: Count | None = None
    views: Count | None = None
    seed: int | None = None
    accuracy: Share | None = None
    losses: list[float] = []
    seconds: float | dict[Name, float] | None = None
    measured: MeasuredData | None = None
    steps: Count = 0
    branches: Count = 0
    before: AccuracyData | None = None
    sizes: CompactionSizes | None = None


# The whole manifest.


class Manifest(Schema):
    format: Literal["branchout-1"]
    arch: Arch
    head: Literal["cosine", "linear"]
    kind: Literal["photo", "glyph"]
    preprocessing: Preprocessing
    pooler: Literal["max", "average"]
    classes: Annotated[list[Annotated[list[Name], Field(min_length=1)]], Field(min_length=1)]
    steps: list[StepData]
    fusions: list[StepPointsData]
    history: list[EventData]
    files: dict[str, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]]

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if not len(self.classes) - 1 == len(self.steps) == len(self.fusions):
            raise ValueError(
                f"expected one list of classes for the base and one for each step: found {len(self.classes)} lists, "
                f"{len(self.steps)} steps and {len(self.fusions)} fusions"
            )
        for number, names in enumerate(self.classes):
            if len(set(names)) < len(names):
                raise ValueError(f"classes.{number} lists a class more than once")
        if isinstance(self.arch, PublishedArch) and self.arch.num_classes != len(self.classes[0]):
            raise ValueError(f"arch.num_classes is {self.arch.num_classes} for {len(self.classes[0])} base classes")
        for step, points in enumerate(self.fusions, 1):
            if len(points.shifts) not in (0, step):
                raise ValueError(f"fusions.{step - 1}.shifts has {len(points.shifts)} numbers; expected 0 or {step}")
            measured = self.history[step].measured if step < len(self.history) else None
            goals = {} if measured is None else measured.goals
            if any(goal.point >= len(points.frontier.settings) for goal in goals.values()):
                raise ValueError(f"history.{step}.measured names an operating point that does not exist")
        last = self.fusions[-1] if self.fusions else None
        if last and (last.dropped or (last.frontier.kind == "grid" and last.deltas != len(last.frontier.settings))):
            raise ValueError(f"fusions.{len(self.fusions) - 1} has deltas for {last.deltas} points; expected all")
        if set(self.files) != set(self.expected_files()):
            raise ValueError(f"files lists {some(self.files, 8)}; expected {some(self.expected_files(), 8)}")
        return self

    def expected_files(self) -> list[str]:
        steps = range(1, len(self.steps) + 1)
        fusions = [fusion_file(step) for step in steps if self.fusions[step - 1].deltas]
        return [BASE_FILE, *map(step_file, steps), *fusions]


def read_manifest(folder: Path) -> tuple[Manifest, dict[str, Any]]:
    """The checked manifest of a model folder, and the same as the plain data that the file holds."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise no_saved_model(folder)
    if not path.is_file():
        inside = sorted(entry.name for entry in folder.iterdir())
        raise BranchoutError(
            f"{printable(folder)} is not a saved model: expected a file {MANIFEST} in it, found {some(inside, 8)}"
        )
    content = files.read_json(path, LARGEST)
    if not isinstance(content, dict):
        raise BranchoutError(f"{path} is not valid: expected a JSON object, found a {type(content).__name__}")
    if content.get("format") != FORMAT:
        raise BranchoutError(
            f"{path} has format {shortened(content.get('format'))}, and this version reads {FORMAT!r}. "
            "If a newer version saved the model, type: pip install --upgrade branchout"
        )
    return check_manifest(content, path), content


def check_manifest(content: Mapping[str, Any], path: Path) -> Manifest:
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise BranchoutError(f"{path} is not valid: {explain_invalid(error)}") from None
