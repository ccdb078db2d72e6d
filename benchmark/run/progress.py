"""The progress of a run: round, local step, clients, loss and accuracy; one line a round where there is no terminal."""

import sys
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from benchmark.engine.plan import Block

if TYPE_CHECKING:
    from benchmark.method import FederatedMethod


class RoundProgress(RichProgressBar):
    """Lightning's rich progress bar in the words of federated learning.

    The bar counts blocks of local steps. Beside it stand the steps done in the round, the clients that are stepped,
    their loss, and the last evaluation's average accuracy over clients.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)
        self._clients = ""
        self._steps = 0
        if not sys.stderr.isatty() and not sys.stdout.isatty():
            self.disable()

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Round {current_epoch + 1}/{self.trainer.max_epochs} · local training"

    @property
    def sanity_check_description(self) -> str:
        """Round 0 is evaluated before any training."""
        return "Round 0 · evaluation"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Block, batch_idx: int) -> None:
        """Remember which clients are stepped, and count their steps."""
        self._steps = len(batch.steps) + (self._steps if batch_idx else 0)
        ids = ", ".join(str(client) for client in batch.cohort[:6])
        self._clients = ids + (f" … {len(batch.cohort)}" if len(batch.cohort) > 6 else "")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Clients of the cohort, mean local loss of the cohorts so far, average accuracy after the last evaluation."""
        metrics: dict[str, Any] = {"clients": self._clients, "local step": self._steps}
        loss = cast("FederatedMethod", pl_module).simulation.reports.mean("loss")
        if loss is not None:
            metrics["loss"] = f"{loss:.3f}"
        return metrics | {f"acc ({p})": f"{100 * v:.1f} %" for p, v in _accuracies(trainer)}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Without a terminal: one line."""
        super().on_train_epoch_end(trainer, pl_module)
        if self.is_disabled:
            values = trainer.callback_metrics
            loss = f"loss {values['train/loss']:.4f}  " if "train/loss" in values else ""
            scores = "  ".join(f"accuracy ({p}) {100 * v:.2f} %" for p, v in _accuracies(trainer))
            print(f"round {trainer.current_epoch + 1}/{trainer.max_epochs}  {loss}{scores}", flush=True)


def _accuracies(trainer: Trainer) -> list[tuple[str, float]]:
    """Point and average test accuracy after the last evaluation."""
    values = trainer.callback_metrics
    names = [(point, f"test/{point}/accuracy") for point in ("server", "local")]
    return [(point, values[name].item()) for point, name in names if name in values]
