"""The one kind of error a user is meant to read."""


class BranchoutError(Exception):
    """Something the user can mend.

    The message says what was found, what was expected and, where there is one, what to type next. The command line
    prints it without a traceback and exits with status 1.
    """


class DoesNotApply(BranchoutError):  # noqa: N818 – not a fault
    """A method whose idea does not fit what it was given, such as adapters for a transformer and a ResNet."""
