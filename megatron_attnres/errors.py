"""How commands end that cannot go on: what went wrong, and the exit status that says so."""

EXIT_STATUS_FAILED = 1
EXIT_STATUS_BAD_INPUT = 2
# Starting again as it is would fail again: somebody has to look.
EXIT_STATUS_GAVE_UP = 3


class InputError(ValueError):
    """A flag, configuration key or file that cannot be used.

    The message is a single line that names the flag or file, its value and what is allowed.
    Commands print it once and exit with status 2.
    """


class TrainingGaveUp(RuntimeError):
    """Training that goes wrong in a way that another start would not cure.

    The message is a single line. The command prints it once and exits with status 3.
    """


class JoinError(RuntimeError):
    """The ranks of a job did not find each other.

    The message is a single line. The command prints it once per host and exits with status 1.
    """


class LostRankError(RuntimeError):
    """Another rank of a job is gone, or answers no more.

    The message is a single line that names the rank which noticed. Commands print it and exit with
    status 1.
    """
