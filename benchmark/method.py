"""The contract of a method: what one client does with one mini-batch. The engine runs it for a whole cohort.

A method declares which parameters are ``shared`` (go to the server) and which are ``personal`` (never leave their
client); everything else is frozen. It writes ``forward`` and, where cross-entropy is not all, ``client_loss``,
for ONE client in ordinary PyTorch. The engine stacks the trainable parameters of a cohort into ``[K, ...]`` slots
and maps the step over them with ``torch.func.vmap``. The stacked loss is the sum over clients, so the gradient of
slot k is client k's own, and an elementwise optimizer on the stack is K independent optimizers.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from benchmark.bank import ClientBank
from benchmark.batch import ClientBatch, PlannedPhase
from benchmark.errors import ConfigurationError
from benchmark.metrics import ClientScores
from benchmark.seeds import torch_generator
from benchmark.server import Message, Server
from methods.losses import cross_entropy


@dataclass(frozen=True)
class Group:
    """Parameters trained with the same settings.

    Attributes:
        parameters: prefixes of parameter names, for example ``("prompt", "head")``.
        lr: learning rate.
        momentum: of SGD; ignored by Adam.
        weight_decay: added to the gradient, as ``torch.optim.SGD`` does.
    """

    parameters: tuple[str, ...]
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training with its own parameters and optimizer; the others rest meanwhile.

    Attributes:
        groups: what is trained, and how.
        epochs: passes over the client's training images.
        optimizer: ``"sgd"`` or ``"adam"``; its state starts empty.
        clip: largest gradient norm of one client over all trained parameters, or None.
    """

    groups: tuple[Group, ...]
    epochs: int
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip: float | None = None


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains one set of parameters: what a configuration gives, and ``phase`` makes a phase of.

    Attributes:
        lr: learning rate.
        epochs: E, passes over the client's training images in a round.
        momentum: of SGD; it starts anew each round.
        weight_decay: added to the gradient.
        clip: largest gradient norm of one client, or None.
        optimizer: ``sgd`` or ``adam``.
    """

    lr: float
    epochs: int = 5
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"

    def phase(self, *parameters: str) -> Phase:
        """A local phase that trains the parameters under these prefixes."""
        group = Group(parameters, self.lr, self.momentum, self.weight_decay)
        return Phase((group,), self.epochs, self.optimizer, self.clip)


@dataclass(frozen=True)
class Client:
    """One client inside a step. Its parameters are the method's own while the step runs; here they are by name.

    Attributes:
        parameters: the shared and personal parameters, being trained.
        received: what the server sent this round, without gradient.
        kept: the client's own state that is not trained (see ``kept_state``), without gradient.
    """

    parameters: dict[str, Tensor]
    received: dict[str, Tensor]
    kept: dict[str, Tensor]


@dataclass(frozen=True)
class MiniBatch:
    """One client's mini-batch.

    Attributes:
        x: images, [B, 3, H, W].
        y: labels, [B], -100 in padded rows.
        mask: [B], False in padded rows.
        phase: index into ``local_phases()``.
        noise: what ``draw_noise`` returned for this step.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    phase: int
    noise: dict[str, Tensor] = field(default_factory=dict)


class _Call(nn.Module):
    """Calls a function of the method while ``functional_call`` has put other values in its parameters."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class FederatedMethod(LightningModule):
    """Base of all methods.

    Args:
        num_clients: N; linked from the data by the command line.

    Class attributes:
        shared: prefixes of the parameters that are broadcast, trained and uploaded.
        personal: prefixes of the parameters that are trained and never leave their client.
        evaluate_local: also evaluate every client right after its own local training, before aggregation
            (point ``"local"``, next to point ``"server"``).
    """

    shared: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    evaluate_local: bool = False

    running_loss: Tensor

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self.num_clients = num_clients
        self.automatic_optimization = False
        self.strict_loading = False
        self.slots = nn.ParameterDict()
        self.bank: ClientBank | None = None
        self.scores: dict[tuple[str, str], ClientScores] = {}
        self._received: Message = {}
        self._kept: Message = {}
        self._finished: dict[tuple[int, str], Tensor] = {}
        self._finetuned = False
        self._diverged = torch.zeros(0, dtype=torch.bool)
        self._finetune_optimizers: list[torch.optim.Optimizer] = []
        self.register_buffer("running_loss", torch.zeros(2), persistent=False)

    # ------------------------------------------------------------------ what a method writes

    def forward(self, x: Tensor) -> Tensor:
        """ONE client: images [B, 3, H, W] to logits [B, C]."""
        raise NotImplementedError

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """ONE client: the objective on a mini-batch, a scalar. Cross-entropy of ``forward`` by default."""
        return cross_entropy(self(batch.x), batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """ONE client: logits, or log-probabilities, [B, C], used to evaluate. ``forward`` by default."""
        return cast(Tensor, self(batch.x))

    def local_phases(self) -> list[Phase]:
        """What a client trains in a round, in order."""
        raise NotImplementedError

    def finetune_phases(self) -> list[Phase]:
        """What a copy of every client is trained with before that copy is evaluated; nothing by default.

        Frozen parameters may be fine-tuned as well: it is a copy.
        """
        return []

    def kept_state(self) -> dict[str, Tensor]:
        """Initial values of what each client keeps besides its personal parameters; nothing by default."""
        return {}

    def after_local_training(self, client: Client) -> dict[str, Tensor]:
        """ONE client, at the end of its round: new values of all of ``kept_state``; unchanged by default."""
        return client.kept

    def draw_noise(self, generator: torch.Generator, batch_size: int, kind: str) -> dict[str, Tensor]:
        """ONE client: random tensors for one step, drawn from ``generator`` alone; nothing by default.

        ``kind`` is ``"train"``, ``"finetune"`` or ``"evaluate"``.
        """
        return {}

    def default_server(self) -> Server:
        """The server used when the configuration names none."""
        return Server()

    # ------------------------------------------------------------------ roles

    def parameters_under(self, prefixes: Iterable[str]) -> list[str]:
        """Names of the method's parameters at or below one of these prefixes, in the order of the module."""
        prefixes = tuple(prefixes)
        return [
            name
            for name, _ in self.named_parameters()
            if not name.startswith("slots.") and any(name == p or name.startswith(p + ".") for p in prefixes)
        ]

    def template(self, name: str) -> Tensor:
        """The parameter of this name: the server's value if it is shared, the initial value if it is personal."""
        return self.get_parameter(name)

    def check_roles(self) -> None:
        """Every prefix names parameters, none has two roles, and nothing trained keeps batch statistics.

        Raises:
            ConfigurationError: a role or a phase names no parameter, or two roles hold one parameter.
        """
        for role in ("shared", "personal"):
            for prefix in getattr(self, role):
                if not self.parameters_under([prefix]):
                    raise ConfigurationError(f"{type(self).__name__}: {role} names {prefix!r}, which has no parameter")
        self.shared_names = self.parameters_under(self.shared)
        self.personal_names = self.parameters_under(self.personal)
        self.trainable_names = self.shared_names + self.personal_names
        if both := set(self.shared_names) & set(self.personal_names):
            raise ConfigurationError(f"{type(self).__name__}: both shared and personal: {sorted(both)}")
        finetuned: list[str] = []
        for phase in (*self.local_phases(), *self.finetune_phases()):
            for group in phase.groups:
                names = self.parameters_under(group.parameters)
                if not names:
                    raise ConfigurationError(f"{type(self).__name__} trains {group.parameters}, which has no parameter")
                rest = [name for name in names if name not in self.trainable_names]
                if rest and phase in self.local_phases():
                    raise ConfigurationError(f"{type(self).__name__} trains frozen parameters: {sorted(rest)[:3]}")
                finetuned += rest
            if phase.epochs < 0:
                raise ConfigurationError(f"{type(self).__name__}: epochs must be 0 or more, got {phase.epochs}")
        own = {name for name, _ in self.named_parameters() if not name.startswith("slots.")}
        self.has_frozen = bool(own - set(self.trainable_names))
        #: what has a slot: everything trained, and what only the fine-tuning of a copy trains
        self.slot_names = self.trainable_names + list(dict.fromkeys(finetuned))
        for name, module in self.named_modules():
            trained = any(n.startswith(name + ".") for n in self.slot_names)
            if isinstance(module, _BatchNorm) and trained:
                raise ConfigurationError(
                    f"{type(self).__name__}: {name} is a trained batch normalisation, whose running statistics belong "
                    "to no client; use a backbone with group or layer normalisation, or freeze this one"
                )

    def configure_callbacks(self) -> list[Callback]:
        """The method's own server, unless the Trainer was given one."""
        given = any(isinstance(callback, Server) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if given else [self.default_server()]

    @property
    def server(self) -> Server:
        """The server of this run."""
        return next(cb for cb in self.trainer.callbacks if isinstance(cb, Server))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ state

    def configure_model(self) -> None:
        """Freeze the template, make the slots (their width is set by each cohort) and the bank of all clients."""
        if self.bank is not None:
            return
        self.check_roles()
        self.requires_grad_(False)
        for name in self.slot_names:
            self.slots[_slot(name)] = nn.Parameter(self.template(name).detach().clone().unsqueeze(0))
        initial = {name: self.template(name) for name in self.personal_names}
        if self.evaluate_local:
            initial |= {f"local.{name}": self.template(name) for name in self.shared_names}
        initial |= {f"kept.{name}": value for name, value in self.kept_state().items()}
        self.bank = ClientBank(initial, self.num_clients)
        self.train(self.training)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer per local phase; its state is cleared whenever the phase starts."""
        return [self._make_optimizer(phase) for phase in self.local_phases()]

    def _make_optimizer(self, phase: Phase) -> torch.optim.Optimizer:
        groups = []
        for group in phase.groups:
            names = self.parameters_under(group.parameters)
            settings = {"lr": group.lr, "weight_decay": group.weight_decay, "momentum": group.momentum}
            if phase.optimizer == "adam":
                settings.pop("momentum")
            groups.append({"params": [self.slots[_slot(name)] for name in names], **settings})
        return (torch.optim.SGD if phase.optimizer == "sgd" else torch.optim.Adam)(groups, lr=0.0)

    def train(self, mode: bool = True) -> Self:
        """As usual for what is trained; frozen parts stay in evaluation mode."""
        super().train(mode)
        if self.bank is not None:
            for name, module in self.named_modules():
                if name and not any(n == name or n.startswith(name + ".") for n in self.trainable_names):
                    module.training = False
        return self

    @cached_property
    def frozen_hash(self) -> str:
        """Hash of everything that is neither trained nor the engine's own: the backbone a run was made with."""
        digest = hashlib.blake2b(digest_size=16)
        trained = set(self.trainable_names)
        for name, tensor in sorted(self.state_dict().items()):
            if name not in trained and not name.startswith(("slots.", "bank.")):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was learned: shared values, every client's state; frozen weights are only named by their hash."""
        keep = set(self.trainable_names)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if k in keep or k.startswith("bank.")}
        checkpoint["frozen_hash"] = self.frozen_hash

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of other parameters or of another frozen backbone.

        Raises:
            ConfigurationError: the checkpoint is not one of this method with this backbone and these clients.
        """
        held = checkpoint["state_dict"]
        mine = {k: v for k, v in self.state_dict().items() if k in self.trainable_names or k.startswith("bank.")}
        if differing := sorted(set(held) ^ set(mine)):
            raise ConfigurationError(
                f"the checkpoint is not one of {type(self).__name__} with this configuration: it and the method "
                f"differ in {', '.join(differing[:3])}; give the configuration it was made with, or "
                "start without --ckpt_path"
            )
        for name, value in mine.items():
            if value.shape != held[name].shape:
                raise ConfigurationError(
                    f"the checkpoint is of another configuration: {name} has shape {tuple(held[name].shape)} there and "
                    f"{tuple(value.shape)} here; give the configuration it was made with, or start without --ckpt_path"
                )
        if checkpoint.get("frozen_hash") != self.frozen_hash:
            raise ConfigurationError(
                "the checkpoint was made with other frozen weights than those loaded now; give the same backbone, "
                "weights and seed, or start without --ckpt_path"
            )

    # ------------------------------------------------------------------ the stacked step

    def planned_phases(self, kind: Literal["train", "finetune"]) -> list[PlannedPhase]:
        """What the round plan has to lay out."""
        phases = self.local_phases() if kind == "train" else self.finetune_phases()
        return [PlannedPhase(phase.epochs, kind) for phase in phases]

    def begin_cohort(self, clients: Sequence[int], received: Message) -> None:
        """Put into the slots what each client starts from: what it received, else its own, else the frozen value."""
        for name in self.slot_names:
            if name in received:
                value = received[name]
            elif name in self.personal_names:
                value = self._bank.rows(name, clients, self.device)
            else:
                value = self.template(name)
            if value.shape == self.template(name).shape:
                value = value.expand(len(clients), *value.shape)
            slot = self.slots[_slot(name)]
            slot.grad = None
            if slot.shape == value.shape:
                slot.data.copy_(value)
            else:
                slot.data = value.detach().clone(memory_format=torch.contiguous_format)
        self._received = {name: value.detach() for name, value in received.items()}
        self._kept = self._rows_of("kept.", clients)

    def _rows_of(self, prefix: str, clients: Sequence[int]) -> Message:
        """The bank's rows under a prefix, by the name that follows it."""
        names = [name for name in self._bank.names if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._bank.rows(name, clients, self.device) for name in names}

    @property
    def _bank(self) -> ClientBank:
        if self.bank is None:
            raise RuntimeError(f"{type(self).__name__} has no client state before the Trainer has set it up")
        return self.bank

    def slot_values(self) -> Message:
        """Current values of the cohort, per parameter name [K, ...]."""
        return {name: self.slots[_slot(name)] for name in self.slot_names}

    def map_clients(
        self, function: Callable[[Client, MiniBatch], Any], values: Message, batch: ClientBatch, kind: str
    ) -> Any:
        """Call ``function(client, mini_batch)`` for every client of the batch at once.

        Args:
            function: for ONE client; while it runs, the method's parameters are that client's.
            values: per parameter name, a row for each of the cohort's clients (those of the batch are the first); names
                left out have the same value for all, the template's.
            batch: the stacked step.
            kind: for the key of the step's noise.

        Returns:
            What ``function`` returns, with a leading K.
        """
        assert batch.x is not None
        assert batch.y is not None
        noise = self._stacked_noise(batch, kind)
        count = len(batch.clients)
        values, kept = _first(values, count), _first(self._kept, count)
        per_client = _first({n: v for n, v in self._received.items() if self._is_stacked(n, v)}, count)
        common = {n: v for n, v in self._received.items() if n not in per_client}
        call = _Call(self)

        def one(
            values: Message, sent: Message, kept: Message, x: Tensor, y: Tensor, mask: Tensor, noise: Message
        ) -> Any:
            client = Client(values, common | sent, kept)
            mini_batch = MiniBatch(x, y, mask, batch.phase, noise)
            own = {f"method.{name}": value for name, value in values.items()}
            return functional_call(call, own, (function, client, mini_batch))

        stacked = (values, per_client, kept, batch.x, batch.y, batch.mask, noise)
        if count > 1 or self.has_frozen:
            return vmap(one)(*stacked)
        # One client of a method that trains everything needs no mapping, which would cost a tenth of a small network's
        # step. (With a frozen backbone it costs nothing that counts, and all widths agree bit for bit.) Unlike vmap,
        # nothing here notices a draw from a global generator.
        before = torch.default_generator.get_state()
        result = tree_map(lambda rows: rows.unsqueeze(0), one(*tree_map(lambda rows: rows.squeeze(0), stacked)))
        if batch.first and not torch.equal(before, torch.default_generator.get_state()):
            raise RuntimeError(
                f"{type(self).__name__} draws random numbers from the global generator; draw them in draw_noise, from "
                "the generator given there"
            )
        return result

    def _is_stacked(self, name: str, value: Tensor) -> bool:
        return self.server.is_per_client(self, name, value)

    def _stacked_noise(self, batch: ClientBatch, kind: str) -> Message:
        assert batch.x is not None
        seed = self.server.seed
        key = (kind, batch.point, batch.split, batch.round, batch.phase, batch.step)
        drawn = [
            self.draw_noise(torch_generator(seed, "noise", *key, client, device=self.device), batch.x.shape[1], kind)
            for client in batch.clients
        ]
        return {name: torch.stack([own[name] for own in drawn]) for name in drawn[0]}

    def _train_on(
        self, batch: ClientBatch, phase: Phase, optimizer: LightningOptimizer | torch.optim.Optimizer
    ) -> Tensor:
        """One optimizer step of the whole cohort; returns the clients' losses, [K], detached."""
        if batch.phase_start:
            self._start_phase(phase, optimizer)
        losses = self.map_clients(self.client_loss, self.slot_values(), batch, batch.kind)
        optimizer.zero_grad()
        losses.sum().backward()  # no gradient scaler to go through: fp16 is refused
        if phase.clip is not None:
            self._clip_each_client(phase.clip)
        optimizer.step()
        self._keep_finished(batch)
        return cast(Tensor, losses.detach())

    def _start_phase(self, phase: Phase, optimizer: LightningOptimizer | torch.optim.Optimizer) -> None:
        """Fresh optimizer state; only this phase's parameters take gradients."""
        getattr(optimizer, "optimizer", optimizer).state.clear()
        trained = set(self.parameters_under(name for group in phase.groups for name in group.parameters))
        for name in self.slot_names:
            slot = self.slots[_slot(name)]
            slot.requires_grad_(name in trained)
            slot.grad = None
        self._finished = {}

    def _clip_each_client(self, limit: float) -> None:
        """Scale every client's own gradient to at most ``limit``; clipping the stack would couple clients."""
        gradients = [slot.grad for slot in self.slots.values() if slot.grad is not None]
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1,) * (gradient.ndim - 1)))

    def _keep_finished(self, batch: ClientBatch) -> None:
        """Set aside the slots of clients at their own last step; write all back when the phase ends.

        Momentum and weight decay go on moving a slot after its client's last step; that counts for nothing.
        """
        trained = [name for name in self.slot_names if self.slots[_slot(name)].requires_grad]
        if not batch.phase_end:
            for k, ended in enumerate(batch.own_end):
                if ended:
                    self._finished |= {(k, n): self.slots[_slot(n)][k].detach().clone() for n in trained}
            return
        for (k, name), value in self._finished.items():
            self.slots[_slot(name)].data[k].copy_(value)
        self._finished = {}

    def training_step(self, batch: ClientBatch, batch_idx: int) -> None:
        """One local step of the cohort."""
        if batch.kind == "idle":
            return
        optimizers = cast(Any, self.optimizers())
        optimizer = optimizers[batch.phase] if isinstance(optimizers, list) else optimizers
        losses = self._train_on(batch, self.local_phases()[batch.phase], optimizer)
        if batch.first:
            self._diverged = torch.zeros(len(batch.cohort), dtype=torch.bool, device=self.device)
        self._diverged[: len(losses)] |= ~losses.isfinite()
        self.running_loss += torch.stack([losses.sum(), losses.new_tensor(len(losses))])

    def end_cohort(self, clients: Sequence[int]) -> dict[int, Message]:
        """Store what stays with the clients and return what they upload: client id to its shared values.

        Raises:
            ConfigurationError: a client's loss was not finite; the last round's checkpoint is as it was.
        """
        if diverged := [client for client, bad in zip(clients, self._diverged.tolist(), strict=False) if bad]:
            raise ConfigurationError(
                f"training diverged: the loss of {len(diverged)} of {len(clients)} clients of a cohort was not "
                f"finite in round {self.server.finished_rounds + 1} (clients {diverged[:5]}); lower the "
                "learning rate or clip gradients"
            )
        values = {name: slot.detach() for name, slot in self.slot_values().items()}
        for name in self.personal_names:
            self._bank.write(name, clients, values[name])
        if self.evaluate_local:
            for name in self.shared_names:
                self._bank.write(f"local.{name}", clients, values[name])
        if self._kept:
            for name, value in self._updated_kept(values).items():
                self._bank.write(f"kept.{name}", clients, value)
        return {client: {n: values[n][k].clone() for n in self.shared_names} for k, client in enumerate(clients)}

    def _updated_kept(self, values: Message) -> Message:
        per_client = {n: v for n, v in self._received.items() if self._is_stacked(n, v)}
        common = {n: v for n, v in self._received.items() if n not in per_client}

        def one(values: Message, sent: Message, kept: Message) -> Message:
            return self.after_local_training(Client(values, common | sent, kept))

        return cast(Message, vmap(one)(values, per_client, self._kept))

    # ------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        """Start a new evaluation of all clients."""
        self.scores = {}

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: ClientBatch, batch_idx: int) -> None:
        """Fine-tune a copy, or score one batch of every client of the cohort."""
        if batch.first:
            self._received = self.server.broadcast(self, batch.cohort)
            self._kept = self._rows_of("kept.", batch.cohort)
            self._finetuned = False
        if batch.kind == "finetune":
            self._finetune(batch)
            return
        if self._finetuned:
            values = self.slot_values()
        else:
            values = {name: self._bank.rows(name, batch.clients, self.device) for name in self.personal_names}
            if batch.point == "local":
                values |= self._rows_of("local.", batch.clients)
            else:
                sent = self._received
                values |= {n: sent[n] for n in self.shared_names if n in sent and self._is_stacked(n, sent[n])}
        logits = self.map_clients(self.client_logits, values, batch, "evaluate")
        scores = self.scores.setdefault(
            (batch.point, batch.split), ClientScores(self.num_clients, logits.shape[-1]).to(self.device)
        )
        scores.update(logits, cast(Tensor, batch.y), batch.clients)

    test_step = validation_step

    def _finetune(self, batch: ClientBatch) -> None:
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fine-tuning before evaluation needs gradients: set trainer.inference_mode to false"
            )
        if not self._finetuned:
            self.begin_cohort(batch.cohort, self._received)
            self._finetune_optimizers = [self._make_optimizer(phase) for phase in self.finetune_phases()]
            self._finetuned = True
        with torch.enable_grad():
            self._train_on(batch, self.finetune_phases()[batch.phase], self._finetune_optimizers[batch.phase])

    # ------------------------------------------------------------------ memory

    def bytes_per_client(self, x: Tensor, y: Tensor) -> int:
        """Memory one more client takes in a cohort: its slots, gradients and momenta, and what autograd saves.

        Measured, not guessed: one forward pass of one client with hooks on the saved tensors.

        Args:
            x: images of one mini-batch, [1, B, 3, H, W].
            y: labels, [1, B].
        """
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = ClientBatch(
            index=torch.zeros_like(y),
            mask=torch.ones_like(y, dtype=torch.bool),
            clients=(0,),
            cohort=(0,),
            kind="train",
            first=True,
            phase=0,
            step=0,
            phase_start=True,
            own_end=(False,),
            phase_end=False,
            end=False,
            x=x,
            y=y,
        )
        self.begin_cohort((0,), self.server.broadcast(self, (0,)))
        for slot in self.slots.values():
            slot.requires_grad_(True)
        frozen = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.map_clients(self.client_loss, self.slot_values(), batch, "train")
        activations = sum(size for pointer, size in saved.items() if pointer not in frozen)
        slots = sum(slot.numel() * slot.element_size() for slot in self.slots.values())
        return math.ceil(activations + 4 * slots + x.numel() * x.element_size())


def _first(rows: Message, count: int) -> Message:
    """The first ``count`` rows of every tensor; the tensors themselves if they have no more."""
    return {name: value if len(value) == count else value[:count] for name, value in rows.items()}


def _slot(name: str) -> str:
    """A parameter's key among the slots: module names may not hold a dot."""
    return name.replace(".", "/")
