"""How far each client's own parameters move from round to round."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.errors import ConfigurationError


class PersonalMovement(Callback):
    """Records, for every evaluated round and client, how far a personal parameter has moved (L2 norm).

    The numbers go where other statistics of local training go: ``metrics.parquet``, split ``train``. With a prefix
    ``prompt`` they are ``prompt_change``, against the client's values before the round (0 for a client that did not
    take part), and ``prompt_distance``, against the values that all clients start from.

    Args:
        parameters: prefixes of personal parameters; all parameters below one make one vector.
    """

    def __init__(self, parameters: list[str]) -> None:
        self.parameters = parameters
        self._before: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the names.

        Raises:
            ConfigurationError: a prefix names no personal parameter of the method.
        """
        method: Any = pl_module
        method.configure_model()
        for prefix in self.parameters:
            if not self._names(method, prefix):
                known = ", ".join(method.own_names) or "none"
                raise ConfigurationError(
                    f"PersonalMovement: {prefix!r} names no personal parameter of {type(method).__name__}; it has "
                    f"{known}"
                )

    @staticmethod
    def _names(method: Any, prefix: str) -> list[str]:
        return [name for name in method.parameters_under([prefix]) if name in method.own_names]

    def _vectors(self, method: Any, prefix: str) -> Tensor:
        """[N, P] in float64: all clients' parameters under a prefix."""
        rows = [method.bank.all_rows(name).flatten(1) for name in self._names(method, prefix)]
        return torch.cat(rows, dim=1).double()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the clients stand before the round."""
        self._before = {prefix: self._vectors(pl_module, prefix) for prefix in self.parameters}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the round's movement; before any training there is none."""
        method: Any = pl_module
        for prefix, before in self._before.items():
            now = self._vectors(method, prefix)
            start = torch.cat([method.template(name).flatten() for name in self._names(method, prefix)])
            method.reports[f"{prefix}_change"] = (now - before).norm(dim=1)
            method.reports[f"{prefix}_distance"] = (now - start.cpu().double()).norm(dim=1)
