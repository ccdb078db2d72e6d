"""``benchmark deploy``: its options, and what it prints."""

import argparse
import os
from pathlib import Path
from typing import Any

from benchmark.deploy.app import check_flower, check_folder, write_app
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path

SECURE = "the server sees the sum of a round's uploads, and none by itself"


def app(arguments: argparse.Namespace) -> int:
    """Write a Flower app of a configuration: a server and clients on machines of their own."""
    check_flower()
    check_folder(arguments.folder)
    from benchmark.deploy.agreement import Agreement
    from benchmark.run.cli import prepare_process

    prepare_process()
    agreement = Agreement.of([f"--config={arguments.config}", *arguments.options], arguments.secure_aggregation)
    write_app(agreement, arguments.folder)
    print(f"written: {arguments.folder}; clients: {', '.join(agreement.client_names)}")
    print(f"next: see docs/deployment.md, or `flwr run {arguments.folder}`")
    return 0


def local(arguments: argparse.Namespace) -> int:
    """Run a configuration as a deployment on this machine: a server and clients as processes of their own."""
    check_flower()
    from benchmark.deploy.agreement import Agreement, run_name
    from benchmark.deploy.local import LocalDeployment
    from benchmark.run.cli import prepare_process

    folder = arguments.folder.absolute()
    run_name(folder.name)
    prepare_process()
    options = [f"--config={arguments.config}", *arguments.options]
    agreement, split = Agreement.with_split(options, arguments.secure_aggregation)
    made = LocalDeployment(agreement, split, folder).run()
    print(f"record: {made}; models of clients: {folder}/client0 and so on, for `benchmark predict`")
    return 0


def keys(arguments: argparse.Namespace) -> int:
    """Make certificates and keys: of the server, and of each site."""
    check_flower()
    from benchmark.deploy.keys import CERTIFICATE, KEY, ROOT, write_keys

    write_keys(arguments.folder, arguments.host, arguments.sites)
    print(f"written: {arguments.folder}; {CERTIFICATE} and {KEY} are the server's; give each site {ROOT} and its .key")
    return 0


def server(arguments: argparse.Namespace) -> int:
    """Start Flower's server, on the machine where the federation's server is to be."""
    check_flower()
    from benchmark.deploy.keys import ROOT
    from benchmark.deploy.machines import address_of, connection, server_command

    command = server_command(arguments.host, arguments.port, arguments.keys)
    root = None if arguments.keys is None else arguments.keys / ROOT
    text = connection(address_of(arguments.host, arguments.port), root)
    print(f"for `flwr`, in ~/.flwr/config.toml of this machine:\n\n{text}", flush=True)
    return _run_or_print(command, arguments.show)


def client(arguments: argparse.Namespace) -> int:
    """Start a site: its images are read on this machine, and by nobody else."""
    check_flower()
    from benchmark.deploy.machines import client_command

    given = {"data": arguments.data, "data-dir": arguments.data_dir, "state": arguments.state}
    for name in ("data", "data-dir"):
        if given[name] is not None and not given[name].is_dir():
            raise ConfigurationError(f"--{name.replace('-', '_')}: {given[name]} is no folder")
    if (arguments.root is None) != (arguments.key is None):
        raise ConfigurationError("--root and --key belong together: the server's ca.pem and this site's own key")
    settings = {name: str(path.absolute()) for name, path in given.items() if path is not None}
    if arguments.secure_aggregation:
        settings["secure-aggregation"] = "only"
    if arguments.app is not None:
        _check_site(arguments.app, arguments.name, arguments.data, arguments.secure_aggregation)
    secured = None if arguments.key is None else (arguments.root.absolute(), arguments.key.absolute())
    command = client_command(arguments.name, arguments.server, secured, settings, arguments.port)
    return _run_or_print(command, arguments.show)


def messages(arguments: argparse.Namespace) -> int:
    """Measure the messages of methods as Flower sends them, in this process, beside the numbers that records count."""
    check_flower()
    from benchmark.deploy.message_sizes import all_methods, measured, write_table
    from benchmark.run.cli import prepare_process

    known = all_methods()
    if unknown := [name for name in arguments.methods if name not in known]:
        raise ConfigurationError(f"there is no method {unknown[0]!r:.100}; expected some of {', '.join(known)}")
    prepare_process()
    rows = []
    for row in measured(arguments.methods or known):
        rows.append(row)
        print(f"{row.method}: {row.refused or f'{row.bytes_down:,.0f} bytes down, {row.bytes_up:,.0f} up'}", flush=True)
    print(f"written: {write_table(rows, arguments.out)}")
    return 0


def _check_site(app_folder: Path, name: str, data: Path | None, secure: bool) -> None:
    """Compare what a site wants, its name and its images with the app, before anybody is asked.

    Raises:
        ConfigurationError: they are not of one federation.
    """
    import tomllib

    from benchmark.deploy.agreement import Agreement

    try:
        project = tomllib.loads((app_folder / "pyproject.toml").read_text())
        agreement = Agreement.read(project["tool"]["flwr"]["app"]["config"]["agreement"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--app: {app_folder} is no app of `benchmark deploy app`") from error
    if secure and not agreement.secure_aggregation:
        raise ConfigurationError(f"--secure_aggregation: {app_folder} has none; ask for an app that was made with it")
    if name not in agreement.client_names:
        raise ConfigurationError(f"--name: {name} is none of the clients {', '.join(agreement.client_names)}")
    if data is not None:
        from benchmark.predict.new_client import labelled_images

        for split in ("train", "test"):
            found = labelled_images(data / split, agreement.facts, agreement.client_names.index(name))
            print(f"{split}: {len(found.labels)} images")


def _run_or_print(command: list[str], show: bool) -> int:
    """Become a command of Flower's, or print it."""
    from benchmark.deploy.machines import shown

    if show:
        print(shown(command))
        return 0
    folder = Path(command[0]).parent  # Flower's programs start each other by name
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execve(command[0], command, {**os.environ, "PATH": path})


def _add_machines(below: Any) -> None:
    """Add the commands of keys, server and sites."""
    entry = below.add_parser("keys", help=keys.__doc__, description=keys.__doc__)
    entry.add_argument("folder", type=user_path, metavar="DIR", help="new folder of them")
    entry.add_argument("sites", nargs="+", metavar="SITE", help="names of the sites, such as those of the clients")
    entry.add_argument("--host", action="append", required=True, help="name or address of the server; may be repeated")
    entry.set_defaults(run=keys)

    entry = below.add_parser("server", help=server.__doc__, description=server.__doc__)
    entry.add_argument("--host", default="127.0.0.1", help="address to listen on, 0.0.0.0 for all; default 127.0.0.1")
    entry.add_argument("--port", type=int, default=8000, help="default 8000")
    entry.add_argument(
        "--keys", type=user_path, metavar="DIR", help="written by `deploy keys`; needed beyond 127.0.0.1"
    )
    entry.add_argument("--print", dest="show", action="store_true", help="print Flower's command, and start nothing")
    entry.set_defaults(run=server)

    entry = below.add_parser("client", help=client.__doc__, description=client.__doc__)
    entry.add_argument("--name", required=True, help="the client's name in the federation")
    entry.add_argument("--server", required=True, metavar="HOST:PORT", help="where the server listens")
    entry.add_argument(
        "--data", type=user_path, metavar="DIR", help="this site's images: train and test in it, by class"
    )
    entry.add_argument(
        "--data_dir", type=user_path, metavar="DIR", help="of the configured data set, in place of --data"
    )
    entry.add_argument("--root", type=user_path, metavar="FILE", help="ca.pem of the server")
    entry.add_argument("--key", type=user_path, metavar="FILE", help="this site's own key")
    entry.add_argument(
        "--state", type=user_path, metavar="DIR", help="of what is this site's own; default ~/federated_runs"
    )
    entry.add_argument("--app", type=user_path, metavar="DIR", help="the app, to check name and images before")
    entry.add_argument(
        "--secure_aggregation",
        action="store_true",
        help="refuse to take part where the server sees uploads by themselves",
    )
    entry.add_argument("--port", type=int, help="on this machine; one for each of several sites on it; default 9094")
    entry.add_argument("--print", dest="show", action="store_true", help="print Flower's command, and start nothing")
    entry.set_defaults(run=client)


def add_commands(commands: Any) -> None:
    """Add the commands to those of ``benchmark``."""
    about = "Run a method between real machines, on Flower."
    entry = commands.add_parser("deploy", help=about, description=about)
    below = entry.add_subparsers(dest="what", required=True, metavar="WHAT")
    for does, folder in ((app, "new folder of the app"), (local, "folder of the run; given again, it goes on")):
        entry = below.add_parser(does.__name__, help=does.__doc__, description=does.__doc__)
        entry.add_argument("config", metavar="CONFIG", help="configuration file of a run, by path or name")
        entry.add_argument("folder", type=user_path, metavar="DIR", help=folder)
        entry.add_argument(
            "options", nargs=argparse.REMAINDER, metavar="OPTION", help="of lightning-cli fit: --trainer.max_epochs=20"
        )
        entry.add_argument("--secure_aggregation", action="store_true", help=f"{SECURE}; stands before CONFIG")
        entry.set_defaults(run=does)
    _add_machines(below)
    entry = below.add_parser("messages", help=messages.__doc__, description=messages.__doc__)
    entry.add_argument(
        "methods", nargs="*", metavar="METHOD", help="as its file in configs/methods is called; default all"
    )
    entry.add_argument("--out", type=user_path, default=Path("results/deployment"), metavar="DIR", help="of the table")
    entry.set_defaults(run=messages)
