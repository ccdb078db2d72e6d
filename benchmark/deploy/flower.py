"""The two parts of a Flower app that work for every method."""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

_COLLECTING = gc.isenabled()
gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time, per message
try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from benchmark.deploy.agreement import Agreement, state_folder
    from benchmark.deploy.client import Site, answered
    from benchmark.deploy.masked_uploads import secured
    from benchmark.deploy.messages import TAKEN
    from benchmark.deploy.outcome import RunFolder, read_split
    from benchmark.deploy.server import LiveServer, run
    from benchmark.errors import ConfigurationError
    from benchmark.run.cli import prepare_process
finally:
    if _COLLECTING:
        gc.enable()

#: Ten years.
MOST_SECONDS = 10 * 365.25 * 24 * 3600
LOG = logging.getLogger("benchmark.deploy")


def _tell() -> None:
    """Print the rounds, and no more: what Flower's own messages say would be sent as messages again."""
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())


def seconds_of(config: Mapping[str, Any], name: str, least: float) -> float:
    """Return an option of ``--run-config`` that is a time.

    Args:
        config: the options.
        name: of this one.
        least: that it may be.

    Raises:
        ConfigurationError: it is no number of seconds from there to ten years.
    """
    given = config.get(name)
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= MOST_SECONDS:
        raise ConfigurationError(f"--run-config: {name} is a number of seconds, {least:g} or more; got {given!r:.80}")
    return float(given)


def min_clients_of(config: Mapping[str, Any], clients: int) -> int:
    """Return the option ``min-clients`` of ``--run-config``.

    Args:
        config: the options.
        clients: of the deployment.

    Raises:
        ConfigurationError: it is no number of clients of this deployment.
    """
    given = config.get("min-clients")
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= clients:
        raise ConfigurationError(f"--run-config: min-clients is a whole number from 1 to {clients}; got {given!r:.80}")
    return given


def server_app() -> ServerApp:
    """Return the server of an app that ``benchmark deploy app`` has written."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        prepare_process()
        _tell()
        config = context.run_config
        name = str(config.get("run") or context.run_id)
        agreement = Agreement.read(config.get("agreement"))
        split = read_split(config.get("split"), agreement.client_names)
        timeout, wait = seconds_of(config, "timeout", 1.0), seconds_of(config, "wait", 0.0)
        needed = min_clients_of(config, len(agreement.terms.training_clients))
        server = LiveServer(agreement, grid, timeout, name)
        folder = state_folder(config.get("state")) / server.name / "server"
        run(server, RunFolder(folder, split), needed, wait, time.sleep)
        LOG.info("written: %s", folder)

    return app


def client_app() -> ClientApp:
    """Return a client of such an app."""
    app = ClientApp()

    def handle(does: Callable[[Site, Any], Any]) -> Callable[[Message, Context], Message]:
        def handler(message: Message, context: Context) -> Message:
            prepare_process()
            return answered(does, message, context)

        return handler

    app.query()(handle(Site.hello))
    app.train(mods=[secured])(handle(Site.train))
    app.train(TAKEN)(handle(Site.take))
    app.evaluate()(handle(Site.evaluate))
    return app
