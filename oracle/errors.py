"""Errors that a user can mend.  The command line prints their text as one line and exits with 2."""


class OracleError(ValueError):
    """Root of the errors below."""


class InputError(OracleError):
    """Something that the user named is missing, malformed or does not fit."""
