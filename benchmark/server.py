"""What happens between rounds: select clients, broadcast to them, collect what they upload, aggregate.

The default is FedAvg (McMahan et al., AISTATS 2017): everybody receives the server's values, and the new values are
the mean of the uploads weighted with the clients' numbers of training images.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from benchmark.communication import Traffic
from benchmark.errors import ConfigurationError
from benchmark.finite import finite_rows
from benchmark.ranges import Checked
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


class Server(Checked, Callback):
    """FedAvg's server; the base of all others.

    A method brings its own server through ``default_server``; one given to the Trainer wins.
    State that a server keeps between rounds goes into ``state_dict`` as tensors and plain values.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.uploads: dict[int, Message] = {}
        self.finished_rounds = 0
        self.inside_round = False
        #: rounds of each client whose values were not finite, so that they were left out
        self.dropped: dict[int, int] = {}
        self._missing: list[int] = []
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

    def message_to(self, method: "FederatedMethod", clients: Sequence[int]) -> Message:
        """``broadcast``, checked.

        Raises:
            ConfigurationError: a value is neither one for all clients nor one row for each.
        """
        message = self.broadcast(method, clients)
        for name, value in message.items():
            fitting = [tuple(method.template(name).shape)] if name in method.trainable_names else []
            fitting += [(len(clients), *shape) for shape in fitting]
            if value.shape in fitting or (not fitting and len(value.shape) and len(value) == len(clients)):
                continue
            below = method.parameters_under([name])
            raise ConfigurationError(
                f"{type(self).__name__}.broadcast gives {name!r} of shape {tuple(value.shape)} to {len(clients)} "
                "clients; expected "
                + (
                    " or ".join(map(str, fitting))
                    if fitting
                    else f"the whole name of a parameter, such as {below[0]!r}"
                    if below
                    else "a row for each client"
                )
            )
        return message

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
        self.on_divergence: str = data.on_divergence
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
        # With 64-true the Trainer converts it too, but after it has loaded a checkpoint, whose numbers it would round.
        trainer.precision_plugin.convert_module(pl_module)
        self.prepare(pl_module)  # type: ignore[arg-type]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round begins; whatever asks to stop inside it (a callback, ``max_time``) is heard at its end."""
        trainer.fit_loop.min_epochs = max(trainer.min_epochs or 0, trainer.current_epoch + 1)
        self.inside_round = True
        self.uploads = {}
        self._missing = []
        self.traffic.start_round()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: "Block", batch_idx: int) -> None:
        """Broadcast to a cohort at its first step."""
        if batch.first:
            received = self.message_to(pl_module, batch.cohort)
            per_client = [n for n, v in received.items() if self.is_per_client(pl_module, n, v)]
            for k in range(len(batch.cohort)):
                self.traffic.down([v[k] if n in per_client else v for n, v in received.items()])
            pl_module.begin_cohort(batch.cohort, received)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: "Block", batch_idx: int
    ) -> None:
        """Collect a cohort at its last step; aggregate after the last cohort of the round.

        Raises:
            ConfigurationError: training diverged; the last round's checkpoint is as it was.
        """
        if batch.end:
            uploads = pl_module.end_cohort(batch.cohort)
            for message in uploads.values():
                self.traffic.up(list(message.values()))
            self.uploads |= uploads
            self._missing += [client for client in batch.cohort if client not in uploads]
            if self._missing and self.on_divergence == "raise":
                raise ConfigurationError(self._diverged(", or set data.on_divergence to drop"))
        if trainer.is_last_batch:
            clients = sorted(self.uploads)
            if not clients:
                raise ConfigurationError(self._diverged())
            weights = torch.tensor([self.sizes[client] for client in clients], dtype=torch.float64)
            self.finish_round(pl_module, clients, [self.uploads[client] for client in clients], weights)
            self._refuse_lost_state(pl_module)
            self._count_missing(pl_module)
            self.uploads = {}
            self.finished_rounds = trainer.current_epoch + 1
            self.inside_round = False

    def _diverged(self, choice: str = "") -> str:
        """Who came to values that are not finite, and what to do."""
        who = f"{len(self._missing)} of {len(self._missing) + len(self.uploads)} clients"
        return (
            f"training diverged: losses or values of {who} were not finite in round {self.finished_rounds + 1} "
            f"(clients {sorted(self._missing)[:5]}); lower the learning rate, clip gradients or look at these clients' "
            f"images{choice}"
        )

    def _refuse_lost_state(self, method: "FederatedMethod") -> None:
        """Raise if what was made of finite uploads, shared values and the server's own modules, is not finite."""
        modules = [part for part in vars(self).values() if isinstance(part, nn.Module)]
        own = [parameter for module in modules for parameter in module.parameters()]
        for values in ([method.template(name) for name in method.shared_names], own):
            if not finite_rows([value.unsqueeze(0) for value in values], 1)[0]:
                raise ConfigurationError(
                    f"training diverged: values that {type(self).__name__} made of finite uploads were not finite in "
                    f"round {self.finished_rounds + 1}; lower the server's learning rate, or the clients'"
                )

    def _count_missing(self, method: "FederatedMethod") -> None:
        """Note whose uploads the round went without, as a client metric of training, and say so at their first time."""
        if new := sorted(set(self._missing) - set(self.dropped)):
            warnings.warn(
                f"losses or values of {len(new)} clients were not finite in round {self.finished_rounds + 1} (clients "
                f"{new[:5]}): the round goes without them, and they keep what they had before; so it will be in later "
                "rounds, counted as train/dropped",
                stacklevel=1,
            )
        for client in self._missing:
            self.dropped[client] = self.dropped.get(client, 0) + 1
        if self.dropped:
            counts = torch.zeros(method.num_clients, dtype=torch.float64)
            counts[list(self.dropped)] = torch.tensor(list(self.dropped.values()), dtype=torch.float64)
            method.reports["dropped"] = counts

    def state_dict(self) -> dict[str, Any]:
        """Counters; subclasses add their own tensors."""
        return {
            "finished_rounds": self.finished_rounds,
            "inside_round": self.inside_round,
            "traffic": self.traffic.state_dict(),
            "dropped": dict(self.dropped),
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
        self.dropped = dict(state_dict["dropped"])
