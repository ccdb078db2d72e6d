"""The two parts of a Flower app that work for every method."""

import gc
import logging
import time
from collections.abc import Callable
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
    from benchmark.run.cli import prepare_process
finally:
    if _COLLECTING:
        gc.enable()

LOG = logging.getLogger("benchmark.deploy")


def _tell() -> None:
    """Print the rounds, and no more: what Flower's own messages say would be sent as messages again."""
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())


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
        server = LiveServer(agreement, grid, float(config["timeout"]), name)
        folder = state_folder(config.get("state")) / server.name / "server"
        run(server, RunFolder(folder, split), int(config["min-clients"]), float(config["wait"]), time.sleep)
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
