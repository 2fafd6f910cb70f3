"""Experiments: the paper's tables, and single methods in any scenario."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from branchout.cli import options
from branchout.cli.app import app, console, open_dataset, say, warn
from branchout.cli.display import new_table, progress
from branchout.cli.many_processes import is_distributed
from branchout.errors import BranchoutError, unknown
from branchout.files import check_output
from branchout.goals import METRICS, STEP_METRICS
from branchout.units import duration

if TYPE_CHECKING:
    from branchout.bench.job import Done, Job
    from branchout.bench.outdated import Forecast
    from branchout.bench.request import Request
    from branchout.data.samples import Samples

Name = Annotated[str | None, typer.Argument(metavar="TABLE", help="sota, fig-design-space, …, or all; see --list.")]
DataSource = Annotated[str, typer.Option(help="A benchmark's folder, a folder of classes, or 'glyphs'.")]
List = Annotated[bool, typer.Option("--list", help="List all tables, scenarios and methods.")]
MethodNames = Annotated[
    list[str] | None, typer.Option("--method", metavar="METHOD", help="Run this method only; can be repeated.")
]
ScenarioName = Annotated[str | None, typer.Option(help="Run a scenario of these sizes instead of a table.")]
BaseModel = Annotated[str | None, typer.Option(help="With --scenario: a saved base model; no base is trained.")]
BaseClasses = Annotated[int | None, typer.Option(min=1, help="Number of base classes; default: all others.")]
NovelClasses = Annotated[
    int | None, typer.Option(min=1, help="New classes in each step; default: an even share of the rest.")
]
Overlap = Annotated[int | None, typer.Option(min=1, help="New classes that are base classes too; default: 5.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Number of steps, for the scenario 'steps'.")]
Scale = Annotated[str | None, typer.Option(help="Sizes of a table: paper, tiny-imagenet-200, glyphs or fitted.")]
ArchName = Annotated[
    str | None, typer.Option(help="resnet10, resnet18, resnet50, resnet32 or vit_tiny; default: all of the table's.")
]
Width = Annotated[int | None, typer.Option(min=1, help="Channels of the first stage, or of vit_tiny's tokens.")]
Size = Annotated[int | None, typer.Option(min=8, help="Input size in pixels.")]
Exemplars = Annotated[int | None, typer.Option(min=0, help="Exemplars kept of each class; default: 10.")]
MemoryTotal = Annotated[int | None, typer.Option(min=1, help="Exemplars in total, shared by all classes so far.")]
Schedule = Annotated[
    str | None, typer.Option(help="fast, paper or published (CIFAR-100's long one); vit_tiny: fast only.")
]
Faithful = Annotated[
    bool,
    typer.Option("--faithful", help="Train iCaRL, BiC, WA, DER, PODNet, FOSTER as published: --schedule published."),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of the base and of methods that train a whole network.")
]
BranchEpochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of stages I and II and of heads on features, for quick trials.")
]
Split = Annotated[int | None, typer.Option(min=0, help="Seed of the class split and of the base model; default: 1.")]
Seeds = Annotated[str, typer.Option(help="Exemplar seeds, separated by commas.")]
AllSeeds = Annotated[
    bool, typer.Option("--all-seeds", help="Use every seed, also where each one trains a whole network.")
]
Stale = Annotated[
    bool,
    typer.Option(
        "--stale",
        help="Measure the rows of this dataset again that are marked as outdated, cheapest first; with --all-seeds "
        "also those with fewer seeds than --seeds.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="With --stale: skip methods that would end later; 0 only lists them."),
]
NewPhotos = Annotated[Path | None, typer.Option("--new", help="With 'photos': folder of the new classes.")]
OldPhotos = Annotated[Path | None, typer.Option("--memory", help="With 'photos': folder of images of old classes.")]
TestPhotos = Annotated[
    Path | None, typer.Option("--test", help="With 'photos': test folder; without it a fifth is held out.")
]
PhotoName = Annotated[
    str | None,
    typer.Option("--name", help="With 'photos': folder of the rows below --out; default: that of the data."),
]
PhotoPlan = Annotated[
    str | None,
    typer.Option("--plan", help="With 'photos': effort of stage I, such as views=8,exemplar_views=2,epochs=20."),
]
Workers = Annotated[int, typer.Option(min=1, help="Number of processes.")]
DaskAddress = Annotated[
    str | None, typer.Option("--dask", metavar="ADDRESS", help="Address of a Dask scheduler to run on.")
]
Out = Annotated[Path, typer.Option(help="Folder of the rows, one JSON file each.")]


@app.command(epilog="Example: branchout bench sota --data glyphs")
def bench(
    table: Name = None,
    data: DataSource = "glyphs",
    listed: List = False,
    method: MethodNames = None,
    scenario: ScenarioName = None,
    base: BaseModel = None,
    base_classes: BaseClasses = None,
    novel_classes: NovelClasses = None,
    overlap: Overlap = None,
    steps: Steps = None,
    scale: Scale = None,
    arch: ArchName = None,
    width: Width = None,
    size: Size = None,
    exemplars: Exemplars = None,
    memory_total: MemoryTotal = None,
    schedule: Schedule = None,
    faithful: Faithful = False,
    epochs: Epochs = None,
    branch_epochs: BranchEpochs = None,
    split: Split = None,
    seeds: Seeds = "1,2,3",
    all_seeds: AllSeeds = False,
    stale: Stale = False,
    minutes: Minutes = None,
    new: NewPhotos = None,
    memory: OldPhotos = None,
    test: TestPhotos = None,
    classes_from: options.ClassesFrom = None,
    name: PhotoName = None,
    plan: PhotoPlan = None,
    workers: Workers = 1,
    dask: DaskAddress = None,
    out: Out = Path("results"),
) -> None:
    """Run a table of the paper, or methods of your choice in a scenario. Existing rows are not measured again."""
    asked, began = dict(locals()), time.monotonic()
    if listed:
        _list()
        return
    if table == "report":
        raise BranchoutError(
            "the pages of results are written by a script of the repository: python -m benchmarks.paper; "
            "see benchmarks/README.md"
        )
    if is_distributed() and (table == "photos" or workers > 1 or dask or minutes is not None):
        raise BranchoutError(
            "Under accelerate launch, bench runs tables only: leave out photos, --workers, --dask and --minutes."
        )
    from branchout.bench.request import Request, seed_numbers

    if table == "photos":
        _photos(new, memory, test, base, method, seed_numbers(seeds), out, classes_from, name, plan)
        return
    chosen = {name: asked[name] for name in Request.__dataclass_fields__ if name not in ("methods", "seeds")}
    request = Request(**chosen, methods=tuple(method or ()), seeds=seed_numbers(seeds))
    _measure(request, workers, dask, began)


def _measure(request: Request, workers: int, dask: str | None, began: float) -> None:
    """Measure the rows that a request asks for; outdated ones within its minutes from `began` on."""
    from branchout.bench.outdated import Deadline, Forecast

    request.check()
    minutes = request.minutes
    if minutes is not None and (workers > 1 or dask):
        raise BranchoutError("--minutes plans one process; leave out --workers and --dask, or --minutes")
    dataset = open_dataset(request.data)
    jobs, reasons = request.drawable(dataset)
    for reason in reasons:
        say(reason, "left out:")
    if not jobs:
        named = ", for the methods and network given" if request.methods or request.arch else ""
        kind = "outdated rows, nor rows with fewer seeds," if request.all_seeds else "outdated rows"
        say(f"No {kind} of '{dataset.name}' in {request.out}{named}.")
        return
    check_output(request.out, folder=True)
    request.out.mkdir(parents=True, exist_ok=True)
    if not request.stale:
        _run(jobs, workers, dask)
        return
    forecast = Forecast(jobs, dataset)
    jobs = _show_forecast(forecast)
    deadline = Deadline(forecast, math.inf if minutes is None else began + 60 * minutes)
    _run(jobs, workers, dask, deadline)
    if deadline.refused:
        later = f"would end after {minutes:g} minutes; run the same command again to measure them"
        say(f"{len(deadline.refused)} of {len(jobs)} methods {later}", "not started:")


def _show_forecast(forecast: Forecast) -> list[Job]:
    """The jobs in their order, with the time that each will take, and when it will end."""
    shown = new_table("experiment", "network", "method", "expected", "ends after", left=("network", "method"))
    total, jobs = 0.0, []
    for job, seconds in forecast.cheapest_first():
        total += seconds
        jobs.append(job)
        shown.add_row(job.folder.parent.name, job.plan.arch, job.method, duration(seconds), duration(total))
    console.print(shown)
    say(f"times are those of earlier rows, measured on: {'; '.join(forecast.hardware)}")
    return jobs


def _photos(
    new: Path | None,
    memory: Path | None,
    test: Path | None,
    base: str | None,
    methods: list[str] | None,
    seeds: tuple[int, ...],
    out: Path,
    classes_from: str | None,
    name: str | None,
    plan: str | None,
) -> None:
    """Compare ways to extend a base on one's own folders of photos."""
    if new is None or memory is None or base is None:
        raise BranchoutError(
            "name the folders and the base: branchout bench photos --new NEW/ --memory OLD/ --base efficientnet_lite0"
        )
    from branchout import load
    from branchout.api.sources import samples_in
    from branchout.bench import photos
    from branchout.bench.photo_methods import BRANCHOUT, METHODS

    effort = None if plan is None else photos.parse_effort(plan)
    offered = METHODS if effort is None else BRANCHOUT  # a plan is for Branchout's own
    for method in methods or ():
        if method not in offered:
            raise unknown("method for photos", method, offered)
    chosen = methods or (list(METHODS) if effort is None else ["default"])
    data, network = name or new.absolute().parent.name, Path(base).name
    folder = out / (name or Path(data, network))
    shown = new_table("method", "old before", "old after", "new", "average", "s")
    with progress() as on_progress:
        model = load(base)

        problems: list[str] = []

        def read(folder: Path) -> Samples:
            return samples_in(folder, problems, model.classes, classes_from, on_progress)

        folders = read(new), read(memory), read(test) if test else None
        warn(problems)
        case = photos.open_case(model, *folders, effort, on_progress)
        sizes = f"{len(model.classes)} + {len(case.new.classes)} classes, {len(case.test)} test images"
        say(f"{sizes}: {', '.join(chosen)}, seeds {', '.join(map(str, seeds))}")
        for method, row in photos.run(case, chosen, seeds, folder, network, data, plan or ""):
            if isinstance(row, str):
                say(f"{method}: {row}", "left out:")
                continue
            figures = [row["before"], *(row["metrics"].get(key) for key in ("base", "novel", "avg"))]
            cells = ["–" if value is None else f"{value:.1f}" for value in figures]  # such as new without test images
            seconds = f"{sum(row['seconds']) / len(row['seconds']):.0f}"
            shown.add_row(method, *cells, seconds)
            say(f"{method}: old {cells[0]} → {cells[1]}, new {cells[2]}, {seconds} s")
    console.print(sizes, shown)
    say(f"rows are in {folder}")


def _run(jobs: list[Job], workers: int, dask: str | None, may_start: Callable[[Job], bool] = lambda job: True) -> None:
    """Measure missing rows and show all."""
    from branchout.bench import request, runner
    from branchout.bench.executor import executor_of

    for line in request.summary(jobs):
        say(line)
    if workers > 1 or dask:
        with executor_of(workers, dask) as (executor, number):
            done = runner.run_all(jobs, executor=executor, workers=number, on_done=_say_left_out)
    elif is_distributed():
        from branchout.bench.many_processes import run_divided

        with progress() as on_progress:
            done = run_divided(jobs, on_progress=on_progress, on_done=_say_left_out)
    else:
        with progress() as on_progress:
            done = runner.run_all(jobs, on_progress=on_progress, on_done=_say_left_out, may_start=may_start)
    for folder in dict.fromkeys(job.folder for job in jobs):
        _show([job for job in jobs if job.folder == folder and not job.missing()])
        _warn_of_other_bases(folder)
    if any(each.why_not for each in done) and all(job.missing() for job in jobs):
        raise typer.Exit(1)


def _say_left_out(done: Done) -> None:
    if done.why_not:
        say(f"{done.job.method}: {done.why_not}", "left out:")


def _warn_of_other_bases(folder: Path) -> None:
    from branchout.bench.rows import on_another_base, read_row

    others = on_another_base({path: read_row(path) for path in sorted(folder.glob("*.json"))})
    if others:
        odd = ", ".join(path.stem for path in others)
        say(
            f"these rows of {folder} were measured on another training run of the base model than the others: {odd}. "
            "To measure all with one, delete all rows of that folder and run this again, or run it with another --out",
            "warning:",
        )


BUILT_ON = {"ours": "a new branch", "features": "the paper's branch", "network": "the network", "base": "a frozen base"}
"""What a method builds on, in words."""


def _list() -> None:
    from branchout.bench.methods import methods
    from branchout.bench.photo_methods import METHODS
    from branchout.bench.tables import figures, tables
    from branchout.data.scenarios import NAMES

    text = ("what it shows", "networks", "what it is", "builds on")
    shown = new_table("name", *text[:2], title="tables and figures", left=text)
    shown.columns[0].no_wrap = True
    for table in (tables() | figures()).values():
        beside = [f"{arch} ({dataset})" for dataset, archs in table.archs_by_dataset.items() for arch in archs]
        shown.add_row(table.name, table.title, ", ".join([*table.archs, *beside]))
    console.print(shown)
    console.print(f"scenarios: {', '.join(NAMES)}\n", highlight=False)
    console.print(f"photos: your own folders, with the methods {', '.join(METHODS)}\n", highlight=False)
    shown = new_table("name", *text[2:], title="methods", left=text)
    shown.columns[0].no_wrap = True
    for method in methods().values():
        note = method.baseline.note if method.baseline else ""
        built_on = BUILT_ON[method.baseline.on if method.baseline else "ours"]
        shown.add_row(method.name, Text(f"{method.label}. {note}" if note else method.label), built_on)
    console.print(shown)


def _show(jobs: list[Job]) -> None:
    """The rows of these jobs as one table."""
    from branchout.bench.rows import number, read_row

    rows = {job: [read_row(path) for path in job.files().values()] for job in jobs}
    if not rows:
        return
    first = rows[jobs[0]][0]
    every = [row["metrics"] for each in rows.values() for row in each]
    measured = {name for metrics in every for name, value in metrics.items() if value is not None}
    metrics = [name for name in (*METRICS, *STEP_METRICS) if name in measured]
    short = {"incremental": "all*", "avg_steps": "avg*"}
    table = new_table("method", *(short.get(name, name) for name in metrics), "+M", "s")
    for column in table.columns[1:]:
        column.no_wrap = True  # the first alone gives way where the window is narrow
    for job, points in rows.items():
        alone = points[0]["point"] in ("plain", "alone")  # the method as it is, so that the point needs no name
        if not alone:
            table.add_row(job.method)
        for place, row in enumerate(points):
            name = job.method if alone and place == 0 else f"  {row['point']}"
            before = row.get("base_parameters")  # which older rows lack
            more = "–" if before is None else f"{(row['parameters'] - before) / 1e6:.2f}"
            figures = [number(row["metrics"].get(metric)) for metric in metrics]
            table.add_row(Text(name), *figures, more, f"{sum(row['seconds'].values()):.0f}")
    sizes = f"{first['base_classes']} + {first['novel_classes']}"
    title = f"{jobs[0].table} on {first['dataset']}, {first['arch']}: {sizes}"
    console.print(Text(title, style="italic"), table, sep="\n")
    starred = "; *: mean over all steps" if measured & set(STEP_METRICS) else ""
    say(f"+M: millions of parameters added to the base's, without heads; s: seconds of training{starred}")
    say(f"rows are in {jobs[0].folder}")
