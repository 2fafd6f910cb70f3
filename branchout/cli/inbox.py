"""New photos in a folder: list them in groups, name them, teach them to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branchout.cli import options
from branchout.cli.app import app, open_model, quoted, say, then, warn
from branchout.cli.display import progress
from branchout.cli.json_events import print_json
from branchout.errors import BranchoutError, printable
from branchout.units import count

if TYPE_CHECKING:
    from branchout.inbox.folder import Inbox, Photo
    from branchout.inbox.groups import Analysis
    from branchout.inbox.runs import Result, Run

SHOWN = 8
"""Files of a group that are printed."""


Named = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="WHICH=CLASS", help="Name a group (its number) or a photo (its file)."),
]
Dismissed = Annotated[list[str] | None, typer.Option("--dismiss", metavar="WHICH", help="Dismiss a group or a photo.")]
Undone = Annotated[
    list[str] | None,
    typer.Option("--undo", metavar="WHICH", help="Undo what was decided about a group or a photo, or 'last'."),
]


@app.command(epilog="Example: branchout inbox photos/ --model v2/ --memory old_photos/")
def inbox(
    photos: Annotated[Path, typer.Argument(metavar="PHOTOS", help="A folder in which new photos arrive.")],
    model: Annotated[str | None, typer.Option(help="The model that predicts the photos, and is extended.")] = None,
    memory: options.Memory = None,
    test: Annotated[
        Path | None,
        typer.Option(
            help="Labelled images of known classes for the threshold and before → after; better than --memory."
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Energy score above which a photo is unknown. Default: computed from known images."),
    ] = None,
    false_alarms: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=0.999, help="Share of known images that may count as unknown; saved for later calls."
        ),
    ] = None,
    classes_from: options.ClassesFrom = None,
    name: Named = None,
    dismiss: Dismissed = None,
    new_class: Annotated[
        bool, typer.Option("--new-class", help="Allow --name to add a class whose name is similar to a known one.")
    ] = False,
    undo: Undone = None,
    teach: Annotated[
        Path | None, typer.Option("--teach", metavar="OUT", help="Extend the model with all named photos.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run of --teach that was stopped.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Use the new model from now on.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Delete the new model; decisions are kept.")] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of --teach, if not the recipe's.")] = None,
    as_json: options.AsJson = False,
    device: options.Device = None,
) -> None:
    """Group new photos, name them, and extend the model with them.

    Without another option it lists the photos that fit no class, in groups. Decisions are small files in
    PHOTOS/.inbox; the photos stay as they are. The same on a page: branchout serve MODEL --inbox PHOTOS.
    """
    from branchout.inbox import runs
    from branchout.inbox.folder import Inbox

    box = Inbox(photos)
    if false_alarms is not None:
        box.set_false_alarms(false_alarms)
    given = {"memory": memory, "test": test, "classes-from": classes_from}
    teaching = "".join(f" --{option} {quoted(value)}" for option, value in given.items() if value is not None)
    with _naming_commands(box):
        if name or dismiss or undo:
            _decide(box, model, name or [], dismiss or [], undo or [], new_class, teaching)
        if teach is not None or resume:
            if teach is not None and model is None:
                raise BranchoutError("--teach extends a model. Name it: --model v2/")
            new = teach and runs.plan(box, model or "", teach, memory, epochs, classes_from, test)
            _teach(box, new or _open_run(box), device)
        elif accept or discard:
            run = _open_run(box)
            _finish(box, runs.accept(run) if accept else runs.discard(run), memory)
        elif not (name or dismiss or undo):
            _list(box, model, test or memory, threshold, classes_from, as_json, device, teaching)


@contextmanager
def _naming_commands(box: Inbox) -> Iterator[None]:
    """Where a run must be decided about first, add what to type."""
    from branchout.inbox.runs import UndecidedRunError

    try:
        yield
    except UndecidedRunError as error:
        typed = " or: ".join(_for_run(box, error.run))
        raise BranchoutError(f"{error} Type: {typed}" if typed else str(error)) from None


def _for_run(box: Inbox, run: Run) -> list[str]:
    """The commands that are possible for the open run."""
    here = f"branchout inbox {quoted(box.folder)}"
    after = {"finished": [f"{here} --accept", f"{here} --discard"], "running": []}
    return after.get(run.state(), [f"{here} --resume", f"{here} --discard"])


def _list(
    box: Inbox,
    model: str | None,
    known: Path | None,
    threshold: float | None,
    classes_from: str | None,
    as_json: bool,
    device: str | None,
    teaching: str,
) -> None:
    """Print the groups; `teaching` are the options given, for the command that is suggested."""
    from branchout.inbox.analysis import Analyzer
    from branchout.inbox.runs import live_model, taught

    live = live_model(box)
    model = model or live
    if model is None:
        raise BranchoutError(f"No model was given. Type: branchout inbox {quoted(box.folder)} --model MODEL")
    opened = open_model(model, device=device)
    done = taught(box, opened.classes)
    with progress(quiet=as_json) as on_progress:
        analyzer = Analyzer.of(opened, known, threshold, classes_from=classes_from, on_progress=on_progress)
        found = analyzer.analyze(
            box, [photo for photo in box.photos() if photo.id not in done], on_progress=on_progress
        )
    found.save(box)
    if as_json:
        decided = {each.file: each.name for each in box.decisions().values()}
        print_json({**found.model_dump(), "decisions": decided})
        return
    if live is not None and Path(live) != Path(model).absolute():
        say(f"These photos were last taught to {live}", "note:")
    _show(box, found)
    _suggest(box, found, model, teaching)


def _show(box: Inbox, found: Analysis) -> None:
    decisions = box.decisions()
    files = {each.photo: each for each in found.photos}
    source = "as given"
    if found.false_alarms is not None:
        source = f"which {100 * found.false_alarms:.3g}% of {found.known_images:,} known images exceed"
    unknown = sum(map(len, found.groups))
    photos = count(len(found.photos), "photo")
    say(f"{photos}; fitting no class: {unknown:,} (score above {found.threshold:.3f}, {source})")
    for number, members in enumerate(found.groups, 1):
        names = [printable(files[photo].file) for photo in members if photo not in decisions]
        decided = len(members) - len(names)
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        say(
            f"group {number}: {shown}"
            + (f" ({decided} decided)" if decided and names else "decided" if decided else "")
        )
    for each in found.fitting:
        if each.photo not in decisions:
            say(f"{printable(each.file)}: {each.answer} {100 * each.probability:.1f}%")
    for file, reason in found.unreadable.items():
        say(f"{printable(file)}: {reason}", "left out:")


def _suggest(box: Inbox, found: Analysis | None, model: str | None, teaching: str) -> None:
    """Commands for what is undecided in the list `found`, named and not yet taught, or taught and not yet accepted."""
    from branchout.inbox.runs import known_classes, open_run, ready

    here = f"branchout inbox {quoted(box.folder)}"
    run = open_run(box)
    if run is not None:
        commands = _for_run(box, run)
    else:
        commands = [f"{here} {words}" for words in ([] if found is None else _undecided(box, found))]
        if ready(box, set(found.classes) if found else known_classes(model))[0]:
            memory = "" if "--memory" in teaching else " --memory OLD/"
            commands.append(f"{here} --model {quoted(model) if model else 'MODEL'}{memory}{teaching} --teach OUT")
    if commands:
        then(*commands)


def _undecided(box: Inbox, found: Analysis) -> list[str]:
    """Options that decide about groups, or else photos, of a list that are not decided about."""
    undecided = {photo.id for photo in box.photos()} - box.decisions().keys()
    groups = [n for n, members in enumerate(found.groups, 1) if undecided & set(members)]
    if groups:
        return [f"--name {groups[0]}=CLASS" + "".join(f" --dismiss {n}" for n in groups[1:2])]
    photos = [each.file for each in found.fitting if each.photo in undecided]
    return [f"--name {quoted(photos[0])}=CLASS"] if photos else []


def _decide(
    box: Inbox,
    model: str | None,
    names: list[str],
    dismissed: list[str],
    undone: list[str],
    new_class: bool,
    teaching: str,
) -> None:
    from branchout.inbox.folder import class_name
    from branchout.inbox.groups import has_list, listed
    from branchout.inbox.runs import FEWEST, check_free, known_classes, live_model, ready

    model = model or live_model(box)
    known = known_classes(model)
    named = [_split(box, words) for words in names]
    named = [(photos, class_name(name)) for photos, name in named]
    if not new_class:
        _check_similar(box, known, [name for _, name in named])
    dropped = [_photos(box, which) for which in dismissed]
    reopened = [_photos(box, which, decided=True) for which in undone]  # all are checked before any is written
    check_free(box, [photo for photos in (*(p for p, _ in named), *dropped, *reopened) for photo in photos], known)
    for photos, name in named:
        box.decide(photos, name)
        say(f"{name}: {_counted(photos)}")
    for photos in dropped:
        box.decide(photos, None)
        say(f"dismissed: {_counted(photos)}")
    for photos in reopened:
        box.undo(photos)
        say(f"undone: {_counted(photos)}")
    _, waiting = ready(box, known)
    for name, found in waiting.items():
        say(f"{name} has {len(found)} photo{'s' if len(found) > 1 else ''}; it can be taught once it has {FEWEST}")
    _suggest(box, listed(box) if has_list(box) else None, model, teaching)


def _check_similar(box: Inbox, known: set[str] | None, names: list[str]) -> None:
    """Refuse a new class that differs from one of the model, or of other photos, in case or spaces alone."""
    from branchout.inbox.folder import similar
    from branchout.inbox.groups import has_list, listed

    here = {each.name for each in box.decisions().values() if each.name is not None}
    here |= known or set(listed(box).classes if has_list(box) else ())
    for name in names:
        here |= {name} if similar(name, here) is None else set()
        if name not in here and (meant := similar(name, here)):
            raise BranchoutError(
                f"{name!r} differs from the class {meant!r} only in case or spaces. Did you mean {meant}? "
                "For a class of its own add --new-class."
            )


def _counted(photos: list[Photo]) -> str:
    return printable(photos[0].file) if len(photos) == 1 else f"{len(photos)} photos"


def _split(box: Inbox, words: str) -> tuple[list[Photo], str]:
    """The photos and the class of WHICH=CLASS; both may contain an equals sign."""
    places = [n for n, letter in enumerate(words) if letter == "="]
    if not places:
        raise BranchoutError(f"--name {words!r} names no class. Type --name 1=robin, or --name IMG_1.jpg=robin")
    for place in places[1:]:
        if words[:place] in {photo.file for photo in box.photos()}:
            return _photos(box, words[:place]), words[place + 1 :]
    return _photos(box, words[: places[0]]), words[places[0] + 1 :]


def _photos(box: Inbox, which: str, *, decided: bool = False) -> list[Photo]:
    """The photo of a file name, or the undecided (or `decided`) photos of a group of the last list, by its number."""
    from branchout.inbox.groups import listed
    from branchout.inbox.runs import last_decision

    photos = {photo.id: photo for photo in box.photos()}
    if decided and which == "last":
        last = [photos[each.photo] for each in last_decision(box) if each.photo in photos]
        if not last:
            raise BranchoutError("There is no decision to undo.")
        return last
    file = which.removeprefix(f"{box.folder}/")
    found = [photo for photo in photos.values() if photo.file == file]
    if found:
        return found
    if not which.isdecimal():
        raise BranchoutError(f"There is no photo {which!r} in {box.folder}. Give a file in it, or a group's number.")
    groups = listed(box).groups
    if not 1 <= int(which) <= len(groups):
        raise BranchoutError(f"There is no group {which}; the last list has {len(groups)}.")
    members = [photos[photo] for photo in groups[int(which) - 1] if photo in photos]
    decisions = box.decisions()
    return [photo for photo in members if (photo.id in decisions) == decided] or members


# Teaching.


def _open_run(box: Inbox) -> Run:
    from branchout.inbox.runs import open_run

    run = open_run(box)
    if run is None:
        raise BranchoutError("There is no finished or stopped run. Start one with --teach OUT")
    return run


def _teach(box: Inbox, run: Run, device: str | None) -> None:
    from branchout.inbox.teach import execute

    say(f"teaching {', '.join(f'{name} ({n})' for name, n in run.settings.classes.items())} into {run.out}")
    with progress() as on_progress:
        result = execute(run, device=device, on_progress=on_progress, note=warn)
    for line in (*result.warnings, *sentences(result)):
        say(line)
    here = f"branchout inbox {quoted(box.folder)}"
    then(f"{here} --accept", f"{here} --discard")


def sentences(result: Result) -> list[str]:
    """Before → after in words."""
    where = {"test": "the images of --test", "held-out": "images that did not train"}
    return [
        f"{result.photos_right} of the {result.photos} taught photos are classified correctly",
        *(f"on {where[part.on or result.measured_on]}: {part}" for part in result.parts),
        result.verdict(),
    ]


def _finish(box: Inbox, run: Run, memory: Path | None) -> None:
    if run.settings.decision == "discarded":
        say(f"{run.out} was deleted; the decisions about its photos are kept")
        return
    out = quoted(run.out)
    taught, kept = len(run.settings.photos), memory or run.settings.memory
    say(f"{run.out} is used from now on; no longer listed, and kept as exemplars: {count(taught, 'photo')}")
    also = f" --memory {quoted(kept)}" if kept else ""
    then(
        f"branchout inbox {quoted(box.folder)} --model {out}{also}",
        f"branchout serve {out} --inbox {quoted(box.folder)}{also}",
    )
