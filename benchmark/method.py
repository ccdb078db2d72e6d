"""The contract of a method: what one client does with one mini-batch. The engine runs it for a whole cohort.

A method declares which parameters are ``shared`` (go to the server), which are ``personal`` (never leave their client)
and which are ``disclosed`` (stay with their client, and the server sees a copy); everything else is frozen. It writes
``forward`` and, where cross-entropy is not all, ``client_loss``, for ONE client in ordinary PyTorch. The engine stacks
the trainable parameters of a cohort into ``[K, ...]`` slots and maps the step over them with ``torch.func.vmap``. The
stacked loss is the sum over clients, so the gradient of slot k is client k's own, and an elementwise optimizer on the
stack is K independent optimizers.
"""

import hashlib
import math
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map

from benchmark.bank import ClientBank
from benchmark.batch import Block, ClientBatch, PlannedPhase
from benchmark.client import Client, Group, LocalTraining, MiniBatch, Phase
from benchmark.errors import ConfigurationError
from benchmark.finite import finite_rows
from benchmark.metrics import ClientScores
from benchmark.padding import cross_entropy
from benchmark.ranges import Checked, check_fields
from benchmark.seeds import drawn_in_float32, global_states, torch_generator
from benchmark.server import Message, Server

__all__ = ["Client", "FederatedMethod", "Group", "LocalTraining", "MiniBatch", "Phase"]


#: What is mapped over the clients: all arguments of ``_for_one_client`` but the first, what all clients received.
STACKED = (None, 0, 0, 0, 0, 0, 0, 0)

#: How far a gradient of a compiled step may be from the same operations one by one, relative to its norm: without and
#: with bfloat16, whose intermediate results a fused kernel does not round.
COMPILED_TOLERANCE = (1e-3, 5e-2)

#: Files in which no user's function is: those of Python, of installed packages and of the engine.
NOT_THE_METHODS = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))

UNKEYED = (
    "draws random numbers from a global generator; draw them in draw_noise, from the generator given there, and take "
    "them from batch.noise"
)
NOT_OWNED = (
    "running statistics, spectral normalisation and the like would pass from client to client; keep such a value in "
    "kept_state, or use a layer without it"
)
#: What cannot be done for many clients at once: a part of what vmap says of it, and what to tell the user.
MISTAKES = (
    ("called random operation", UNKEYED),
    (
        "data-dependent control flow",
        "decides by a tensor's value (if, while, and, or); the step runs for many clients at once: use torch.where",
    ),
    (
        ".item()",
        "makes a Python number of a tensor (item, float, int, tolist); the step runs for many clients at once: compute "
        "with tensors",
    ),
    (
        "dynamic shape",
        "makes a tensor whose shape depends on values (a boolean index, nonzero, unique); the step runs for many "
        "clients at once: multiply by a mask, or use torch.where",
    ),
    ("is not possible because there exists a Tensor", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("the fallback path doesn't work on out=", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("must only return Tensors", "must return tensors alone"),
    (
        "self.log",
        "calls self.log; return named tensors beside the loss, (loss, {'name': value}): scalars are recorded for each "
        "client and logged",
    ),
)


class _Call(nn.Module):
    """Calls a function of the method while ``functional_call`` has put other values in its parameters."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class FederatedMethod(Checked, LightningModule):
    """Base of all methods.

    Args:
        num_clients: N; linked from the data by the command line.

    Class attributes:
        shared: prefixes of the parameters that are broadcast, trained and uploaded.
        personal: prefixes of the parameters that are trained and never leave their client.
        disclosed: prefixes of the parameters that are trained and stay with their client, but are uploaded as well;
            what the server sends never overwrites them.
        open_vocabulary: the method classifies among any class names, so that splits may have label spaces of their own.
        needs_images: False if the steps use ``features`` alone; then images are not touched where those are cached.
        needs_memory: give clients the features of their own training images as ``client.memory``.
        evaluate_local: also evaluate every client right after its own local training, before aggregation
            (point ``"local"``, next to point ``"server"``).
    """

    shared: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    disclosed: tuple[str, ...] = ()
    open_vocabulary: bool = False
    needs_images: bool = True
    needs_memory: bool = False
    evaluate_local: bool = False

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self.num_clients = num_clients
        self.automatic_optimization = False
        self.strict_loading = False
        self.slots = nn.ParameterDict()
        self.bank: ClientBank | None = None
        self.scores: dict[tuple[str, str], ClientScores] = {}
        #: per split that has a label space of its own, the classes in it; set from the data
        self.label_spaces: dict[str, tuple[int, ...]] = {}
        #: per name, what clients reported of their local training: one value a client, NaN before its first time
        self.reports: dict[str, Tensor] = {}
        self._received: Message = {}
        self._kept: Message = {}
        self._prepared: Message = {}
        self._memory: Message = {}
        self._class_counts = torch.zeros(num_clients, 0, dtype=torch.int64)
        self._counted: tuple[tuple[int, ...], Tensor] = ((), self._class_counts[:0])
        self._totals: dict[str, tuple[Tensor, Tensor]] = {}
        self._finished: dict[tuple[int, str], Tensor] = {}
        self._ended_momenta: dict[str, tuple[Sequence[int], Tensor]] = {}
        self._fitted = False
        self._seen: set[tuple[str | int, ...]] = set()
        self._values: Message = {}
        self._copy_optimizers: list[torch.optim.Optimizer] = []
        self._programs: dict[tuple[str, int, int], Callable[..., Any]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """As usual.

        Raises:
            ConfigurationError: a constructor that has not called its base's.
        """
        if isinstance(value, Tensor | nn.Module) and "_modules" not in self.__dict__:
            raise ConfigurationError(
                f"{type(self).__name__}.__init__ sets {name!r} before super().__init__(num_clients); call that first"
            )
        super().__setattr__(name, value)

    def log(self, *args: Any, **named: Any) -> None:
        """As Lightning's, but not in a step, where it would meet the tensors of many clients at once.

        Raises:
            MisconfigurationException: it is called in a step.
        """
        if self._current_fx_name in ("training_step", "validation_step", "test_step"):
            raise MisconfigurationException("self.log in a step; return named tensors beside the loss")
        super().log(*args, **named)

    # ------------------------------------------------------------------ what a method writes

    def forward(self, x: Tensor) -> Tensor:
        """ONE client: images [B, 3, H, W] to logits [B, C]."""
        raise ConfigurationError(f"{type(self).__name__} must define forward: images [B, 3, H, W] to logits [B, C]")

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        """ONE client: the objective on a mini-batch, a scalar. Cross-entropy of ``forward`` by default.

        It may come with named tensors. They are summed over the client's steps of the round, for ``client_upload``, and
        the scalars among them are recorded as means over the steps.
        """
        return cross_entropy(self(batch.x), batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """ONE client: logits, or log-probabilities, [B, C], used to evaluate. ``forward`` by default."""
        return cast(Tensor, self(batch.x))

    def local_phases(self) -> list[Phase]:
        """What a client trains in a round, in order."""
        raise ConfigurationError(f"{type(self).__name__} must define local_phases: what a client trains in a round")

    def finetune_phases(self) -> list[Phase]:
        """What a copy of every client is trained with before that copy is evaluated; nothing by default.

        Frozen parameters may be fine-tuned as well: it is a copy.
        """
        return []

    def new_client_phases(self) -> list[Phase]:
        """What a copy of a client that never trains is fitted with before it is evaluated.

        By default what every other client's copy is fine-tuned with.
        """
        return self.finetune_phases()

    def prepare(self, client: Client, kind: str, split: str) -> dict[str, Tensor]:
        """ONE client: what its steps need and its training does not change; nothing by default.

        Called once, without gradient: at the start of a round (``kind`` is ``"train"``, ``split`` too), of the fitting
        of a copy (``"finetune"``, ``"adapt"``) and of each evaluation of a split (``"evaluate"``).
        """
        return {}

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """ONE client: images [B, 3, H, W] to tensors [B, ...] that depend on them and on frozen parts alone.

        They are computed once for each image where the transform is deterministic and memory allows it.
        """
        return {}

    def transform_update(self, client: Client, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """ONE client: what is added to some of the trained parameters in place of an optimizer step's ``update``."""
        return {}

    def kept_state(self) -> dict[str, Tensor]:
        """Initial values of what each client keeps besides its personal parameters; nothing by default."""
        return {}

    def after_local_training(self, client: Client) -> dict[str, Tensor]:
        """ONE client, at the end of its round: new values of all of ``kept_state``; unchanged by default."""
        return client.kept

    def client_upload(self, client: Client, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """ONE client, at the end of its round: what it uploads besides parameters; nothing by default.

        ``totals`` are the sums of the named tensors of ``client_loss``.
        """
        return {}

    def draw_noise(self, generator: torch.Generator, batch_size: int, kind: str) -> dict[str, Tensor]:
        """ONE client: random tensors for one step, drawn from ``generator`` alone; nothing by default.

        ``kind`` is ``"train"``, ``"finetune"``, ``"adapt"`` or ``"evaluate"``.
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
        """The parameter of this name: the server's value if it is shared, the initial value if it is personal.

        Raises:
            ConfigurationError: there is none.
        """
        try:
            return self.get_parameter(name)
        except AttributeError as error:
            under = self.parameters_under([name])
            raise ConfigurationError(
                f"{type(self).__name__} has no parameter {name!r}; "
                + (f"below it are {', '.join(under[:5])}" if under else "give one of those in named_parameters()")
            ) from error

    def check_roles(self) -> None:
        """Every prefix names parameters, none has two roles, and nothing trained keeps batch statistics.

        Raises:
            ConfigurationError: a role or a phase names no parameter, or two roles hold one parameter.
        """
        for role in ("shared", "personal", "disclosed"):
            for prefix in getattr(self, role):
                if not self.parameters_under([prefix]):
                    raise ConfigurationError(f"{type(self).__name__}: {role} names {prefix!r}, which has no parameter")
        self.shared_names = self.parameters_under(self.shared)
        self.personal_names = self.parameters_under(self.personal)
        self.disclosed_names = self.parameters_under(self.disclosed)
        #: what a client keeps between rounds
        self.own_names = self.personal_names + self.disclosed_names
        self.trainable_names = self.shared_names + self.own_names
        if both := {name for name in self.trainable_names if self.trainable_names.count(name) > 1}:
            raise ConfigurationError(
                f"{type(self).__name__}: in two of the roles shared, personal and disclosed: {sorted(both)}"
            )
        finetuned: list[str] = []
        for phase in (*self.phases("train"), *self.phases("finetune"), *self.phases("adapt")):
            for group in phase.groups:
                names = self.parameters_under(group.parameters)
                if not names:
                    raise ConfigurationError(f"{type(self).__name__} trains {group.parameters}, which has no parameter")
                rest = [name for name in names if name not in self.trainable_names]
                if rest and phase in self.local_phases():
                    raise ConfigurationError(f"{type(self).__name__} trains frozen parameters: {sorted(rest)[:3]}")
                finetuned += rest
            for settings in (phase, *phase.groups):
                check_fields(settings)
            if phase.optimizer_state != "fresh" and (
                phase.optimizer != "sgd" or not any(group.momentum for group in phase.groups)
            ):
                raise ConfigurationError(
                    f"{type(self).__name__}: optimizer_state {phase.optimizer_state!r} keeps the momentum of SGD, but "
                    f"the optimizer is {phase.optimizer} with momentum {[group.momentum for group in phase.groups]}; "
                    "set training.momentum, or optimizer_state to fresh"
                )
        own = {name for name, _ in self.named_parameters() if not name.startswith("slots.")}
        self.has_frozen = bool(own - set(self.trainable_names))
        #: what has a slot: everything trained, and what only the fine-tuning of a copy trains
        self.slot_names = self.trainable_names + list(dict.fromkeys(finetuned))
        self._frozen_parts = self._find_frozen_parts()
        self._check_modes()

    def _find_frozen_parts(self) -> list[nn.Module]:
        """The outermost modules that have parameters of which none is trained, not even in a copy."""
        trained = {id(self.template(name)) for name in self.slot_names}
        parts: list[nn.Module] = []
        inside: set[int] = set()
        for module in list(self.modules())[1:]:
            held = [id(parameter) for parameter in module.parameters()]
            if held and id(module) not in inside and not trained.intersection(held):
                parts.append(module)
                inside.update(map(id, module.modules()))
        return parts

    def _check_modes(self) -> None:
        """Nothing outside the frozen parts may behave differently in training mode in a way no client owns.

        What is not known here by its class is noticed in the first step (see ``_watched``).

        Raises:
            ConfigurationError: running statistics, or dropout whose draws have no key.
        """
        frozen = {id(module) for part in self._frozen_parts for module in part.modules()}
        for name, module in self.named_modules():
            if module is self or id(module) in frozen:
                continue
            if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
                kind = "batch" if isinstance(module, _BatchNorm) else "instance"
                raise ConfigurationError(
                    f"{type(self).__name__}: {name} is a trained {kind} normalisation, whose running statistics belong "
                    "to no client; use a backbone with group or layer normalisation, or freeze this one"
                )
            if dropped := _dropped(module):
                raise ConfigurationError(
                    f"{type(self).__name__}: {name} is {type(module).__name__} of {dropped:g}, whose draws have no "
                    "key of seed, round, client and step; draw a mask in draw_noise and multiply by it and by "
                    f"1 / (1 - {dropped:g}), or set it to 0"
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
        places: dict[int, list[str]] = {}
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                places.setdefault(id(parameter), []).append(f"method.{name}")
        self._places = {name: places[id(self.template(name))] for name in self.slot_names}
        initial = {name: self.template(name) for name in self.own_names}
        if self.evaluate_local:
            initial |= {f"local.{name}": self.template(name) for name in self.shared_names}
        initial |= {
            f"kept.{name}": value for name, value in _named_tensors(self, "kept_state", self.kept_state()).items()
        }
        for number, phase in enumerate(self.local_phases()):
            for name, row in self._momenta(phase, number).items():
                initial[row] = torch.zeros_like(self.template(name))
        self.bank = ClientBank(initial, self.num_clients)
        #: what no step may change: the place of every buffer and frozen parameter, and of what all clients start from
        self._standing = [
            (f"{prefix}.{name}".lstrip("."), held, name)
            for prefix, module in self.named_modules()
            if module not in (self.bank, self.slots)
            for held in (module._parameters, module._buffers)
            for name, value in held.items()
            if value is not None
        ]
        self.train(self.training)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer per local phase; whenever the phase starts its state is set (see ``Phase.optimizer_state``)."""
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

    def _momenta(self, phase: Phase, number: int) -> dict[str, str]:
        """The parameters whose momentum outlives the round, and by which name the bank keeps it."""
        if phase.optimizer_state == "fresh":
            return {}
        groups = [group.parameters for group in phase.groups if group.momentum]
        return {name: f"momentum.{number}.{name}" for names in groups for name in self.parameters_under(names)}

    def train(self, mode: bool = True) -> Self:
        """As usual; frozen parts stay in evaluation mode."""
        super().train(mode)
        if self.bank is not None:
            for part in self._frozen_parts:
                part.eval()
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
        """Keep what was learned: shared values, every client's state; frozen weights are only named by their hash.

        Momenta are those of the last cohort, and are set anew where a phase starts; what outlives it is in the bank.
        """
        keep = set(self.trainable_names)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if k in keep or k.startswith("bank.")}
        checkpoint["frozen_hash"] = self.frozen_hash
        for optimizer in checkpoint.get("optimizer_states", ()):
            optimizer["state"] = {}

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
            there, here = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (held[name], value))
            if there != here:
                raise ConfigurationError(
                    f"the checkpoint is of another configuration: {name} has shape and type {there} there and {here} "
                    "here; give the configuration it was made with, or start without --ckpt_path"
                )
        if checkpoint.get("frozen_hash") != self.frozen_hash:
            raise ConfigurationError(
                "the checkpoint was made with other frozen weights than those loaded now; give the same backbone, "
                "weights and seed, or start without --ckpt_path"
            )

    # ------------------------------------------------------------------ the stacked step

    def phases(self, kind: str) -> list[Phase]:
        """The phases of local training (``"train"``) or of the fitting of a copy (``"finetune"``, ``"adapt"``).

        Raises:
            ConfigurationError: the method gives something else.
        """
        name = {"train": "local_phases", "finetune": "finetune_phases", "adapt": "new_client_phases"}[kind]
        made = getattr(self, name)()
        if not isinstance(made, list | tuple) or not all(isinstance(phase, Phase) for phase in made):
            raise ConfigurationError(
                f"{type(self).__name__}.{name} must return a list of phases, such as "
                f"[self.training_settings.phase('head')]; it returns {made!r:.80}"
            )
        return list(made)

    def planned_phases(self, kind: str) -> list[PlannedPhase]:
        """What the round plan has to lay out."""
        return [PlannedPhase(phase.epochs, kind, phase.steps) for phase in self.phases(kind)]

    def begin_cohort(self, clients: Sequence[int], received: Message, kind: str = "train") -> None:
        """Put into the slots what each client starts from: what it received, else its own, else the frozen value."""
        for name in self.slot_names:
            if name in self.shared_names and name in received:
                value = received[name]
            elif name in self.own_names:
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
        self._totals = {}
        self._ended_momenta = {}
        self._counts_of(tuple(clients))  # copied here, since a GPU's steps would wait for the copy
        self._prepare(clients, self.slot_values(), kind, "train")

    def _prepare(self, clients: Sequence[int], values: Message, kind: str, split: str) -> None:
        """Call ``prepare`` for a cohort."""
        self._prepared = {}
        self._memory = self.data.memory(clients) if self.needs_memory else {}
        if type(self).prepare is not FederatedMethod.prepare:
            with torch.no_grad():
                made = self._map(lambda client, _: self.prepare(client, kind, split), clients, values, {}, "prepare")
            self._prepared = _named_tensors(self, "prepare", made)

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

    def map_state(self, function: Callable[[Client], Any], clients: Sequence[int], values: Message) -> Any:
        """Call ``function(client)`` for every client of a cohort at once; what it returns has a leading K.

        Args:
            function: for ONE client; while it runs, the method's parameters are that client's.
            clients: the cohort, or its first clients.
            values: per parameter name, a row for each of the cohort's clients; names left out have the same value for
                all, the template's.
        """
        return self._map(lambda client, _: function(client), clients, values, {}, _name_of(function))

    def map_clients(
        self,
        function: Callable[[Client, MiniBatch], Any],
        values: Message,
        batch: ClientBatch,
        kind: str,
        program: Callable[..., Any] | None = None,
    ) -> Any:
        """Call ``function(client, mini_batch)`` for every client of the batch at once.

        Args:
            function: for ONE client; while it runs, the method's parameters are that client's.
            values: as for ``map_state``.
            batch: the stacked step.
            kind: for the key of the step's noise.
            program: the same function as ``_compiled_loss`` made it, to be called in its place.

        Returns:
            What ``function`` returns, with a leading K.
        """
        assert batch.x is not None
        assert batch.y is not None
        with drawn_in_float32():
            drawn = self._stacked_noise(batch, kind)
        noise = {name: value.to(self.dtype) if value.dtype == torch.float32 else value for name, value in drawn.items()}
        rows = {"x": batch.x, "y": batch.y, "mask": batch.mask, "noise": noise}
        features = self._encode(batch.x) if batch.features is None else batch.features
        rows["features"] = dict(features)

        one = partial(_on_mini_batch, function, batch.phase, batch.split)
        part = (batch.kind, batch.phase, batch.split)
        return self._map(one, batch.clients, values, rows, _name_of(function), part, program)

    def _encode(self, x: Tensor) -> Message:
        """``frozen_features`` of images [K, B, 3, H, W], without mapping as for kept ones, so that both are equal."""
        if type(self).frozen_features is FederatedMethod.frozen_features:
            return {}
        with torch.no_grad():
            made = self.frozen_features(x.flatten(0, 1))
        return {name: value.unflatten(0, x.shape[:2]) for name, value in made.items()}

    def _map(
        self,
        function: Callable[[Client, dict[str, Any]], Any],
        clients: Sequence[int],
        values: Message,
        rows: dict[str, Any],
        name: str,
        part: tuple[str | int, ...] = (),
        program: Callable[..., Any] | None = None,
    ) -> Any:
        """Call ``function(client, rows of that client)`` with each client's values in the method's parameters.

        Args:
            function: for ONE client.
            clients: the cohort, or its first clients.
            values: as for ``map_state``.
            rows: tensors [K, ...], and nested ones.
            name: of the method's function that is called, for messages.
            part: of the round; the first call of a function in each part of a round is watched (see ``_watched``).
            program: as for ``map_clients``.

        Raises:
            ConfigurationError: the function does what cannot be done for many clients at once.
        """
        count = len(clients)
        per_client = {n: v for n, v in self._received.items() if self._is_stacked(n, v)}
        common = {n: v for n, v in self._received.items() if n not in per_client}
        parts = (values, per_client, self._kept, self._prepared, self._memory)
        try:
            if program is not None:
                made = program(common, *parts, *self._padded((self._counts_of(tuple(clients)), rows), values))
                return tree_map(lambda part: part[:count], made)
            own: tuple[Any, ...] = tuple(_first(part, count) for part in parts)
            stacked = (*own, self._counts_of(tuple(clients)), rows)
            with self._watched(name, (*part, count > 1)):
                return self._for_all(self._for_one_client(function), common, stacked, count)
        except ConfigurationError:
            raise
        except Exception as error:
            words = _mistake(error)
            if words is None:
                raise
            raise ConfigurationError(f"{self._place(name, error)} {words}") from error

    def _for_all(self, one: Callable[..., Any], common: Message, stacked: tuple[Any, ...], count: int) -> Any:
        """Call what ``_for_one_client`` made for the rows of ``count`` clients."""
        if count > 1 or self.has_frozen:
            return vmap(one, in_dims=STACKED)(common, *stacked)
        # One client of a method that trains everything needs no mapping, which would cost a tenth of a small network's
        # step. (With a frozen backbone it costs nothing that counts, and all widths agree up to what a product of
        # matrices rounds by its number of rows.)
        single = one(common, *tree_map(lambda part: part.squeeze(0), stacked))
        for part in tree_leaves(single):
            if not isinstance(part, Tensor):
                raise ValueError(f"must only return Tensors, got type {type(part)}")  # as vmap says it
        return tree_map(lambda part: part.unsqueeze(0), single)

    @contextmanager
    def _watched(self, name: str, part: tuple[str | int, ...]) -> Iterator[None]:
        """Refuse what vmap may let pass, and a single client without vmap always would, in the first call of its kind.

        Raises:
            ConfigurationError: a draw from a global generator, which has no key, or another value of a buffer or a
                frozen parameter, which would pass from client to client.
        """
        if (name, *part) in self._seen:
            yield
            return
        self._seen.add((name, *part))
        states = global_states(self.device)
        before = [(value := held[key], value._version) for _, held, key in self._standing]
        yield
        if global_states(self.device) != states:
            raise ConfigurationError(f"{self._place(name)} {UNKEYED}")
        for (place, held, key), (value, version) in zip(self._standing, before, strict=True):
            if held[key] is not value or value._version != version:
                raise ConfigurationError(f"{self._place(name)} changes {place!r}: {NOT_OWNED}")

    def _place(self, name: str, error: Exception | None = None) -> str:
        """A function of the method, with the line that an error came from, else its first."""
        if error is not None:
            for frame in reversed(traceback.extract_tb(error.__traceback__)):
                if not frame.filename.startswith(NOT_THE_METHODS):
                    return f"{type(self).__name__}.{name}, line {frame.lineno} of {frame.filename},"
        code = getattr(getattr(type(self), name, None), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"{type(self).__name__}.{name}{where}"

    def _padded(self, rows: tuple[Any, ...], values: Message) -> Any:
        """Rows for all clients of the cohort, the first one's again for those at their end; one program fits all."""
        width = len(next(iter(values.values())))

        def whole(part: Tensor) -> Tensor:
            missing = width - len(part)
            return torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part

        return tree_map(whole, rows)

    def _for_one_client(self, function: Callable[[Client, dict[str, Any]], Any]) -> Callable[..., Any]:
        """What is mapped: calls ``function(client, rows)`` with a client's values in the method's parameters."""
        call = _Call(self)

        def one(
            common: Message,
            values: Message,
            sent: Message,
            kept: Message,
            prepared: Message,
            memory: Message,
            counts: Tensor,
            rows: dict[str, Any],
        ) -> Any:
            client = Client(values, common | sent, kept, prepared, counts, memory)
            # torch would look for tied parameters at every step, which takes a twentieth of a small network's.
            named = {place: v for n, v in values.items() for place in self._places[n]}
            return functional_call(call, named, (function, client, rows), tie_weights=False)

        return one

    def _compiled_loss(self, batch: ClientBatch) -> Callable[..., Any] | None:
        """``client_loss`` of all clients of a cohort in a step's phase, compiled; None where steps are not compiled.

        Raises:
            ConfigurationError: it cannot be compiled, or not rightly.
        """
        mode = self.data.compile_steps
        if mode is None:
            return None
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        key = (batch.kind, batch.phase, len(batch.cohort))
        if key not in self._programs:
            one = self._for_one_client(partial(_on_mini_batch, self.client_loss, batch.phase, "train"))
            program = torch.compile(vmap(one, in_dims=STACKED), mode=mode, dynamic=False)
            self._check_gradient(batch, program)
            self._programs[key] = program
        return self._programs[key]

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Say in one line that torch.compile failed inside."""
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as error:
            said = str(error).splitlines()[0]
            raise ConfigurationError(
                f"data.compile_steps: torch.compile failed on {type(self).__name__} ({said}); "
                "leave data.compile_steps out, or mend what it needs (on a CPU a C++ compiler)"
            ) from error

    def _step_losses(self, batch: ClientBatch) -> tuple[Tensor, Message]:
        """``_losses`` of a training step, compiled where steps are, by code whose gradients were compared.

        A program holds code for each set of shapes, Python numbers and branches it has met; new code is made inside a
        call of it, which is then compared and done again.
        """
        program = self._compiled_loss(batch)
        if program is None:
            return self._losses(batch)
        made = _graphs_made()
        with self._compiling():
            losses = self._losses(batch, program)
        if _graphs_made() == made:
            return losses
        del losses
        self._check_gradient(batch, program)
        return self._losses(batch, self._compiled_loss(batch))

    def _check_gradient(self, batch: ClientBatch, program: Callable[..., Any]) -> None:
        """Refuse a compiled step whose gradients are not those of the operations one by one.

        Inductor's code is not always right: torch 2.15 makes a CLIP text tower's gradient on a CPU 2 % off. A CUDA
        graph is warmed up at its first call and recorded at its second; the third, a replay, is what training uses.

        Raises:
            ConfigurationError: the gradient of a parameter is another, or there is no compiling it.
        """
        trained = [name for name in self.slot_names if self.slots[_slot(name)].requires_grad]
        slots = [self.slots[_slot(name)] for name in trained]

        def gradients(way: Callable[..., Any] | None) -> list[Tensor]:
            made = torch.autograd.grad(self._losses(batch, way)[0].sum(), slots, materialize_grads=True)
            return [gradient.clone() for gradient in made]  # a CUDA graph writes its next ones to the same place

        limit = COMPILED_TOLERANCE["bf16" in str(self.trainer.precision)]
        expected = gradients(None)
        replays = self.data.compile_steps == "reduce-overhead"
        for _ in range(3 if replays else 1):
            if replays:
                torch.compiler.cudagraph_mark_step_begin()
            with self._compiling():
                found = gradients(program)
            for name, right, made in zip(trained, expected, found, strict=True):
                off = ((made - right).norm() / right.norm().clamp(min=1e-30)).item()
                if not off <= limit:  # NaN is refused too
                    raise ConfigurationError(
                        f"data.compile_steps: torch.compile makes the gradient of {name!r} of {type(self).__name__} "
                        f"{100 * off:.2g} % off, {100 * limit:g} % are allowed; leave data.compile_steps out"
                    )

    def _losses(self, batch: ClientBatch, program: Callable[..., Any] | None = None) -> tuple[Tensor, Message]:
        """The clients' losses, [K], and the named tensors that came with them."""
        made = self.map_clients(self.client_loss, self.slot_values(), batch, batch.kind, program)
        losses, named = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(losses, Tensor) or losses.shape != (len(batch.clients),) or not isinstance(named, dict):
            given = tuple(losses.shape[1:]) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigurationError(
                f"{self._place('client_loss')} must return a scalar, or a scalar and a dict of named tensors; it "
                f"returns {f'shape {given}' if isinstance(given, tuple) else given}"
            )
        return losses, named

    def _counts_of(self, clients: tuple[int, ...]) -> Tensor:
        """Training images of each class, [K, C], on the device; the last copy serves its first clients too."""
        if self._counted[0][: len(clients)] != clients:
            self._counted = (clients, self._class_counts[list(clients)].to(self.device))
        return self._counted[1][: len(clients)]

    def _is_stacked(self, name: str, value: Tensor) -> bool:
        return self.server.is_per_client(self, name, value)

    def _stacked_noise(self, batch: ClientBatch, kind: str) -> Message:
        assert batch.x is not None
        if type(self).draw_noise is FederatedMethod.draw_noise:
            return {}
        seed = self.server.seed
        key = (kind, batch.point, batch.split, batch.round, batch.phase, batch.step)
        drawn: list[dict[str, Tensor]] = []
        for client in batch.clients:
            generator = torch_generator(seed, "noise", *key, client, device=self.device)
            drawn.append(self.draw_noise(generator, batch.x.shape[1], kind))
            if not drawn[0]:  # nothing for anybody: whether a step draws does not depend on the client
                return {}
        return {name: torch.stack([own[name] for own in drawn]) for name in drawn[0]}

    def _train_on(
        self, batch: ClientBatch, phase: Phase, optimizer: LightningOptimizer | torch.optim.Optimizer
    ) -> None:
        """One optimizer step of the whole cohort."""
        if batch.phase_start:
            self._start_phase(batch, phase, optimizer)
        losses, named = self._step_losses(batch)
        optimizer.zero_grad()
        losses.sum().backward()  # no gradient scaler to go through: fp16 is refused
        if phase.clip is not None:
            self._clip_each_client(phase.clip)
        if type(self).transform_update is FederatedMethod.transform_update:
            optimizer.step()
        else:
            self._transformed_step(batch, optimizer)
        self._add_to_totals(batch, {"loss": losses, **named})
        if batch.phase_end or any(batch.own_end):
            self._keep_finished(batch, phase, optimizer)

    def _transformed_step(self, batch: ClientBatch, optimizer: LightningOptimizer | torch.optim.Optimizer) -> None:
        """An optimizer step whose update goes through ``transform_update``."""
        count = len(batch.clients)
        trained = [name for name in self.slot_names if self.slots[_slot(name)].requires_grad]
        before = {name: self.slots[_slot(name)].detach().clone() for name in trained}
        optimizer.step()
        update = {name: (self.slots[_slot(name)].detach() - before[name])[:count] for name in trained}
        changed = self._map(self.transform_update, batch.clients, before, update, "transform_update", (batch.phase,))
        changed = _named_tensors(self, "transform_update", changed)
        for name, value in changed.items():
            self.slots[_slot(name)].data[:count] = before[name][:count] + value

    def _add_to_totals(self, batch: ClientBatch, named: Message) -> None:
        """Sum what the steps report, per client of the cohort, and count the steps that reported it."""
        for name, value in named.items():
            if name not in self._totals:
                rows = len(batch.cohort)
                self._totals[name] = (value.detach().new_zeros(rows, *value.shape[1:]), torch.zeros(rows))
            total, steps = self._totals[name]
            total[: len(value)] += value.detach()
            steps[: len(value)] += 1

    def _start_phase(
        self, batch: ClientBatch, phase: Phase, optimizer: LightningOptimizer | torch.optim.Optimizer
    ) -> None:
        """The optimizer's state, this round's rates; only this phase's parameters take gradients."""
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.state.clear()
        if batch.kind == "train":
            for name, row in self._momenta(phase, batch.phase).items():
                momentum = self._bank.rows(row, _owners(batch, phase), self.device)
                inner.state[self.slots[_slot(name)]]["momentum_buffer"] = momentum
        factor = self._schedule_factor(phase)
        for settings, group in zip(inner.param_groups, phase.groups, strict=True):
            settings["lr"] = group.lr * factor
        trained = set(self.parameters_under(name for group in phase.groups for name in group.parameters))
        for name in self.slot_names:
            slot = self.slots[_slot(name)]
            slot.requires_grad_(name in trained)
            slot.grad = None
            if slot.requires_grad:
                _refuse_held_graph(type(self).__name__, name, slot)
        self._finished = {}

    def _schedule_factor(self, phase: Phase) -> float:
        """What this round's learning rates are multiplied with."""
        if phase.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * self.trainer.current_epoch / max(self.trainer.max_epochs or 1, 1)))

    def _clip_each_client(self, limit: float) -> None:
        """Scale every client's own gradient to at most ``limit``; clipping the stack would couple clients."""
        gradients = [slot.grad for slot in self.slots.values() if slot.grad is not None]
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
        scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1,) * (gradient.ndim - 1)))

    def _keep_finished(
        self, batch: ClientBatch, phase: Phase, optimizer: LightningOptimizer | torch.optim.Optimizer
    ) -> None:
        """Set aside what the steps moved of clients at their own last step; write all back when the phase ends.

        Momentum and weight decay go on moving a slot after its client's last step; that counts for nothing.
        """
        momenta = self._momenta(phase, batch.phase) if batch.kind == "train" else {}
        state = getattr(optimizer, "optimizer", optimizer).state
        moved = {name: slot.data for name, slot in self.slot_values().items() if slot.requires_grad}
        moved |= {row: state[self.slots[_slot(name)]]["momentum_buffer"] for name, row in momenta.items()}
        if not batch.phase_end:
            for k, ended in enumerate(batch.own_end):
                if ended:
                    self._finished |= {(k, name): value[k].clone() for name, value in moved.items()}
            return
        for (k, name), value in self._finished.items():
            moved[name][k].copy_(value)
        self._finished = {}
        self._ended_momenta |= {row: (_owners(batch, phase), moved[row]) for row in momenta.values()}

    def on_train_epoch_start(self) -> None:
        """A round begins: its first steps are watched."""
        self._seen = set()

    def training_step(self, block: Block, batch_idx: int) -> None:
        """Some local steps of a cohort, one after the other."""
        optimizers = cast(Any, self.optimizers())
        for step in block.steps:
            if step.kind == "idle":
                continue
            batch = self.data.fill(step)
            optimizer = optimizers[batch.phase] if isinstance(optimizers, list) else optimizers
            self._train_on(batch, self.local_phases()[batch.phase], optimizer)

    @property
    def data(self) -> Any:
        """The datamodule of this run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def end_cohort(self, clients: Sequence[int]) -> dict[int, Message]:
        """Store what stays with the clients and return what they upload: client id to its shared values.

        A client whose loss or whose values are not finite is left out, and everything of its own stays as it was before
        the round.
        """
        values = {name: slot.detach() for name, slot in self.slot_values().items()}
        own = {name: values[name] for name in self.own_names}
        if self.evaluate_local:
            own |= {f"local.{name}": values[name] for name in self.shared_names}
        if self._kept:
            updated = self.map_state(self.after_local_training, clients, values)
            own |= {f"kept.{name}": value for name, value in self._checked_kept(updated).items()}
        extra = self._extra_uploads(clients, values)
        uploads = {name: values[name] for name in self.shared_names + self.disclosed_names} | extra
        losses = [self._totals["loss"][0]] if self._totals else []
        finite = finite_rows([*losses, *values.values(), *extra.values()], len(clients))
        rows = [k for k, all_finite in enumerate(finite) if all_finite]
        held = {name: (clients, value) for name, value in own.items()} | self._ended_momenta
        for name, (owners, value) in held.items():
            self._bank.write(name, [owners[k] for k in rows], value if all(finite) else value[rows])
        self._report(clients, rows)
        return {clients[k]: {n: v[k].clone() for n, v in uploads.items()} for k in rows}

    def _checked_kept(self, updated: Any) -> Message:
        """What ``after_local_training`` gave, if it is all of ``kept_state`` in the same shapes."""
        updated = _named_tensors(self, "after_local_training", updated)
        shapes = {name: tuple(value.shape) for name, value in self._kept.items()}
        if {name: tuple(value.shape) for name, value in updated.items()} != shapes:
            given = {name: tuple(value.shape)[1:] for name, value in updated.items()}
            raise ConfigurationError(
                f"{type(self).__name__}.after_local_training must return all of kept_state, "
                f"{ {name: shape[1:] for name, shape in shapes.items()} } (name: shape); it returns {given}"
            )
        return updated

    def _extra_uploads(self, clients: Sequence[int], values: Message) -> Message:
        if type(self).client_upload is FederatedMethod.client_upload:
            return {}
        totals = {name: total for name, (total, _) in self._totals.items()}
        extra = self._map(self.client_upload, clients, values, totals, "client_upload")
        extra = _named_tensors(self, "client_upload", extra)
        if taken := sorted(set(extra) & {name for name, _ in self.named_parameters()}):
            raise ConfigurationError(
                f"{type(self).__name__}.client_upload returns {taken[0]!r}, which is a parameter; give it another "
                "name, or make the parameter shared or disclosed"
            )
        return extra

    def _report(self, clients: Sequence[int], rows: Sequence[int]) -> None:
        """Means over the steps of the scalars that the steps of some rows of the cohort reported."""
        chosen = list(rows)
        for name, (total, steps) in self._totals.items():
            if total.ndim == 1:
                if name not in self.reports:
                    self.reports[name] = torch.full((self.num_clients,), math.nan, dtype=torch.float64)
                self.reports[name][[clients[k] for k in chosen]] = total.cpu().double()[chosen] / steps[chosen]

    # ------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        """Start a new evaluation of all clients, whose first steps are watched."""
        self.scores = {}
        self._seen = set()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Say whose images got no prediction, since their logits were not finite; they count as wrong.

        Raises:
            ConfigurationError: nobody's got one, or ``data.on_divergence`` says so.
        """
        for (point, split), scores in self.scores.items():
            images, without = scores.images(), scores.without_prediction()
            clients = without.nonzero().flatten().tolist()
            if not clients:
                continue
            said = (
                f"the logits of {int(without.sum())} of {int(images.sum())} images of split {split!r} at point "
                f"{point!r} are not finite (clients {clients[:5]})"
            )
            if torch.equal(without, images) or self.data.on_divergence == "raise":
                raise ConfigurationError(
                    f"nothing to evaluate after round {self.server.finished_rounds}: {said}; lower the learning rate, "
                    "or look at the images and at the frozen weights"
                )
            warnings.warn(f"{said}; they count as wrong", stacklevel=1)

    on_test_epoch_end = on_validation_epoch_end

    def validation_step(self, block: Block, batch_idx: int) -> None:
        """Some steps of a cohort: fit a copy, or score a mini-batch of every client."""
        for step in block.steps:
            batch = self.data.fill(step)
            if batch.first:
                self._received = self.server.message_to(self, batch.cohort)
                self._kept = self._rows_of("kept.", batch.cohort)
                self._fitted = False
            if batch.kind == "evaluate":
                self._score(batch)
            else:
                self._fit_copy(batch)

    test_step = validation_step

    def _score(self, batch: ClientBatch) -> None:
        if batch.step == 0:
            self._values = self._values_to_evaluate(batch)
            self._prepare(batch.cohort, self._values, "evaluate", batch.split)
        logits = self.map_clients(self.client_logits, self._values, batch, "evaluate")
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != cast(Tensor, batch.y).shape:
            given = tuple(logits.shape[1:]) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigurationError(
                f"{self._place('client_logits')} must return logits [B, C] of the {cast(Tensor, batch.y).shape[1]} "
                f"images of a mini-batch; it returns {given}"
            )
        place = (batch.point, batch.split)
        if place not in self.scores:
            self.scores[place] = ClientScores(self.num_clients, logits.shape[-1]).to(self.device)
        self.scores[place].update(logits, cast(Tensor, batch.y), batch.clients)

    def _values_to_evaluate(self, batch: ClientBatch) -> Message:
        """Per parameter name a row for each client of the cohort; what all have in common is left out."""
        if self._fitted:
            return self.slot_values()
        values = {name: self._bank.rows(name, batch.cohort, self.device) for name in self.own_names}
        if batch.point == "local":
            return values | self._rows_of("local.", batch.cohort)
        sent = self._received
        return values | {n: sent[n] for n in self.shared_names if n in sent and self._is_stacked(n, sent[n])}

    def _fit_copy(self, batch: ClientBatch) -> None:
        """A step on copies of the clients, before these copies are evaluated."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fine-tuning before evaluation needs gradients: set trainer.inference_mode to false"
            )
        phases = self.phases(batch.kind)
        if not self._fitted:
            self.begin_cohort(batch.cohort, self._received, batch.kind)
            self._copy_optimizers = [self._make_optimizer(phase) for phase in phases]
            self._fitted = True
        with torch.enable_grad():
            self._train_on(batch, phases[batch.phase], self._copy_optimizers[batch.phase])
        if batch.kind == "adapt" and batch.phase_end:
            values = {name: slot.detach() for name, slot in self.slot_values().items()}
            for name, value in self.server.adapt_new_clients(self, batch.cohort, batch.phase, values).items():
                self.slots[_slot(name)].data.copy_(value)

    # ------------------------------------------------------------------ memory

    def bytes_per_client(self, x: Tensor, y: Tensor) -> int:
        """Memory one more client takes in a cohort: its slots, gradients and momenta, and what autograd saves.

        Measured, not guessed: one forward pass of one client with hooks on the saved tensors.

        Args:
            x: images of one mini-batch, [1, B, 3, H, W].
            y: labels, [1, B].
        """
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> None:
            # Nothing is kept, since a node that holds its own output would keep the whole graph alive.
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

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
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            self.map_clients(self.client_loss, self.slot_values(), batch, "train")
        activations = sum(size for pointer, size in saved.items() if pointer not in frozen)
        slots = sum(slot.numel() * slot.element_size() for slot in self.slots.values())
        return math.ceil(activations + 4 * slots + x.numel() * x.element_size())


def _mistake(error: Exception) -> str | None:
    """What is wrong in a client function that raised this, in words; None where it is no mistake known here."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Client | MiniBatch):
        noun = "client" if isinstance(error.obj, Client) else "batch"
        words = f"asks for {noun}.{error.name}; a {noun} has {', '.join(field.name for field in fields(error.obj))}"
        return words + (
            ": what tells clients apart belongs into personal parameters or kept_state" if noun == "client" else ""
        )
    said = str(error)
    return next((words for phrase, words in MISTAKES if phrase in said), None)


def _named_tensors(method: nn.Module, name: str, made: Any) -> Message:
    """What a function of the method returned, if it is a dict of tensors.

    Raises:
        ConfigurationError: it is something else.
    """
    found: Any = type(made).__name__
    if isinstance(made, dict):
        found = {key: type(value).__name__ for key, value in made.items() if not isinstance(value, Tensor)}
        if not found:
            return made
    raise ConfigurationError(f"{type(method).__name__}.{name} must return a dict of tensors; it returns {found}")


def _dropped(module: nn.Module) -> float:
    """The part of its input that a dropout module leaves out in training mode; 0 for all others."""
    if isinstance(module, _DropoutNd):
        return module.p
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout
    return getattr(module, "drop_prob", None) or 0.0 if type(module).__module__.startswith("timm.") else 0.0


def _graphs_made() -> int:
    """How many graphs torch.compile has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _refuse_held_graph(method: str, name: str, slot: Tensor) -> None:
    """Raise if a graph of an earlier cohort still lives: torch would sum gradients to that cohort's shape, silently."""
    accumulator = cast(Any, slot.view_as(slot).grad_fn).next_functions[0][0]
    if tuple(accumulator._input_metadata[0].shape) != tuple(slot.shape):
        raise RuntimeError(
            f"{method} holds a tensor of an earlier cohort with the graph that made it, which spoils the gradient of "
            f"{name!r}; detach what is kept from a step"
        )


def _on_mini_batch(
    function: Callable[[Client, MiniBatch], Any], phase: int, split: str, client: Client, rows: dict[str, Any]
) -> Any:
    """Call ``function(client, mini_batch)``, the mini-batch made of its tensors by name."""
    return function(client, MiniBatch(phase=phase, split=split, **rows))


def _owners(batch: ClientBatch, phase: Phase) -> Sequence[int]:
    """Whose rows of the bank hold the momenta of a cohort: its clients', or the first for all."""
    return batch.cohort if phase.optimizer_state == "client" else (0,)


def _first(rows: Message, count: int) -> Message:
    """The first ``count`` rows of every tensor; the tensors themselves if they have no more."""
    return {name: value if len(value) == count else value[:count] for name, value in rows.items()}


def _slot(name: str) -> str:
    """A parameter's key among the slots: module names may not hold a dot."""
    return name.replace(".", "/")
