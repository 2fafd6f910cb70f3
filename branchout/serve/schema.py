"""The JSON of requests and responses. FastAPI checks them against these models and describes them at /docs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ClassProbability(Shape):
    name: str = Field(alias="class")
    probability: float | None


class Answer(ClassProbability):
    new: bool = Field(description="Whether the last step added this class.")


class Branch(Shape):
    branch: str = Field(description="base, step 1, step 2, …")
    share: float | None = Field(description="The share of the probability from this branch; shares add up to 1.")
    top: list[ClassProbability] = Field(description="The answer of this branch alone, over its own classes.")


class Score(ClassProbability):
    logit: float
    parts: dict[str, float] = Field(
        description="own (the branch's own logit), delta (what other branches add), dial; they add up to the logit."
    )


class WhyNot(Shape):
    winner: Score
    expected: Score
    place: int = Field(description="The place of the expected class; 1 if it won.")
    lead: dict[str, float] = Field(description="By how much each part of the winner's logit is larger.")
    dial_change: float | None = Field(description="The change of b with which it would win; null if there is none.")


class Prediction(Shape):
    file: str = Field(description="The last part of the file's name.")
    answers: list[Answer] | None = None
    before: list[ClassProbability] | None = Field(
        None, description="The answer before the last step; null for a base model."
    )
    branches: list[Branch] | None = None
    why: WhyNot | None = Field(None, description="With `expect`: why that class did not win.")
    error: str | None = Field(None, description="Instead of all the others: why this file cannot be used.")


class Error(Shape):
    error: str = Field(description="What was found and what was expected.")
    predictions: list[Prediction] | None = Field(None, description="Of /predict: the error of each file.")


class Nearest(Shape):
    b: float
    accuracies: dict[str, float | None]


class OperatingPoint(Shape):
    kind: str = Field(description="dial or grid.")
    goal: str
    point: int | None = Field(description="Its number on the frontier; null for a b between two points.")
    b: float | None = Field(None, description="Added to the logits of every new branch (dial).")
    alpha: float | None = None
    beta: float | None = None
    accuracies: dict[str, float | None] | None = Field(description="On the images the frontier was measured with.")
    nearest: Nearest | None = Field(None, description="The nearest point of the frontier, for a b between two points.")
    images: int
    measured: str = Field(description="Where the accuracies come from: dev, held-out or pseudo.")
    saved: bool = Field(description="Whether the model's folder names this choice (goal and point), as after `save`.")


class CurrentPoint(Shape):
    operating_point: OperatingPoint | None


class Predictions(Shape):
    predictions: list[Prediction]
    operating_point: OperatingPoint | None


class Class(Shape):
    name: str = Field(alias="class")
    split: str = Field(description="base, step 1, …, or overlap for a class of several branches.")
    branches: list[str]
    new: bool


class Classes(Shape):
    found: int
    classes: list[Class]


class Step(Shape):
    step: int
    branch: str = Field(description="The stage where it branches off.")
    classes: int


class ModelInfo(Shape):
    name: str
    version: str
    kind: str
    architecture: dict[str, Any]
    classes: list[Class]
    steps: list[Step]
    pooler: str
    parameters: dict[str, int]
    bytes: int | None
    preprocessing: dict[str, Any]
    history: list[dict[str, Any]]
    frontier: dict[str, Any] | None
    operating_point: OperatingPoint | None = None


class Health(Shape):
    status: str = Field(description="ok, waiting (for a model that is being made) or failed.")
    version: str
    queued: int = Field(description="Images that wait for the model.")


class Work(BaseModel):
    work: str
    done: int
    total: int
    figures: dict[str, float | None]
    losses: list[float | None] = Field([], description="Of every epoch so far.")
    since: float


class Progress(Shape):
    out: str | None
    state: str = Field(description="none (nothing is watched), waiting, running, saving, stopped or finished.")
    started: float | None = None
    updated: float | None = None
    works: list[Work] = Field(default=[], description="In the order of their last update; the last one is running.")


class LabelledImages(Shape):
    """The progress of reading the labelled images."""

    state: str = Field(description="waiting (for the model), none (no labelled images), working, ready or failed.")
    work: str
    done: int
    total: int
    error: str | None = Field(description="Why the labelled images cannot be used.")
    problems: list[str] = Field(description="Files that were left out, and why.")
    model: str | None = Field(None, description="The name of the model that is served.")
    loaded: int | None = Field(None, description="How many models this server has served: a new one counts up.")
    saved_point: int | None = Field(None, description="The point of the frontier that the model's folder names.")
    folder_changed: bool | None = Field(None, description="Whether the folder now holds another model.")


class ReportData(LabelledImages):
    title: str | None = Field(None, description="HTML, as are figures, contents, sections and dial.")
    figures: str | None = None
    contents: str | None = None
    sections: str | None = None
    dial: str | None = None
    data: dict[str, Any] | None = Field(None, description="Accuracies at every operating point, answers of each image.")
    current: int | None = Field(None, description="The position of the current operating point in the data's points.")


class PointChoice(Shape):
    """A goal, a value of b, or the number of a point of the frontier."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"goal": "avg"}, {"b": 1.3}]})

    goal: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="all, avg, balanced, novel, or a condition: novel>=0.80, novel>=80%."
    )
    b: Annotated[float, Field(strict=True)] | None = Field(None, description="For models with a dial.")
    point: Annotated[int, Field(strict=True)] | None = Field(None, description="A point of the frontier.")
    save: bool = Field(False, description="Also write the choice to the model's folder.")

    @model_validator(mode="after")
    def _exactly_one(self) -> PointChoice:
        if sum(given is not None for given in (self.goal, self.b, self.point)) != 1:
            raise ValueError("give either goal or b or point")
        return self


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be answered as it is."},
    503: {"model": Error, "description": "The server is busy, or the model is not ready. See Retry-After."},
}
_BINARY = {"type": "string", "format": "binary"}
IMAGES = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {"files": {"type": "array", "items": _BINARY}},
                }
            },
            "image/*": {"schema": _BINARY},
        },
    }
}
"""FastAPI can describe a form or a raw body, not the choice between both."""
