"""A callback that records how far each client's personal parameters move from round to round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmark.method import FederatedMethod


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
        """Find the personal parameters under each prefix.

        Raises:
            ConfigurationError: a prefix names no personal parameter of the method.
        """
        method = cast("FederatedMethod", pl_module)
        for prefix in self.parameters:
            self._names[prefix] = [name for name in names_under(method, [prefix]) if name in method.roles.personal]
            if not self._names[prefix]:
                raise ConfigurationError(
                    f"PersonalMovement: {prefix!r} names no personal parameter of {type(method).__name__}; it has "
                    f"{', '.join(method.roles.personal) or 'none'}"
                )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember all clients' values before the round."""
        method = cast("FederatedMethod", pl_module)
        self._before = {name: method.store.all_rows(name).clone() for names in self._names.values() for name in names}

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the round's movement; report nothing before the first round."""
        method = cast("FederatedMethod", pl_module)
        reports = method.simulation.reports
        for prefix, names in self._names.items() if self._before else ():
            now = [method.store.all_rows(name) for name in names]
            start = [method.get_parameter(name).to(rows.device) for name, rows in zip(names, now, strict=True)]
            for what, others in (("change", [self._before[name] for name in names]), ("distance", start)):
                whole = torch.full((method.num_clients,), torch.nan, dtype=torch.float64)
                whole[method.store.held] = _distances(now, others)
                reports.put(f"{prefix}_{what}", whole)


def _distances(rows: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return for each client [N] the L2 norm of rows [N, ...] minus others [N, ...] or [...], over all tensors."""
    squares = [(r.double() - o.double()).flatten(1).square().sum(1) for r, o in zip(rows, others, strict=True)]
    return torch.stack(squares).sum(0).sqrt().cpu()
