"""Recipes: how stages I and II are trained (paper, sections 3.3, 4.2 and 5.1). One code path, three settings of it.

- `paper`: the text. Departures: small sets get smaller batches and rates, trunk outputs are cached for a fixed number
  of views, linear heads start at class means, a single new class stays there, and W_r,aux starts at the identity;
- `reference`: the authors' published experiments, where they differ from the text;
- `branchout`: ours, the default. Exemplars and distillation enter stage I, and one dial replaces the α×β grid.

Optimiser settings that the text leaves open are those of the authors' experiments.

Symbols: (α, β) → `Stage2.grid` · W_r,aux → `Stage2.learned_router` · λ, T → `Stage1.distillation`, `.temperature`

The numbers that decide a result are all here. How much is computed on which machine is in `running/effort.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from branchout.errors import unknown
from branchout.training.optimisation import ADDED_LATER, Optimisation

GRID = tuple((alpha / 5, beta / 5) for alpha in range(6) for beta in range(6))
"""The paper's grid: α and β each in {0, .2, .4, .6, .8, 1}."""


@dataclass(frozen=True)
class Stage1:
    """How a new branch is trained."""

    optimisation: Optimisation
    replay: bool
    """Train on exemplars too, against the frozen logits. The clone gets copies of the old heads, for `distillation`."""
    distillation: float = 0.0
    """Weight of T²·KL from the frozen logits to the clone's own rows of the old classes."""
    temperature: float = 2.0
    first_rows: float = field(default=0.2, metadata=ADDED_LATER)
    """Length of a linear head's first rows, as a share of the base's. Rows as long as the base's make the loss small at
    once and stay near the class means."""
    linear_rate: float = field(default=2.0, metadata=ADDED_LATER)
    """With replay: a factor on the learning rate where the head is linear, because its rows start short."""
    most_hue: float = field(default=0.05, metadata=ADDED_LATER)
    """With replay: the largest hue jitter. The paper's 0.2 costs accuracy, because many things differ by colour."""
    linear_pool: float = field(default=1 / 3, metadata=ADDED_LATER)
    """With replay, where the head is linear: the least share of the exemplars that an epoch draws. A few new images
    would leave most exemplars unseen."""
    corrections_after: int | None = field(default=1, metadata=ADDED_LATER)
    """With replay, where the head is cosine: after so many steps a new branch also learns what it adds to the logits of
    all earlier ones; None for never. In a first step that loses more than it gains."""


@dataclass(frozen=True)
class Stage2:
    """How the deltas between branches are trained."""

    optimisation: Optimisation
    grid: tuple[tuple[float, float], ...]
    """The (α, β) points trained side by side."""
    learned_router: bool
    """W_r,aux is learned; otherwise the router reads the raw maxima."""
    beta_on_head: bool
    """For base samples, β also scales new branches' features where they enter their own frozen heads, and the deltas
    between new branches."""
    zero_start: bool
    """Deltas start at zero instead of torch's default for a linear layer."""
    views: int
    """How many augmented views of each exemplar are cached; epoch e sees view e modulo this."""
    when: str
    """`always`, or `overlap`: only if more than the share `few_shared` of the new classes is known already."""
    few_shared: float = field(default=0.1, metadata=ADDED_LATER)


@dataclass(frozen=True)
class Recipe:
    name: str
    stage_one: Stage1
    stage_two: Stage2
    balanced: str
    """What the best-balanced point maximises: the `mean` of Acc_all and Acc_avg, or their `product`."""
    dial: bool
    """Operating points lie on the curve of one scalar b; otherwise they are the points of the grid."""


PAPER = Recipe(
    name="paper",
    stage_one=Stage1(Optimisation(epochs=30), replay=False),
    stage_two=Stage2(
        Optimisation(epochs=10, schedule="constant"),
        grid=GRID,
        learned_router=True,
        beta_on_head=False,
        zero_start=False,
        views=10,
        when="always",
    ),
    balanced="mean",
    dial=False,
)
REFERENCE = replace(
    PAPER,
    name="reference",
    stage_two=replace(PAPER.stage_two, learned_router=False, beta_on_head=True),
    balanced="product",
)
BRANCHOUT = Recipe(
    name="branchout",
    stage_one=Stage1(Optimisation(epochs=30, nesterov=True), replay=True, distillation=1.0),
    stage_two=Stage2(
        Optimisation(epochs=10, weight_decay=1e-2, schedule="constant"),
        grid=((1.0, 1.0),),  # α = 1: the routing loss alone
        learned_router=False,
        beta_on_head=False,
        zero_start=True,
        views=2,
        when="overlap",
    ),
    balanced="mean",
    dial=True,
)
RECIPES = {recipe.name: recipe for recipe in (PAPER, REFERENCE, BRANCHOUT)}

HEAD_ITERATIONS = 150
"""L-BFGS iterations of a head that is trained alone."""
HEAD_DECAY = 3e-3
"""L2 penalty of a head that is trained alone: weight of the mean squared norm of W_n's rows."""
TIE = 0.002
"""Where an operating point is chosen on few images, scores closer than this count as equal."""
BEATEN_BY = 0.01
"""Of points that count as equal, one is not chosen if another is better by this much in a part, and worse in none."""
RIDGE = 0.1
"""Ridge penalty, as a share of the mean variance, of the regression that predicts pseudo-exemplars' features in other
branches."""
MEANS_SHARE = 0.7
"""Weight of the scores by class means where few images choose it; the trained logits of new classes have the rest."""
MEANS_IMAGES = 100
"""Images of each class that class means are computed from, of new and of kept ones: more change little."""
COVARIANCE_RIDGE = 3.0
"""Ridge of the covariance within classes, as a share of its mean variance."""
HELD_OUT = 0.2
"""Share of each class held out where no validation images are given."""
ENOUGH_OLD = 100
"""Held-out images of old classes that can choose an operating point, even if most classes have none among them."""


def recipe_named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
