"""A model that predicts, and that can be extended, tuned, evaluated, reported on and exported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import warn as warn_python

from branchout.api.predictor import Image, Predictor, Several, is_one_image, picture_of, some_of
from branchout.api.sources import Source, Sources, samples_in, test_samples
from branchout.data.folders import images_in, unlabelled_images
from branchout.data.preprocess import Picture
from branchout.data.problems import Problems
from branchout.disk_cache import cache_folder
from branchout.errors import BranchoutError, no_operating_points, some
from branchout.evaluate.compare import Comparison, check_classes, compare
from branchout.evaluate.two_fold import Scored, score_dial, stratified_halves
from branchout.files import write_text
from branchout.labels import almost_known
from branchout.method.choose import apply_point, balanced_biases
from branchout.method.compact import CompactConfig
from branchout.method.config import ExtendConfig
from branchout.method.extend import Extension
from branchout.method.frontier import Frontier, check_measurable
from branchout.method.recipes import recipe_named
from branchout.method.results import Extended
from branchout.method.running.effort import Plan, check_head_alone
from branchout.method.running.engine import engine_for, use_engine
from branchout.method.running.plan import keep_plan, kept_plan, make_plan
from branchout.method.running.prepared_extension import Prepared, now
from branchout.method.split import DataSplit
from branchout.model import checkpoint, hub
from branchout.model.staged import branch_point
from branchout.progress import OnProgress, silent
from branchout.report import page as reports
from branchout.report.data import ReportData, collect
from branchout.report.other_methods import read_results
from branchout.training import processes
from branchout.training.progress_file import recorded
from branchout.training.work_folder import check_out, working_on
from branchout.units import count

if TYPE_CHECKING:
    from branchout.api.compaction import CompactionOutcome
    from branchout.export import Exported


def as_python_warning(message: str) -> None:
    """Warn at the line of the user's program that called into this package."""
    if not processes.is_main():
        return
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__.partition(".")[0]:
        level, frame = level + 1, frame.f_back
    warn_python(message, stacklevel=level)


class Model(Predictor):
    """A classifier that predicts, and that can be extended and tuned."""

    validation: Comparison | None = None
    """The accuracy on validation images, after `pretrain` in this process."""
    outcome: Extended | None = None
    """What `extend` trained and measured, after it ran in this process."""
    compaction: CompactionOutcome | None = None
    """What `compact` made of which model, after it ran in this process."""

    @property
    def frontier(self) -> Frontier:
        """The operating points of the last step."""
        if not self.saved.step_points:
            raise no_operating_points(self.folder)
        return Frontier.from_dict(self.saved.step_points[-1].frontier)

    def bytes_on_disk(self) -> int:
        """The size of all weights, as saved or as they would be."""
        files = [] if self.folder is None else list(self.folder.glob("*.safetensors"))
        return sum(file.stat().st_size for file in files) or checkpoint.weight_bytes(self.saved)

    def save(self, out: str | Path, *, half: bool = False) -> Model:
        if processes.is_main():
            checkpoint.save(self.saved, Path(out), source=self.folder, half=half)
        self.folder = Path(out)
        return self

    # Choosing an operating point.

    def tune(self, goal: str) -> Mapping[str, float | None]:
        """Choose the best operating point for a goal, without training; saved if the model lies in a folder.

        Returns the point's accuracies on the images that it was chosen with.
        """
        point = self.frontier.choose(goal)
        *earlier, last = self.saved.step_points
        self.saved = replace(self.saved, step_points=(*earlier, replace(last, point=point, goal=goal)))
        apply_point(self.classifier, self.saved.step_points[-1])
        if self.folder is not None:
            checkpoint.rewrite(self.saved, self.folder)
        return self.frontier.at(point)

    # Measuring.

    def evaluate(self, test: Source, *, flip: bool = False, on_progress: OnProgress = silent) -> Comparison:
        """Before and after the last step, on labelled images of known classes."""
        samples = test_samples(test)
        check_classes(samples.classes, self.classifier.space)
        self._check_flip(flip)
        labels = samples.labels_in(self.classifier.space)
        use_engine(self.classifier, engine_for(self.classifier, self.device, len(samples) * (1 + flip)))
        try:
            return compare(
                self.classifier, self._before(), self._images(samples), labels, flip=flip, on_progress=on_progress
            )
        finally:
            self.classifier.engine = None

    def two_fold(self, comparison: Comparison, goal: str = "balanced", seed: int = 0) -> Scored:
        """The two-fold score of a goal: b is chosen on one half of the images and measured on the other, then the
        reverse. `seed` draws the halves."""
        if self.frontier.kind == "grid":
            raise BranchoutError("Two-fold scores need a model with a dial; this one chooses among trained points")
        first, second = (
            (comparison.columns[half], comparison.labels[half]) for half in stratified_halves(comparison.labels, seed)
        )
        return score_dial(first, second, comparison.space, [goal], self.classifier.fused.pooler.kind)[goal]

    # Sharing.

    def export(self, out: str | Path, *, flip: bool = False, verify: Image | Several | None = None) -> Exported:
        """Write the model as one ONNX file, after checking that it predicts as the model does.

        It is checked with images that come with the installation, or with those of `verify`: a folder, or images.
        """
        from branchout.export import built_in_pictures, export_onnx

        if verify is None:
            pictures: Iterable[Picture] = built_in_pictures(self.classifier.kind)
        elif isinstance(verify, str | PathLike):
            pictures = map(picture_of, some_of(images_in(Path(verify))))
        elif is_one_image(verify):
            pictures = [picture_of(verify)]
        else:
            pictures = map(picture_of, verify)
        return export_onnx(self.saved, Path(out), pictures, flip=flip)

    def push(self, name: str, *, private: bool = False) -> str:
        """Push the saved folder to the Hugging Face hub as `name` (owner/name). Returns the page's address."""
        if self.folder is None:
            raise BranchoutError("Only a saved model can be pushed. Save it first: model.save('v2/')")
        return hub.push(self.folder, name, private=private)

    # Reporting.

    def report_data(
        self,
        test: Source | None = None,
        *,
        results: str | Path | None = None,
        gallery: int = 60,
        model_path: str | None = None,
        on_progress: OnProgress = silent,
    ) -> ReportData:
        """Everything that a report shows; `.to_dict()` gives it as JSON-able data.

        `results` is a folder of results of other methods; `model_path` is how commands on the page name the model.
        """
        return collect(
            self.saved,
            None if test is None else test_samples(test),
            path=model_path or str(self.folder or "MODEL"),
            made=now()[:10],
            folder=self.folder,
            others=None if results is None else read_results(Path(results), self.classifier.space),
            gallery=gallery,
            device=self.device,
            cache=cache_folder(),
            on_progress=on_progress,
        )

    def report(
        self,
        test: Source | None = None,
        *,
        out: str | Path | None = None,
        results: str | Path | None = None,
        gallery: int = 60,
        model_path: str | None = None,
        on_progress: OnProgress = silent,
    ) -> Path:
        """Write one HTML file about what was added, gained and lost; by default beside the model: v2-report.html."""
        if out is None and self.folder is None:
            raise BranchoutError("This model is not saved, so its report needs a name: out='report.html'")
        page = reports.check_report(reports.default_path(self.folder) if out is None else Path(out))  # type: ignore[arg-type]
        data = self.report_data(test, results=results, gallery=gallery, model_path=model_path, on_progress=on_progress)
        write_text(page, reports.render(data))
        return page

    # Extending.

    def prepare(
        self,
        new: Source,
        *,
        memory: Sources | None = None,
        val: Source | None = None,
        config: ExtendConfig = ExtendConfig(),  # noqa: B008 – frozen
        classes_from: str | None = None,
        on_progress: OnProgress = silent,
    ) -> Prepared:
        """Check the settings against this model, read the images and divide them into train, dev and test."""
        base = self.classifier
        branch_point(base.backbone, config.where)
        check_head_alone(base, config)
        pooler = base.fused.pooler.kind
        if config.pooler not in (None, pooler):
            if base.steps:
                raise BranchoutError(f"This model pools with {pooler!r}, which its first step has set. Omit --pooler")
            base = base.rebuilt((), config.pooler).to(self.device)
        warnings: list[str] = []
        kept, fresh, held = (
            None if source is None else samples_in(source, warnings, self.classes, classes_from, on_progress)
            for source in (memory, new, val)
        )
        assert fresh is not None
        added = {name for step in base.steps for name in step.names}
        lost = sorted(added - set(fresh.classes) - set(() if kept is None else kept.classes))
        if lost:
            classes = count(len(lost), "class", "classes")
            warnings.append(f"--memory has no images for {classes} added earlier, which may be forgotten: {some(lost)}")
        near = almost_known(fresh.classes, self.classes)
        if near:
            names = some(f"{new_name} / {old_name}" for new_name, old_name in near)
            warnings.append(f"almost the name of an old class: {names}. If both are one class, use the old name")
        split = DataSplit.of(base.space, fresh, kept, held, config.seed)
        choosing = split.classes_that_choose(base.space, dial=recipe_named(config.recipe).dial)
        check_measurable(config.goal, base.space.extend(fresh.classes), choosing)
        warnings += split.notices
        return Prepared(base, split, config, tuple(warnings))

    def extend(
        self,
        new: Source,
        *,
        memory: Sources | None = None,
        val: Source | None = None,
        out: str | Path | None = None,
        branch: str | None = None,
        goal: str = "balanced",
        recipe: str = "branchout",
        fuse: bool = False,
        pooler: str | None = None,
        classes_from: str | None = None,
        exemplars: int = 10,
        epochs: int | None = None,
        views: int | None = None,
        minutes: float | None = None,
        memory_limit: float | None = None,
        seed: int = 0,
        on_progress: OnProgress = silent,
        announce: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = as_python_warning,
    ) -> Model:
        """A new model that also knows the classes of `new`; the settings are those of `ExtendConfig`.

        With `out` the model is saved there, and a run that was stopped resumes when it is called again. Before training
        starts, `warn` is called with problems of files and classes, and `announce` with the plan, in words.
        """
        config = ExtendConfig(
            recipe=recipe, branch=branch, goal=goal, fuse=fuse, exemplars=exemplars, epochs=epochs, views=views,
            seed=seed, pooler=pooler, minutes=minutes, memory_limit=memory_limit,
        )  # fmt: skip
        place = check_out(out, (new, memory, val))
        prepared = self.prepare(
            new, memory=memory, val=val, config=config, classes_from=classes_from, on_progress=on_progress
        )
        for line in prepared.warnings:
            warn(line)
        return self.extend_prepared(prepared, out=place, on_progress=on_progress, announce=announce)

    def extend_prepared(
        self,
        prepared: Prepared,
        *,
        out: str | Path | None = None,
        plan: Plan | None = None,
        on_progress: OnProgress = silent,
        announce: Callable[[str], None] = lambda _: None,
    ) -> Model:
        """Train what `prepare` checked, by `plan` or by one that is made for this machine.

        `announce` is called with the plan, in words, before training starts.
        """
        out = None if out is None else Path(out)
        points = self.saved.step_points
        with working_on(out, prepared.settings()) as work:
            with recorded(work, on_progress) as reported:
                plan = processes.from_main(plan or self._plan(prepared, work, reported))
                assert plan is not None
                for line in plan.lines():
                    announce(line)
                outcome = Extension(
                    prepared.base,
                    prepared.split,
                    prepared.config,
                    device=self.device,
                    plan=plan,
                    work=work,
                    cache=cache_folder(),
                    earlier_biases=balanced_biases(points[-1], len(points)) if points else None,
                    on_progress=reported,
                ).run()
            classifier = outcome.model.rebuilt(outcome.model.steps).to(self.device)
            grown = self.saved.extended(classifier, outcome.points, prepared.event(outcome, plan))
            if out is not None and processes.is_main():
                checkpoint.save(grown, out, source=self.folder)
        model = Model(grown, out, self.device)
        model.outcome = outcome
        return model

    def _plan(self, prepared: Prepared, work: Path | None, on_progress: OnProgress) -> Plan | None:
        """What to train; None in all processes but the first, which rests it on measured times."""
        if not processes.is_main():
            return None
        with processes.independent():
            plan = kept_plan(work)
            if plan is None:
                plan = make_plan(prepared.base, prepared.split, prepared.config, self.device, on_progress=on_progress)
                keep_plan(work, plan)
        return plan

    def compact(
        self,
        memory: Sources,
        *,
        out: str | Path | None = None,
        branches: int = 1,
        val: Source | None = None,
        images: str | Path | None = None,
        epochs: int | None = None,
        classes_from: str | None = None,
        seed: int = 0,
        on_progress: OnProgress = silent,
        announce: Callable[[str], None] | None = None,
        warn: Callable[[str], None] = as_python_warning,
    ) -> Model:
        """A smaller model: the branches of all steps distilled into `branches` of them; `.compaction` compares both.

        It learns from labelled images of all classes in `memory`, and from the unlabelled ones below the folder
        `images`. With `out` the model is saved there, and a run that was stopped resumes when it is called again.
        Before training starts, `warn` is called with what is wrong with the images, and `announce` with what will be
        done, in words.
        """
        from branchout.api.compaction import compact

        config = CompactConfig(branches, epochs, seed)
        place = check_out(out, (memory, val, images))
        problems: list[str] = []
        unlabelled, unread = (None, Problems()) if images is None else unlabelled_images(Path(images))
        problems += [f"{images}: {line}" for line in unread.summary()]
        kept = samples_in(memory, problems, self.classes, classes_from, on_progress)
        held = None if val is None else samples_in(val, problems, self.classes, classes_from, on_progress)
        for problem in problems:
            warn(problem)
        made = compact(
            self,
            kept,
            config,
            val=held,
            unlabelled=unlabelled,
            out=place,
            on_progress=on_progress,
            announce=announce,
            warn=warn,
        )
        model = Model(made.saved, place, self.device)
        model.compaction = replace(made, warnings=(*problems, *made.warnings))
        return model
