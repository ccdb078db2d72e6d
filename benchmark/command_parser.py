"""Command lines: a misspelled command is told in one line, and a missing one with those that there are."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from benchmark.errors import ConfigurationError, no_such


def without_command(parser: argparse.ArgumentParser) -> ConfigurationError:
    """List a program's commands on standard error, and return what to raise where none is given."""
    parser.print_help(sys.stderr)
    return ConfigurationError("no command is given; it is one of those above")


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
