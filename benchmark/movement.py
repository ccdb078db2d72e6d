"""How far each client's own parameters move from round to round."""

from collections.abc import Sequence
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
        self._names: dict[str, list[str]] = {}
        self._before: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look the names up.

        Raises:
            ConfigurationError: a prefix names no personal parameter of the method.
        """
        method: Any = pl_module
        for prefix in self.parameters:
            self._names[prefix] = [name for name in method.parameters_under([prefix]) if name in method.own_names]
            if not self._names[prefix]:
                raise ConfigurationError(
                    f"PersonalMovement: {prefix!r} names no personal parameter of {type(method).__name__}; it has "
                    f"{', '.join(method.own_names) or 'none'}"
                )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where the clients stand before the round."""
        method: Any = pl_module
        self._before = {name: method.bank.all_rows(name).clone() for names in self._names.values() for name in names}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the round's movement; before any training there is none."""
        method: Any = pl_module
        for prefix, names in self._names.items() if self._before else ():
            now = [method.bank.all_rows(name) for name in names]
            start = [method.template(name).cpu() for name in names]
            method.reports[f"{prefix}_change"] = _distances(now, [self._before[name] for name in names])
            method.reports[f"{prefix}_distance"] = _distances(now, start)


def _distances(rows: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Per client [N] the L2 norm over all tensors of rows [N, ...] minus others [N, ...] or [...]."""
    squares = [(r.double() - o.double()).flatten(1).square().sum(1) for r, o in zip(rows, others, strict=True)]
    return torch.stack(squares).sum(0).sqrt()
