"""Paths as their users write them: of files and folders, and the folder in which a command is given."""

import errno
import os
from pathlib import Path

from benchmark.errors import ConfigurationError


def user_path(given: str | Path) -> Path:
    """A path that a user gave, with ``~`` as the home folder; there need be nothing at it.

    Raises:
        ConfigurationError: no file can have it: ``~`` of an unknown user, too long a name, a NUL in it, or no UTF-8.
    """
    shown = repr(str(given)[:60])[1:-1] + (f"... ({len(str(given)):,} characters)" if len(str(given)) > 60 else "")
    try:
        str(given).encode()  # what a file with it in it, and a terminal, could not show
        path = Path(given).expanduser()
        os.lstat(path)
    except RuntimeError as error:
        raise ConfigurationError(f"{shown}: this machine has no user of this name; write the whole path") from error
    except ValueError as error:
        said = "it is no UTF-8" if isinstance(error, UnicodeError) else error
        raise ConfigurationError(f"{shown}: no file can have this name ({said}); give another path") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigurationError(f"{shown}: no file can have so long a name; give another path") from error
    return path


def check_present_folder() -> None:
    """Refuse to work in a folder that is not there any more.

    Raises:
        ConfigurationError: it was removed.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the present folder was removed; change to one that is there (cd) first") from error
