"""The one kind of error a user is meant to read."""


class BranchoutError(Exception):
    """Something the user can mend.

    The message says what was found, what was expected and, where there is one, what to type next. The command line
    prints it without a traceback and exits with status 1.
    """
