"""The one exception whose message is meant for the person who ran the command."""


class UserError(Exception):
    """A mistake in the input: one sentence saying what, where, what was expected, what to do.

    Commands print it after `error:` and exit with code 2; nothing has been written by then.
    """
