"""The shapes of what is sent and answered: for the documentation at /docs and /openapi.json, and for checking /turn."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Shape(BaseModel):
    """Nothing beside what is listed, so that the tests notice when an answer and its description part ways."""

    model_config = ConfigDict(extra="forbid")


class Error(Shape):
    error: str = Field(description="A sentence: what was found, what was expected.")


class Named(Shape):
    name: str = Field(alias="class")
    probability: float | None


class Answered(Named):
    new: bool = Field(description="Whether the last step taught this class; the model before it had no word for it.")


class Branch(Shape):
    branch: str = Field(description="base, step 1, step 2, …")
    share: float | None = Field(description="How much of the probability this branch brought; shares add up to 1.")
    top: list[Named] = Field(description="What this branch would answer alone, among the classes it knows.")


class Prediction(Shape):
    file: str = Field(description="The last part of the name that was sent.")
    answers: list[Answered] | None = None
    before: list[Named] | None = Field(None, description="The answer before the last step; null for a base model.")
    branches: list[Branch] | None = None
    error: str | None = Field(None, description="In place of all the rest: why this file cannot be used.")


class Nearest(Shape):
    b: float
    accuracies: dict[str, float | None]


class OperatingPoint(Shape):
    kind: str = Field(description="dial, or grid.")
    goal: str
    point: int | None = Field(description="Its number on the frontier; null for a b between two points.")
    b: float | None = Field(None, description="What is added to the logits of every new branch (dial).")
    alpha: float | None = None
    beta: float | None = None
    accuracies: dict[str, float | None] | None = Field(description="Measured on the images the frontier was made with.")
    nearest: Nearest | None = Field(None, description="Where b lies between two points of the frontier.")
    images: int
    measured: str = Field(description="dev, held-out or pseudo: where the accuracies come from.")
    saved: bool = Field(
        description="Whether the model's folder names this very choice, its goal and its point, so that a server "
        "would start with it. Only a turn with `save` writes it there."
    )


class Point(Shape):
    operating_point: OperatingPoint | None


class Predictions(Shape):
    predictions: list[Prediction]
    operating_point: OperatingPoint | None


class Class(Shape):
    name: str = Field(alias="class")
    split: str = Field(description="base, step 1, …, or overlap where several branches know it.")
    branches: list[str]
    new: bool


class Classes(Shape):
    found: int
    classes: list[Class]


class Step(Shape):
    step: int
    branch: str = Field(description="Where it branches off.")
    classes: int


class ModelFacts(Shape):
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
    operating_point: OperatingPoint | None


class Health(Shape):
    status: str = Field(description="ok, waiting (for the model that is being made) or failed.")
    version: str
    queued: int = Field(description="Pictures that wait for the model.")


class Work(Shape):
    work: str
    done: int
    total: int
    figures: dict[str, float | None]
    losses: list[float | None] = Field([], description="Of every epoch so far, for works that train.")
    since: float


class Progress(Shape):
    out: str | None
    state: str = Field(description="none (nothing is watched), waiting, running, saving, stopped or finished.")
    started: float | None
    updated: float | None
    works: list[Work] = Field(description="In the order in which they were last heard of; the last one runs.")


class ReportData(Shape):
    state: str = Field(description="Of labelled images: none (were given), working, ready, failed.")
    work: str
    done: int
    total: int
    error: str | None = Field(description="Why the labelled images cannot be used.")
    problems: list[str] = Field(description="Files among them that were left out, and why.")
    header: str = Field(description="Markup, as are contents, sections and dial.")
    contents: str
    sections: str
    dial: str
    data: dict[str, Any] = Field(description="Accuracies at every operating point, and each image's answers.")
    current: int | None = Field(description="Where in the data's points the server stands; null if at none of them.")


class Turn(Shape):
    """A goal, a position of the dial, or a point of the frontier by its number."""

    goal: Annotated[str, Field(max_length=200)] | None = None
    b: Annotated[float, Field(strict=True)] | None = None
    point: Annotated[int, Field(strict=True)] | None = None
    save: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Turn:
        if sum(given is not None for given in (self.goal, self.b, self.point)) != 1:
            raise ValueError("give either goal or b, or a point's number")
        return self


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be answered as it is."},
    503: {"model": Error, "description": "Too much waits; come again after the seconds in Retry-After."},
}
_BINARY = {"type": "string", "format": "binary"}
PICTURES = {
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
TURN = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "goal": {
                            "type": "string",
                            "description": "all, avg, balanced, novel, or a condition: novel>=0.80, novel>=80%.",
                        },
                        "b": {"type": "number", "description": "The dial, for models that have one."},
                        "point": {"type": "integer", "description": "A point of the frontier, by its number."},
                        "save": {
                            "type": "boolean",
                            "default": False,
                            "description": "Also write the choice into the model's folder.",
                        },
                    },
                },
                "examples": {"goal": {"value": {"goal": "avg"}}, "b": {"value": {"b": 1.3}}},
            }
        },
    }
}
