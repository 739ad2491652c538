"""The one base of every error that pin_jobs raises on purpose."""


class PinJobsError(Exception):
    """An error whose message says in one line what is wrong, where, and what to do about it.

    Messages never carry a password, a token or a database URL.
    """
