"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake in a setting, file or field that the user can mend.

    The message is one line: it names the setting, file or field, what was expected and what to do. Programs print it
    without a traceback and exit with code 2 (`trainer.cli.run_program`).
    """
