"""The one exception for bad input."""


class ConfigurationError(Exception):
    """Bad input from the user: a config value, a file, a data set.

    The message is for the user and complete by itself: what was given, what was expected, and what
    to do. The command line prints it as one line and exits with status 2, without a traceback.
    Raise it before any training starts. It is no ValueError, which argument parsers catch and wrap.
    """
