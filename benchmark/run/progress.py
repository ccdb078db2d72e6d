"""The progress of a run as the Trainer's hooks tell it: rounds, local steps, loss, accuracy, and the time left."""

import time
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from benchmark.contract import Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.plan.work import CohortWork, Step
from benchmark.records.words import POINT_WORDS
from benchmark.run.display import SCORES, Lines, RoundDisplay, RoundRow, display_for
from benchmark.run.pace import Pace

if TYPE_CHECKING:
    from benchmark.method import FederatedMethod
    from datamodules.federated import FederatedDataModule

#: Seconds between two looks at a loss that can be had without a wait.
GLANCE = 0.25


class RoundProgress(ProgressBar):
    """Tells a display how far the run is.

    Steps are counted on the host. The loss of a cohort is read once it has come to its end, and on a CPU, where nothing
    waits for it, a few times a second meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace(0)
        self.display: RoundDisplay | None = None
        self._enabled = True
        self._looked = 0.0
        self._evaluated = False
        #: of the present evaluation: all, and those that are done
        self._steps = self._step = 0

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False
        self._end()

    def enable(self) -> None:
        """Show the next run again."""
        self._enabled = True

    # ------------------------------------------------------------------ a whole run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to show, and to be told of steps."""
        self._begin(trainer, trainer.max_epochs or 0)
        steps = cast("FederatedMethod", pl_module).simulation.local_steps.on_step
        if self._stepped not in steps:
            steps.append(self._stepped)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave what was shown last."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._end()

    def _begin(self, trainer: Trainer, rounds: int) -> None:
        self.pace = Pace(rounds, trainer.check_val_every_n_epoch or 1)
        if self._enabled:
            data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
            self.display = Lines(self.pace) if data.one_by_one else display_for(self.pace)  # a debugger has the screen
            self.display.begin()

    def _end(self) -> None:
        if self.display is not None:
            self.display.end()
            self.display = None

    def _look(self) -> None:
        if self.display is not None:
            self.display.look()

    # ------------------------------------------------------------------ local training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round begins."""
        data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
        assert data.loaders is not None
        self._evaluated = False
        self.pace.begin_round(trainer.current_epoch + 1, data.loaders.local_steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: CohortWork, batch_idx: int
    ) -> None:
        """Note which clients are stepped, and what the cohorts of the round before them have come to."""
        self.pace.clients = batch.clients
        self.pace.begin_batches()
        if batch_idx:
            self.pace.loss = cast("FederatedMethod", pl_module).simulation.reports.mean("loss")

    def _stepped(self, cohort: Cohort, step: Step) -> None:
        """Count a step of the present cohort."""
        if step.stage is Stage.TRAIN:
            self.pace.step += len(step.clients)
            total, steps = cohort.totals["loss"]
            if total.device.type == "cpu" and time.monotonic() - self._looked > GLANCE:
                self._looked = time.monotonic()
                self.pace.loss = (total.double() / steps).nanmean().item()
        self._look()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round is done."""
        values = trainer.callback_metrics
        loss = values["train/loss"].item() if self._evaluated and "train/loss" in values else None
        if loss is None:
            loss = cast("FederatedMethod", pl_module).simulation.reports.mean("loss")
        self.pace.loss = loss if loss is not None else self.pace.loss
        scores = _scores(trainer) if self._evaluated else {}
        spent = cast("FederatedMethod", pl_module).server.facts.get("epsilon", {}).get(self.pace.number)
        row = RoundRow(self.pace.number, loss, scores, self.pace.end_round(), spent)
        if self.display is not None:
            self.display.finished(row)

    # ------------------------------------------------------------------ evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation begins."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._begin(trainer, 0)
        method = cast("FederatedMethod", pl_module)
        self._steps, self._step = max(1, method.server.loaders.evaluation_steps), 0
        if self._scored not in method.evaluation.on_step:
            method.evaluation.on_step.append(self._scored)
        self.pace.begin_evaluation()

    def on_validation_batch_start(self, *_: Any) -> None:
        """The evaluation's images are there."""
        self.pace.begin_batches()

    def _scored(self) -> None:
        """Count a step of an evaluation."""
        self._step += 1
        self.pace.evaluated = self._step / self._steps
        self._look()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation is done."""
        self.pace.end_evaluation()
        self._evaluated = True
        if trainer.sanity_checking and self.display is not None:
            self.display.before_training(_scores(trainer))

    on_test_start = on_validation_start
    on_test_end = on_validation_end


def _scores(trainer: Trainer) -> dict[str, float]:
    """Averages over clients of the last evaluation in per cent, by title; those of the test images stand first."""
    parts = {name: name.split("/") for name in trainer.callback_metrics}
    # Methods, rules and deliveries may report a number of that name, too: train/accuracy, server/accuracy.
    scores = [
        (split, POINT_WORDS[point], name)
        for name, (split, *rest) in parts.items()
        if rest[1:] == ["accuracy"] and (point := rest[0]) in POINT_WORDS and split != "train"
    ]
    scores.sort(key=lambda score: score[0] != "test")
    return {
        (point if split == "test" else f"{split} {point}"): 100 * trainer.callback_metrics[name].item()
        for split, point, name in scores[:SCORES]
    }
