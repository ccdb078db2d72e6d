"""The one exception for bad input, what an exception was made of, names that are alike, and text for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

#: Names that a line lists before it says how many more there are.
NAMED = 5


class ConfigurationError(Exception):
    """Bad input from the user: a config value, a file, a data set.

    The message is for the user and complete by itself: what was given, what was expected, and what
    to do. The command line prints it as one line and exits with status 2, without a traceback.
    Raise it before any training starts. It is no ValueError, which argument parsers catch and wrap.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was made of, the last first; each once, also where they go in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def printable(said: str, kept: str = "") -> str:
    """Return text of others without characters that would steer a terminal.

    Args:
        said: the text.
        kept: further characters to keep, such as the end of a line.
    """
    return "".join(each if each.isprintable() or each in kept else "\N{REPLACEMENT CHARACTER}" for each in said)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(like: Iterable[str]) -> str:
    """Return ``" (did you mean a or b?)"``, to stand behind a name that there is not; nothing where none is like it."""
    found = " or ".join(like)
    return f" (did you mean {found}?)" if found else ""


def no_such(what: str, given: str, known: Iterable[str]) -> str:
    """Say that there is no command, or something else, of a name, with what is like it and all that there is.

    Args:
        what: it should be, in one word.
        given: the name.
        known: names that there are.
    """
    names = list(known)
    like = did_you_mean(get_close_matches(given[:100], names))
    return f"there is no {what} {given[:100]!r}{like}; {what}s are {', '.join(names)}"
