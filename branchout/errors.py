"""The one kind of error a user is meant to read."""

from collections.abc import Iterable


class BranchoutError(Exception):
    """Something the user can mend.

    The message says what was found, what was expected and, where there is one, what to type next. The command line
    prints it without a traceback and exits with status 1.
    """


class DoesNotApply(BranchoutError):  # noqa: N818 – not a fault
    """A method whose idea does not fit what it was given, such as adapters for a transformer and a ResNet."""


def unknown(what: str, name: str, known: Iterable[str]) -> BranchoutError:
    """The error for a name that is none of the known ones, with the nearest of them."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}? Known" if near else "; known"
    return BranchoutError(f"no {what} is called {name!r}{hint} are: {', '.join(names)}")
