"""What `branchout bench` was asked for, checked, and turned into jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from branchout.bench import tables
from branchout.bench.base_model import SavedBase, open_base
from branchout.bench.experiment import Experiment
from branchout.bench.job import Job
from branchout.bench.measure import starts_from_base, uses_seeds
from branchout.bench.methods import method_named
from branchout.bench.plan import Plan
from branchout.bench.rows import asked_seeds, command, outdated, rows_in
from branchout.data.datasets import Dataset
from branchout.data.samples import digest
from branchout.data.scenarios import CLUSTERED, NAMES
from branchout.errors import BranchoutError, unknown, whole_number
from branchout.model.architectures import ARCHITECTURES
from branchout.units import count

EXEMPLARS = "-exemplars"
"""With a number it ends the name of a table that is run with other exemplars than its own."""
OF_ROWS = {
    "scale": "at its own scale",
    "exemplars": "with its own number of exemplars",
    "memory_total": "with its own number of exemplars",
    "split": "with its own split",
    "width": "at its own width",
    "size": "at its own input size",
}
"""What rows that are measured again decide, so that it cannot be asked for as well."""


@dataclass(frozen=True)
class Request:
    """A table of the paper, or methods in a scenario: the options of `branchout bench`."""

    data: str
    out: Path
    seeds: tuple[int, ...] = (1, 2, 3)
    table: str | None = None
    methods: tuple[str, ...] = ()
    scenario: str | None = None
    base: str | None = None
    base_classes: int | None = None
    novel_classes: int | None = None
    overlap: int | None = None
    steps: int | None = None
    scale: str | None = None
    arch: str | None = None
    width: int | None = None
    size: int | None = None
    exemplars: int | None = None
    memory_total: int | None = None
    schedule: str | None = None
    faithful: bool = False
    epochs: int | None = None
    branch_epochs: int | None = None
    split: int | None = None
    all_seeds: bool = False
    stale: bool = False
    minutes: float | None = None

    def check(self) -> None:
        """Find contradictions and unknown names before anything is loaded."""
        choices = {self.table: self.table, "--scenario": self.scenario, "--stale": self.stale}
        given = [str(name) for name, chosen in choices.items() if chosen]
        if not given:
            raise BranchoutError(
                "name a table, or a scenario with --scenario, or remake outdated rows with --stale; "
                "branchout bench --list names them all"
            )
        if len(given) > 1:
            raise BranchoutError(
                f"{' and '.join(given)} were given, and only one of them can be measured; leave one out"
            )
        if self.minutes is not None and not self.stale:
            raise BranchoutError("--minutes needs --stale, because it uses the times in outdated rows")
        for name, own in OF_ROWS.items() if self.stale else ():
            if getattr(self, name) is not None:
                raise BranchoutError(f"--stale measures every row {own}; leave {_option(name)} out, or name a table")
        if self.faithful and self.schedule not in (None, "published"):
            raise BranchoutError(
                f"--faithful means --schedule published, and --schedule {self.schedule} was given; leave one out"
            )
        if not self.scenario and self.base:
            raise BranchoutError("--base needs --scenario; a table defines its own base")
        for name in ("base_classes", "novel_classes", "overlap", "steps") if not self.scenario else ():
            if getattr(self, name) is not None:
                raise BranchoutError(f"a table has sizes of its own, so {_option(name)} goes with --scenario only")
        if self.scenario and self.scale:
            raise BranchoutError("--scale is for tables; a scenario takes --base-classes and --novel-classes")
        if self.exemplars is not None and self.memory_total:
            raise BranchoutError("--memory-total replaces --exemplars; leave --exemplars out, or --memory-total")
        if self.split is not None:
            whole_number("--split", self.split, 0)
        for name in self.methods:
            method_named(name)
        for what, asked, known in (("scenario", self.scenario, NAMES), ("architecture", self.arch, ARCHITECTURES)):
            if asked is not None and asked not in known:
                raise unknown(what, asked, known)
        takers = [name for name in NAMES if name.startswith("overlap") and name != "overlap-full"]
        if self.scenario and self.overlap is not None and self.scenario not in takers:
            why = "all new classes are old ones" if self.scenario == "overlap-full" else "no class is both old and new"
            raise BranchoutError(f"--overlap goes with the scenarios {', '.join(takers)}; in '{self.scenario}' {why}")

    def jobs(self, dataset: Dataset) -> list[Job]:
        """One job for each method of each experiment."""
        if self.stale:
            return self._of_stale(dataset)
        return self._of_table(dataset) if self.table else self._of_scenario(dataset)

    @property
    def _changes(self) -> dict[str, Any]:
        """What the options change in any plan."""
        changes = {name: getattr(self, name) for name in ("arch", "width", "size", "exemplars", "split")}
        return {**changes, "total": self.memory_total}

    @property
    def _training(self) -> dict[str, Any]:
        schedule = "published" if self.faithful else self.schedule
        return {"schedule": schedule, "epochs": self.epochs, "branch_epochs": self.branch_epochs}

    def _of_stale(self, dataset: Dataset) -> list[Job]:
        """The jobs of all rows of a dataset that are marked as outdated and belong to a table, and with `all_seeds` of
        those with fewer seeds too; of the methods and the network that are named, if any are."""
        jobs: list[Job] = []
        if not self.out.is_dir():
            raise BranchoutError(f"there is no folder {self.out} with rows; give --out, or type this where results/ is")
        known = {table.experiment: table for table in (tables.tables() | tables.figures()).values()}
        rows = rows_in(self.out / dataset.name)
        for path, row in rows.items() if self.all_seeds else outdated(rows).items():
            experiment, _, exemplars = row["table"].partition(EXEMPLARS)
            name = tables.BY_BASE if experiment.startswith(tables.BY_BASE) else experiment
            method = method_named(path.stem.removesuffix(f"-{row['point']}")).name
            seeds = self._seeds_again(row, method)
            if not row.get("outdated") and seeds == asked_seeds(row):
                continue
            wanted = {method_named(each).name for each in self.methods} or {method}
            if name not in known or method not in wanted or self.arch not in (None, row["arch"]):
                continue
            own = {key: row["settings"].get(key) for key in ("split", "width", "size")}
            changes = {**self._changes, **self._training, **own, "arch": row["arch"]}
            changes["exemplars"] = int(exemplars) if exemplars else None
            changes["total"] = row["settings"].get("total")
            plans = tables.experiments_of(known[name], dataset, **changes)
            if experiment not in plans and not row.get("outdated"):
                continue
            if experiment not in plans:
                raise BranchoutError(
                    f"{path} is of {row['table']}, and '{dataset.name}' has {', '.join(plans)}; it was measured at "
                    "another scale: delete it, or measure it with its table and --scale"
                )
            own_seeds = replace(self, seeds=seeds, all_seeds=True)
            jobs += own_seeds.jobs_of(dataset, row["table"], plans[experiment], [method])
        return list(dict.fromkeys(jobs))

    def _seeds_again(self, row: Mapping[str, Any], method: str) -> tuple[int, ...]:
        """The seeds to measure a row with: its own, or with `all_seeds` those asked for, if they continue its own."""
        own = asked_seeds(row)
        continued = self.all_seeds and uses_seeds(method_named(method)) and own == self.seeds[: len(own)]
        return self.seeds if continued else own

    def _of_table(self, dataset: Dataset) -> list[Job]:
        every = tables.tables() | tables.figures()
        jobs: list[Job] = []
        for table in every.values() if self.table == "all" else [tables.table_named(self.table or "")]:
            networks = (
                (self.arch,)
                if self.arch
                else tables.networks_of(table, dataset.name, self.scale, self._training["schedule"])
            )
            for arch in networks:
                changes = {**self._changes, **self._training, "arch": arch}
                usual = tables.experiments_of(table, dataset, self.scale, **{**changes, "exemplars": None})
                for experiment, plan in tables.experiments_of(table, dataset, self.scale, **changes).items():
                    kept = "" if plan.exemplars == usual[experiment].exemplars else f"{EXEMPLARS}{plan.exemplars}"
                    jobs += self.jobs_of(dataset, experiment + kept, plan, self.methods or table.methods_for(plan.arch))
        return list(dict.fromkeys(jobs))  # tables share rows

    def _of_scenario(self, dataset: Dataset) -> list[Job]:
        assert self.scenario is not None
        if not self.methods:
            raise BranchoutError("name the methods to run with --method; branchout bench --list names them all")
        base = self._saved_base()
        base_classes = self.base_classes if base is None else len(base.classes)
        steps = self.steps or 1
        novel = self.novel_classes or _even_share(dataset, base_classes, steps)
        overlap = (5 if self.overlap is None else self.overlap) if self.scenario.startswith("overlap") else 0
        plan = tables.fitted_to(Plan(self.scenario, base_classes, novel, overlap, steps), dataset, **self._changes)
        experiment = f"{self.scenario}-{base_classes or 'rest'}+{f'{steps}x' if steps > 1 else ''}{novel}"
        if base is not None:
            plan = base.start(plan)
            experiment += f"-from-{Path(base.place).name}"
        return self.jobs_of(dataset, experiment, tables.scheduled(plan, **self._training), self.methods)

    def jobs_of(self, dataset: Dataset, experiment: str, plan: Plan, methods: Sequence[str]) -> list[Job]:
        """One job for each method."""
        images = digest(*("\n".join([*table.classes, *table.ids]) for table in (dataset.train, dataset.val)))
        # Workers may run elsewhere.
        out, data = self.out.absolute(), str(Path(self.data).absolute()) if Path(self.data).exists() else self.data
        jobs = []
        for method in map(method_named, methods):
            seeds = method.seeds(self.seeds, plan.steps, every=self.all_seeds)
            jobs.append(Job(data, dataset.name, experiment, plan, method.name, seeds, out, command(), images))
        return jobs

    def _saved_base(self) -> SavedBase | None:
        """The model that --base names; what it decides cannot be asked for as well."""
        if self.base is None:
            return None
        for name in ("arch", "width", "size", "base_classes"):
            if getattr(self, name) is not None:
                raise BranchoutError(f"the model given with --base decides {_option(name)}; leave one of the two out")
        return open_base(self.base)

    def drawable(self, dataset: Dataset) -> tuple[list[Job], list[str]]:
        """The jobs whose classes can be drawn from the dataset, and why others cannot.

        Only where all tables are asked for are those left out; otherwise they are an error.
        """
        jobs, reasons = self.jobs(dataset), dict[Plan, str]()
        for job in jobs:
            if job.plan not in reasons and job.missing():
                reasons[job.plan] = self._undrawable(job, dataset)
        found = [job for job in jobs if not reasons.get(job.plan)]
        told = list(dict.fromkeys(filter(None, reasons.values())))  # the networks of a table share one
        if told and (self.table != "all" or not found):
            raise BranchoutError(told[0])
        return found, told

    def _undrawable(self, job: Job, dataset: Dataset) -> str:
        plan = job.plan
        try:
            Experiment(_without_clusters(plan), dataset).scenario  # noqa: B018
        except BranchoutError as error:
            if self.table is None:
                return str(error)
            scale = self.scale or tables.scale_of(dataset)
            classes = (plan.base or 0) + plan.steps * plan.novel - plan.overlap
            if scale == tables.FITTED or classes <= len(dataset.train.classes):
                return f"{job.table}: {error}"
            fitted = f"with --scale {tables.FITTED} they fit the data"
            return f"{job.table}: {error}; those are the sizes of --scale {scale}, and {fitted}"
        return ""


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _even_share(dataset: Dataset, base: int | None, steps: int) -> int:
    if base is None:
        raise BranchoutError(
            "give the number of new classes with --novel-classes, or of base classes with --base-classes"
        )
    return max((len(dataset.train.classes) - base) // steps, 1)


def _without_clusters(plan: Plan) -> Plan:
    """A plan with the same classes that can be drawn before a network has clustered their samples."""
    if plan.model or plan.scenario not in CLUSTERED:
        return plan
    if plan.scenario == "overlap-full":
        return replace(plan, scenario="overlap-random-shuffled", overlap=plan.novel)
    return replace(plan, scenario=plan.scenario.replace("clustered", "shuffled"))


def summary(jobs: list[Job]) -> Iterator[str]:
    """A line for each experiment: what there is to measure, or that its rows exist."""
    by_plan: dict[tuple[str, Plan], list[Job]] = {}
    for job in jobs:
        by_plan.setdefault((job.table, job.plan), []).append(job)
    for (table, plan), asked in by_plan.items():
        missing = [job for job in asked if job.missing()]
        if not missing:
            rows = "the method has rows" if len(asked) == 1 else f"{len(asked)} methods have rows"
            yield f"{table}: {rows}, shown below and not measured again; to measure them again, use another --out"
            continue
        novel = f"{plan.steps} × {plan.novel}" if plan.steps > 1 else plan.novel
        needed = any(starts_from_base(method_named(job.method), plan) for job in missing)
        base = f"a {'base' if needed else 'network'} trained for {count(plan.pretraining.epochs, 'epoch')}"
        if needed and plan.model and plan.kept is None:
            base = "a saved base"
        yield (
            f"{table}: {plan.kept or plan.base or 'all other'} + {novel} classes, {plan.arch} at {plan.size} pixels, "
            f"{base}; {len(missing)} of {len(asked)} methods to run"
        )


def seed_numbers(text: str) -> tuple[int, ...]:
    """The numbers of `--seeds 1,2,3`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BranchoutError(f"--seeds takes numbers separated by commas, such as 1,2,3; found {text!r}") from None
    for number in numbers:
        whole_number("each of --seeds", number, 0)
    if len(set(numbers)) < len(numbers):
        raise BranchoutError(f"--seeds names a seed twice, which would make the spread too small; found {text!r}")
    return numbers
