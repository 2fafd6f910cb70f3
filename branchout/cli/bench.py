"""Experiments: the paper's tables, and single methods in any scenario."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from branchout.cli.app import app, console, open_dataset, say
from branchout.errors import BranchoutError, unknown


@app.command(epilog="Example: branchout bench sota --data glyphs")
def bench(
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="sota, fig-design-space, …, or `all`; see --list.")
    ] = None,
    data: Annotated[str, typer.Option(help="A benchmark's folder, a folder of classes, or 'glyphs'.")] = "glyphs",
    listed: Annotated[bool, typer.Option("--list", help="Name all tables and methods.")] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method, or one of your choice; may be given several times.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(help="Instead of a table: any scenario, with its sizes.")] = None,
    base: Annotated[
        str | None, typer.Option(help="With --scenario: a saved model that is the base, instead of training one.")
    ] = None,
    base_classes: Annotated[
        int | None, typer.Option(min=1, help="Base classes; all that are left if not given.")
    ] = None,
    novel_classes: Annotated[
        int | None, typer.Option(min=1, help="New classes at each step; an even share of the rest if not given.")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(min=1, help="How many new classes are base classes too; 5 if not given.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps, for the scenario 'steps'.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="Sizes of a table: paper, tiny-imagenet-200, glyphs, fitted.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="resnet10, resnet18, resnet50, resnet32 or vit_tiny; all of a table's if not given."),
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Channels of the first stage; vit_tiny: of every token.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Input size in pixels.")] = None,
    exemplars: Annotated[int | None, typer.Option(min=1, help="Kept of each class; 10 if not given.")] = None,
    memory_total: Annotated[
        int | None, typer.Option(min=1, help="Exemplars in total instead, shared by all classes so far.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="fast, paper, or published (CIFAR-100's long one); fast alone for vit_tiny.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs of all training, to try things out; not of PODNet's and DER's end."),
    ] = None,
    split: Annotated[int, typer.Option(min=0, help="Draws the classes, and seeds the base.")] = 1,
    seeds: Annotated[str, typer.Option(help="Exemplar seeds, separated by commas.")] = "1,2,3",
    workers: Annotated[int, typer.Option(min=1, help="Rows made at once, in as many processes.")] = 1,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that makes the rows.")] = None,
    out: Annotated[Path, typer.Option(help="Where rows are written, one file each.")] = Path("results"),
    page: Annotated[Path, typer.Option(help="Where `bench report` writes Markdown, and HTML beside it.")] = Path(
        "docs/results.md"
    ),
) -> None:
    """Run a table of the paper, or methods of your choice in a scenario.

    Rows that already exist are not measured again.
    """
    if listed:
        _list()
        return
    if table == "report":
        raise BranchoutError(
            "`branchout bench report` is now a script of the repository: python -m benchmarks.paper --data NAME "
            "(see benchmarks/README.md)"
        )
    from branchout.bench import runner, tables
    from branchout.bench.methods import method_named
    from branchout.bench.plan import Plan
    from branchout.bench.rows import on_another_base
    from branchout.cli.display import progress
    from branchout.data.scenarios import NAMES
    from branchout.model.architectures import ARCHITECTURES

    if (table is None) == (scenario is None):
        raise BranchoutError("name a table, or a scenario with --scenario; branchout bench --list names them all")
    sizes = {"base-classes": base_classes, "novel-classes": novel_classes, "overlap": overlap, "steps": steps}
    given = [f"--{name}" for name, value in (sizes if table else {"scale": scale}).items() if value is not None]
    if table and base:
        raise BranchoutError("a table has a base of its own, so --base goes with --scenario only")
    if given:
        raise BranchoutError(
            f"a table has sizes of its own, so {given[0]} goes with --scenario only"
            if table
            else "--scale is for tables; a scenario takes --base-classes and --novel-classes"
        )
    if exemplars and memory_total:
        raise BranchoutError("--memory-total stands for a number a class, so leave --exemplars out, or the other")
    for name in method or ():
        method_named(name)  # a typo is answered before anything is loaded
    _known("scenario", scenario, NAMES)
    _known("architecture", arch, ARCHITECTURES)
    numbers = _numbers(seeds)
    dataset = open_dataset(data)
    changes: dict[str, Any] = {"arch": arch, "width": width, "size": size, "exemplars": exemplars}
    changes |= {"total": memory_total, "split": split}
    jobs: list[Any] = []
    if table is not None:
        every = tables.tables() | tables.figures()
        for chosen in every.values() if table == "all" else [tables.table_named(table)]:
            for network in tables.networks_of(chosen, dataset.name, scale, schedule) if arch is None else [arch]:
                asked = {**changes, "arch": network, "schedule": schedule, "epochs": epochs}
                for experiment, plan in tables.experiments_of(chosen, dataset, scale, **asked).items():
                    names = method or list(chosen.of(plan.arch))
                    jobs += tables.jobs_for(data, dataset, experiment, plan, names, numbers, out)
        jobs = list(dict.fromkeys(jobs))  # tables share rows
    else:
        assert scenario is not None
        if not method:
            raise BranchoutError("say which methods with --method; branchout bench --list names them all")
        start = None
        if base is not None:
            start = _given_base(base, {"arch": arch, "width": width, "size": size, "base-classes": base_classes})
            base_classes = len(start.classes)
        number = steps or 1
        novel = novel_classes or _even_share(dataset, base_classes, number)
        shared = (5 if overlap is None else overlap) if scenario.startswith("overlap") else 0
        plan = tables.fitted_to(Plan(scenario, base_classes, novel, shared, number), dataset, **changes)
        experiment = f"{scenario}-{base_classes or 'rest'}+{f'{number}x' if number > 1 else ''}{novel}"
        if start is not None:
            plan = start.start(plan)
            experiment += f"-from-{Path(start.place).name}"
        jobs = tables.jobs_for(
            data, dataset, experiment, tables.scheduled(plan, schedule, epochs), method, numbers, out
        )
    jobs = _drawable(jobs, dataset, table, scale)
    _make_folder(out)
    _say_plans(jobs)
    if workers > 1 or dask:
        with _executor(workers, dask) as (executor, number):
            done = runner.run_all(jobs, executor=executor, workers=number, on_done=_tell)
    else:
        with progress(console) as report:
            done = runner.run_all(jobs, report=report, on_done=_tell)
    for folder in dict.fromkeys(job.folder for job in jobs):
        _show([job for job in jobs if job.folder == folder and not job.missing()])
        others = on_another_base({path: runner.read_row(path) for path in sorted(folder.glob("*.json"))})
        if others:
            odd = ", ".join(path.stem for path in others)
            say(
                f"these rows of {folder} rest on another training of the base than the rest: {odd}. To "
                "have all on one, delete all rows of that folder and run this again, or run it with another --out",
                "warning:",
            )
    if any(each.why_not for each in done) and all(job.missing() for job in jobs):
        raise typer.Exit(1)


def _drawable(jobs: list[Any], dataset: Any, table: str | None, scale: str | None) -> list[Any]:
    """The jobs whose classes can be drawn, which is found out before anything is made; of `all` those that cannot are
    left out, anything else ends with the reason."""
    why_not: dict[Any, str] = {}
    for job in jobs:
        if job.plan not in why_not and job.missing():
            why_not[job.plan] = _undrawable(job, dataset, table, scale)
    told = list(dict.fromkeys(filter(None, why_not.values())))  # once for all networks of a table
    fit = [job for job in jobs if not why_not.get(job.plan)]
    if told and (table != "all" or not fit):
        raise BranchoutError(told[0])
    for each in told:
        say(each, "left out:")
    return fit


def _undrawable(job: Any, dataset: Any, table: str | None, scale: str | None) -> str:
    """Why a job's classes cannot be drawn; empty if they can."""
    from branchout.bench.experiment import Experiment
    from branchout.bench.tables import FITTED, scale_of

    plan = job.plan
    try:
        Experiment(_without_clusters(plan), dataset).scenario  # noqa: B018
    except BranchoutError as error:
        if table is None:
            return str(error)
        told, used = f"{job.table}: {error}", scale or scale_of(dataset)
        if used != FITTED and (plan.base or 0) + plan.steps * plan.novel - plan.overlap > len(dataset.train.classes):
            told += f"; those are the sizes of --scale {used}, and with --scale {FITTED} they fit the data"
        return told
    return ""


def _without_clusters(plan: Any) -> Any:
    """A plan with the same classes that can be drawn before a network is there to cluster their samples."""
    from dataclasses import replace

    from branchout.data.scenarios import CLUSTERED

    if plan.model or plan.scenario not in CLUSTERED:
        return plan
    if plan.scenario == "overlap-full":
        return replace(plan, scenario="overlap-random-shuffled", overlap=plan.novel)
    return replace(plan, scenario=plan.scenario.replace("clustered", "shuffled"))


def _say_plans(jobs: list[Any]) -> None:
    """What will be run, a line for each experiment of which rows are missing."""
    from branchout.report.markup import count

    by_plan: dict[Any, list[Any]] = {}
    for job in jobs:
        by_plan.setdefault((job.table, job.plan), []).append(job)
    for (table, plan), asked in by_plan.items():
        missing = [job for job in asked if job.missing()]
        if not missing:
            continue
        novel = f"{plan.steps} × {plan.novel}" if plan.steps > 1 else plan.novel
        base = plan.kept or plan.base or "all other"
        trained = f"a base trained for {count(plan.pretraining.epochs, 'epoch')}"
        if plan.model and plan.kept is None:
            trained = "a base that is there"
        say(
            f"{table}: {base} + {novel} classes, {plan.arch} at {plan.size} pixels, {trained}; "
            f"{len(missing)} of {len(asked)} methods to run"
        )


METRICS = ("all", "base", "novel", "overlap", "avg", "incremental", "avg_steps")
BUILT_ON = {"ours": "a new branch", "features": "the paper's branch", "network": "the network", "base": "a frozen base"}
"""What a method builds on, in words."""


def _list() -> None:
    from branchout.bench.methods import methods
    from branchout.bench.tables import figures, tables

    shown = Table(title="tables and figures", title_justify="left")
    for heading in ("name", "what it shows", "networks"):
        shown.add_column(heading, no_wrap=heading == "name")
    for table in (tables() | figures()).values():
        beside = [f"{arch} ({dataset})" for dataset, archs in table.beside.items() for arch in archs]
        shown.add_row(table.name, table.title, ", ".join([*table.archs, *beside]))
    console.print(shown)
    from branchout.data.scenarios import NAMES

    console.print(f"scenarios: {', '.join(NAMES)}\n", highlight=False)
    shown = Table(title="methods", title_justify="left")
    for heading in ("name", "what it is", "builds on"):
        shown.add_column(heading, no_wrap=heading == "name")
    for method in methods().values():
        note = method.baseline.note if method.baseline else ""
        built_on = BUILT_ON[method.baseline.on if method.baseline else "ours"]
        shown.add_row(method.name, Text(f"{method.label}. {note}" if note else method.label), built_on)
    console.print(shown)


def _given_base(base: str, decided: dict[str, Any]) -> Any:
    """The model that is the base; what it decides cannot be asked for as well."""
    from branchout.bench.given_base import given_base

    given = next((name for name, value in decided.items() if value is not None), None)
    if given:
        raise BranchoutError(f"the model that --base gives decides --{given}; leave one of the two out")
    return given_base(base)


def _even_share(dataset: Any, base: int | None, steps: int) -> int:
    if base is None:
        raise BranchoutError(
            "say how many classes are new with --novel-classes, or how many are not with --base-classes"
        )
    return max((len(dataset.train.classes) - base) // steps, 1)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise BranchoutError(f"--seeds takes numbers separated by commas, such as 1,2,3; found {text!r}") from None
    if min(numbers) < 0:
        raise BranchoutError(f"--seeds takes numbers from 0 on; found {text!r}")
    if len(set(numbers)) < len(numbers):
        raise BranchoutError(f"--seeds names a seed twice, which would make the spread too small; found {text!r}")
    return numbers


def _known(what: str, name: str | None, names: Iterable[str]) -> None:
    if name is not None and name not in names:
        raise unknown(what, name, names)


def _make_folder(out: Path) -> None:
    from branchout.files import check_output

    check_output(out / "row.json")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BranchoutError(f"{out} cannot be made: {error.strerror}; name another folder with --out") from None


@contextmanager
def _executor(workers: int, dask: str | None) -> Iterator[tuple[Any, int]]:
    """Whoever runs jobs elsewhere, and how many it runs at once."""
    if dask is None:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                yield pool, workers
            except KeyboardInterrupt:
                # They would go on to the end of their rows. What they have not written is simply missing.
                for process in list((pool._processes or {}).values()):
                    process.terminate()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return
    try:
        from distributed import Client
    except ImportError:
        raise BranchoutError("--dask needs the extra 'cluster': pip install 'branchout[cluster]'") from None
    try:
        client = Client(dask, timeout=10)
    except OSError as error:
        raise BranchoutError(f"no Dask scheduler answers at {dask}: {error}") from None
    with client, client.get_executor() as cluster:
        yield cluster, len(client.ncores())  # workers; one has several threads, and runs one job at a time


def _tell(done: Any) -> None:
    if done.why_not:
        say(f"{done.job.method}: {done.why_not}", "left out:")


def _show(jobs: list[Any]) -> None:
    """The rows of these jobs as one table."""
    from branchout.bench.rows import number
    from branchout.bench.runner import read_row

    rows = {job: [read_row(path) for path in job.files().values()] for job in jobs}
    if not rows:
        return
    first = rows[jobs[0]][0]
    many = first["steps"] > 1
    title = (
        f"{jobs[0].table} on {first['dataset']}, {first['arch']}: {first['base_classes']} + {first['novel_classes']}"
    )
    short = {"incremental": "all*", "avg_steps": "avg*"}
    found = {
        name for each in rows.values() for row in each for name, value in row["metrics"].items() if value is not None
    }
    metrics = [name for name in METRICS if name in found]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("method", overflow="fold")  # the only one that gives way where the window is narrow
    for heading in (*(short.get(name, name) for name in metrics), "+M", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for job, points in rows.items():
        named = points[0]["point"] in ("plain", "alone")  # a point that needs no name: it is the method as it stands
        if not named:
            table.add_row(job.method)
        for place, row in enumerate(points):
            name = job.method if named and place == 0 else f"  {row['point']}"
            values = [row["metrics"].get(metric) for metric in metrics]
            figures = [number(value) for value in values]
            before = row.get("base_parameters")  # which older rows do not tell
            more = "–" if before is None else f"{(row['parameters'] - before) / 1e6:.2f}"
            table.add_row(Text(name), *figures, more, f"{sum(row['seconds'].values()):.0f}")
    console.print(Text(title, style="italic"), table, sep="\n")
    starred = "; *: mean over all steps" if many else ""
    say(f"+M: millions of parameters beside the base's, heads apart; s: seconds of training{starred}")
    say(f"rows are in {jobs[0].folder}")
