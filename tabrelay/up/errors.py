"""Why a stack did not start, in words for the person who started it."""


class CannotStart(Exception):
    """The stack can't be started as asked; the message is shown as it is."""
