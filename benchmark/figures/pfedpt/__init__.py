"""The figures of the pFedPT paper."""

from benchmark.errors import ConfigurationError, no_such

#: Their names, which are checked before what draws them is imported.
NAMES = tuple(f"pfedpt_fig{number}" for number in (4, 5, 6, 8, 9, 10, 11))


def check_figure(name: str) -> None:
    """Refuse a name that is no figure's.

    Raises:
        ConfigurationError: as it says.
    """
    if name not in NAMES:
        raise ConfigurationError(no_such("figure", name, NAMES))
