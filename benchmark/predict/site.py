"""The model that a site of a deployment keeps: what it received after the last round, and what is its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Values
from benchmark.files import make_folder, open_regular, write_bytes, write_text
from benchmark.live import Relay, restore_client
from benchmark.method import FederatedMethod
from benchmark.run.federation_file import FederationFacts

NAME = "site.safetensors"
#: Parts of a broadcast, the client's own state, and the fitted copy, as prefixes of the tensors' names.
COMMON, OWN, MASKS, STATE, FITTED = "common/", "own/", "masks/", "state/", "fitted/"


@dataclass(frozen=True)
class SiteModel:
    """One client's model after a round of a deployment.

    Attributes:
        client: its number.
        round: the last one.
        received: what the server sent it for its evaluation: own values and masks [1, ...].
        state: what is its own, by name.
        frozen: hash of the weights that never change.
        fitted: values of the copy of itself with which it is scored, [1, ...] each; none where the method fits none.
    """

    client: int
    round: int
    received: Broadcast
    state: Values
    frozen: str
    fitted: Values

    def write(self, folder: Path, config: Mapping[str, Any], facts: FederationFacts) -> None:
        """Write it as a run's directory, with which ``benchmark predict`` and ``benchmark export`` work.

        Args:
            folder: of the site.
            config: of the deployment.
            facts: of its federation, as far as the site knows them.
        """
        make_folder(folder)
        write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        facts.write(folder)
        sent = self.received
        parts = (
            (COMMON, sent.common),
            (OWN, sent.own),
            (MASKS, sent.masks),
            (STATE, self.state),
            (FITTED, self.fitted),
        )
        tensors = {prefix + name: value.contiguous() for prefix, part in parts for name, value in part.items()}
        told = {"client": str(self.client), "round": str(self.round), "frozen": self.frozen}
        write_bytes(folder / NAME, save(tensors, told))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read what :meth:`write` left; None where the folder is no site's.

        Raises:
            ConfigurationError: the file is damaged.
        """
        path = folder / NAME
        try:
            open_regular(path).close()
            with safe_open(str(path), "pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
                told = file.metadata()
            parts = {
                prefix: {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
                for prefix in (COMMON, OWN, MASKS, STATE, FITTED)
            }
            received = Broadcast(common=parts[COMMON], own=parts[OWN], masks=parts[MASKS])
            numbers = int(told["client"]), int(told["round"])
            return cls(*numbers, received, parts[STATE], told["frozen"], parts[FITTED])
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} is no stored model of a site ({error}); take a whole copy") from error

    def server(self) -> Server:
        """Return the server that sends what the site has received, and nothing to others."""
        rule = Relay()
        rule.received = self.received
        made = Server(rule)
        made.finished_rounds = self.round
        return made

    def load(self, method: FederatedMethod) -> None:
        """Put the client's own state into a method, which has joined the federation.

        Raises:
            ConfigurationError: it is of another method, or of other frozen weights.
        """
        if method.frozen_hash != self.frozen:
            raise ConfigurationError("the site's model was trained with other frozen weights than those loaded now")
        restore_client(method, self.client, self.state)
        method.eval()
