"""The command line of ``benchmark``, which tells a misspelled command in one line."""

import argparse
from collections.abc import Mapping, Sequence

from benchmark.errors import ConfigurationError, no_such


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
            raise ConfigurationError(no_such("command", arguments[0], self.commands))
