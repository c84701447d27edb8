"""The one exception that means "the input is wrong, not the program"."""

EXIT_STATUS_BAD_INPUT = 2


class InputError(ValueError):
    """A flag, configuration key or file that cannot be used.

    The message is a single line that names the flag or file, its value and what is allowed.
    Commands print it once and exit with status 2.
    """
