"""What happens between rounds: select clients, broadcast to them, collect what they upload, aggregate.

The default is FedAvg (McMahan et al., AISTATS 2017): everybody receives the server's values, and the new values are
the mean of the uploads weighted with the clients' numbers of training images.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.communication import Traffic
from benchmark.errors import ConfigurationError
from benchmark.seeds import numpy_generator
from benchmark.settings import check_one_device, check_precision, check_whole_rounds

if TYPE_CHECKING:
    from benchmark.batch import Block
    from benchmark.method import FederatedMethod

Message = dict[str, Tensor]


def weighted_mean(updates: Sequence[Message], weights: Tensor) -> Message:
    """``sum_k w_k x_k / sum_k w_k`` for every tensor of the messages.

    Args:
        updates: one message per client, with the same names and shapes.
        weights: [len(updates)], not negative, not all zero.
    """
    share = (weights / weights.sum()).tolist()
    mean = {}
    for name, first in updates[0].items():
        # Around the first client's value: identical updates give that value back bit for bit.
        mean[name] = first.clone()
        for update, part in zip(updates[1:], share[1:], strict=True):
            mean[name].add_(update[name] - first, alpha=part)
    return mean


class Server(Callback):
    """FedAvg's server; the base of all others.

    A method brings its own server through ``default_server``; one given to the Trainer wins.
    State that a server keeps between rounds goes into ``state_dict`` as tensors and plain values.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.uploads: dict[int, Message] = {}
        self.finished_rounds = 0
        self.inside_round = False
        self.seed = 0

    # ------------------------------------------------------------------ what a server writes

    def prepare(self, method: "FederatedMethod") -> None:
        """Make what this server needs before the first round (or before a checkpoint is loaded into it)."""

    def select(self, round: int) -> list[int]:
        """The clients of a round (from 1), drawn without replacement; the same for every server of this seed."""
        clients = self.training_clients
        count = self.participants
        if count == len(clients):
            return list(clients)
        rng = numpy_generator(self.seed, "select", round)
        # By position: an array of all clients would cost more than the rest of a round where there are very many.
        return sorted(clients[place] for place in rng.choice(len(clients), size=count, replace=False))

    def broadcast(self, method: "FederatedMethod", clients: Sequence[int]) -> Message:
        """What these clients receive: per name one value for all, or [K, ...] with one row each."""
        return {name: method.template(name).detach() for name in method.shared_names}

    def aggregate(self, updates: Sequence[Message], weights: Tensor) -> Message:
        """New shared values from the clients' uploads: a pure function, as a live deployment would call it."""
        return weighted_mean(updates, weights)

    def finish_round(
        self, method: "FederatedMethod", clients: Sequence[int], updates: Sequence[Message], weights: Tensor
    ) -> None:
        """Take the round's uploads (in the order of ``clients``, ascending) and move the server's state."""
        if method.shared_names:
            shared = [{name: update[name] for name in method.shared_names} for update in updates]
            for name, value in self.aggregate(shared, weights).items():
                method.template(name).data.copy_(value)

    def adapt_new_clients(
        self, method: "FederatedMethod", clients: Sequence[int], phase: int, values: Message
    ) -> Message:
        """After a phase of ``new_client_phases``: what the server sends back to these clients, which never train.

        Args:
            method: the method.
            clients: the cohort, K clients.
            phase: index into ``new_client_phases()``.
            values: the copies' parameters after the phase, [K, ...] each.

        Returns:
            New values [K, ...] of some parameters of the copies; nothing by default. The server itself does not change.
        """
        return {}

    # ------------------------------------------------------------------ the round

    @property
    def state_key(self) -> str:
        """One server a run, whatever its class."""
        return "server"

    def is_per_client(self, method: "FederatedMethod", name: str, value: Tensor) -> bool:
        """Whether a broadcast value has a row per client; by shape for parameters, else always."""
        return name not in method.trainable_names or value.ndim > method.template(name).ndim

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that this run can be simulated exactly.

        Raises:
            ConfigurationError: a Trainer setting that would couple clients or break exact resume.
        """
        check_one_device(trainer)
        check_precision(trainer.precision)
        if stage == "fit":
            check_whole_rounds(trainer)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data.num_clients != pl_module.num_clients:
            raise ConfigurationError(
                f"the method is for {pl_module.num_clients} clients, the partition has {data.num_clients}; set "
                "model.num_clients to the partition's number"
            )
        handed_on = any(phase.optimizer_state == "shared" for phase in cast(Any, pl_module).phases("train"))
        if stage == "fit" and handed_on and data.cohort_width != 1:
            raise ConfigurationError(
                "training.optimizer_state 'shared' hands one momentum from client to client, so they train one after "
                f"the other: data.cohort_width must be 1, got {data.cohort_width}"
            )
        self.seed = data.seed
        self.training_clients: list[int] = data.training_clients
        self.participants: int = data.participants
        self.sizes: Mapping[int, int] = data.train_sizes
        if data.label_spaces and not pl_module.open_vocabulary:
            raise ConfigurationError(
                f"{type(pl_module).__name__} classifies among all classes, but {type(data.partition).__name__} gives "
                f"the splits {', '.join(data.label_spaces)} label spaces of their own; take a method of the CLIP family"
            )
        pl_module.label_spaces = data.label_spaces
        pl_module._class_counts = data.class_counts
        pl_module.configure_model()
        self.prepare(pl_module)  # type: ignore[arg-type]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round begins; whatever asks to stop inside it (a callback, ``max_time``) is heard at its end."""
        trainer.fit_loop.min_epochs = max(trainer.min_epochs or 0, trainer.current_epoch + 1)
        self.inside_round = True
        self.uploads = {}
        self.traffic.start_round()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: "Block", batch_idx: int) -> None:
        """Broadcast to a cohort at its first step."""
        if batch.first:
            received = self.broadcast(pl_module, batch.cohort)
            per_client = [n for n, v in received.items() if self.is_per_client(pl_module, n, v)]
            for k in range(len(batch.cohort)):
                self.traffic.down([v[k] if n in per_client else v for n, v in received.items()])
            pl_module.begin_cohort(batch.cohort, received)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: "Block", batch_idx: int
    ) -> None:
        """Collect a cohort at its last step; aggregate after the last cohort of the round."""
        if batch.end:
            for client, message in pl_module.end_cohort(batch.cohort).items():
                self.traffic.up(list(message.values()))
                self.uploads[client] = message
        if trainer.is_last_batch:
            clients = sorted(self.uploads)
            weights = torch.tensor([self.sizes[client] for client in clients], dtype=torch.float64)
            self.finish_round(pl_module, clients, [self.uploads[client] for client in clients], weights)
            self.uploads = {}
            self.finished_rounds = trainer.current_epoch + 1
            self.inside_round = False

    def state_dict(self) -> dict[str, Any]:
        """Counters; subclasses add their own tensors."""
        return {
            "finished_rounds": self.finished_rounds,
            "inside_round": self.inside_round,
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ConfigurationError: the checkpoint was saved inside a round.
        """
        if state_dict["inside_round"]:
            raise ConfigurationError(
                f"the checkpoint was saved inside round {state_dict['finished_rounds'] + 1}, which can't be resumed "
                f"exactly; "
                "use one saved at the end of a round (checkpoints/last.ckpt of the run's directory)"
            )
        self.finished_rounds = state_dict["finished_rounds"]
        self.traffic.load_state_dict(state_dict["traffic"])
