"""Errors meant for people: what was expected, what was found, what to change."""


class UserError(ValueError):
    """A mistake in the config, the data or the command line.

    The message names the key, file, line or id and says what to change. The command
    line prints it without a traceback and ends with exit code 2.
    """


class ConfigError(UserError):
    """A config key that is unknown, has the wrong type or an impossible value."""


class DataError(UserError):
    """Input data that can't be used: names the file, the line and the cause."""


class CheckpointError(UserError):
    """A model or training checkpoint that is missing, damaged or does not fit."""


class WorkdirError(UserError):
    """A run folder that can't be written, is in use, or belongs to another config."""


class PlanError(UserError):
    """A selection plan or schedule that is impossible or belongs to other data."""
