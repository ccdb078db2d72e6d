"""The command line of ``benchmark``, which tells a misspelled command in one line."""

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from benchmark.errors import ConfigurationError


class CommandParser(argparse.ArgumentParser):
    """A parser whose first argument is a command.

    Attributes:
        commands: that there are, by name.
    """

    commands: Mapping[str, argparse.ArgumentParser] = {}

    def check_command(self, arguments: Sequence[str]) -> None:
        """Refuse a word in front that is no command.

        Raises:
            ConfigurationError: as it says.
        """
        if arguments and not arguments[0].startswith("-") and arguments[0] not in self.commands:
            given = arguments[0][:100]
            like = get_close_matches(given, self.commands)
            hint = f" (did you mean {' or '.join(like)}?)" if like else ""
            raise ConfigurationError(f"there is no command {given!r}{hint}; commands are {', '.join(self.commands)}")
