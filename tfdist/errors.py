"""The two kinds of failure a command tells apart by its exit code."""


class UserError(Exception):
    """The input or the environment is wrong: one line, exit code 2, no traceback.

    The message says what is wrong, what was received, and what to change.
    """


class TrainingError(Exception):
    """Training itself failed (a loss that is not finite, say): exit code 1."""
