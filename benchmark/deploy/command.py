"""``benchmark deploy``: its options, and what it prints."""

import argparse
from typing import Any

from benchmark.deploy.app import check_flower, check_folder, write_app
from benchmark.paths import user_path


def app(arguments: argparse.Namespace) -> int:
    """Write a Flower app of a configuration: a server and clients on machines of their own."""
    check_flower()
    check_folder(arguments.folder)
    from benchmark.deploy.agreement import Agreement
    from benchmark.run.cli import prepare_process

    prepare_process()
    agreement = Agreement.of([f"--config={arguments.config}", *arguments.options])
    write_app(agreement, arguments.folder)
    print(f"written: {arguments.folder}; clients: {', '.join(agreement.client_names)}")
    print(f"next: see docs/deployment.md, or `flwr run {arguments.folder}`")
    return 0


def add_commands(commands: Any) -> None:
    """Add the command to those of ``benchmark``."""
    entry = commands.add_parser("deploy", help=app.__doc__, description=app.__doc__)
    below = entry.add_subparsers(dest="what", required=True, metavar="WHAT")
    entry = below.add_parser("app", help=app.__doc__, description=app.__doc__)
    entry.add_argument("config", metavar="CONFIG", help="configuration file of a run, by path or name")
    entry.add_argument("folder", type=user_path, metavar="DIR", help="new folder of the app")
    entry.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="OPTION", help="of lightning-cli fit: --trainer.max_epochs=20"
    )
    entry.set_defaults(run=app)
