"""The LightningDataModule of every data set: a source of images, a partition over clients, and how they are batched."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmark.batch import Block, Blocks, ClientBatch, EvaluationPlan, RoundPlan
from benchmark.errors import ConfigurationError
from benchmark.method import FederatedMethod
from benchmark.metrics import IGNORE
from benchmark.ranges import AboveZero, BelowOne, Checked, FewOrNone, PositiveInt, Seed
from benchmark.results import manifest_hash
from benchmark.seeds import derived_seed, numpy_generator, torch_generator
from datamodules.manifest import make_manifest
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform

#: Widest cohort that ``auto`` picks; beyond it nothing gains.
WIDEST = 64
#: Bytes that a step of stacked clients takes on a CPU at most. Where one client takes as much, arithmetic keeps all
#: cores busy; smaller steps share the cost of starting operations (see ``python -m benchmark.speed widths``).
CPU_STEP = 2**28

#: Bytes of what clients differ in (whole models, with some methods) that are tested together at most.
EVALUATED_STATE = 2**32

#: Of ``torch.compile``; the others tune themselves anew in each process, so that a resumed run would differ.
CompileMode = Literal["default", "reduce-overhead"]

#: Steps handed to the Trainer at once; with loader processes, which send the images themselves, one.
BLOCK = 16


class FederatedDataModule(Checked, LightningDataModule):
    """Clients' images, and the protocol by which clients take part.

    The images live in memory as uint8, on the device if they fit; a loader yields rows of the pool, and the images are
    gathered, resized, augmented and normalised on the device.

    Args:
        source: the data set.
        partition: which client holds which images.
        transform: from stored images to the backbone's input; what it leaves open is the backbone's.
        batch_size: B, a client's mini-batch.
        drop_last: drop a client's incomplete last batch if it has at least one full batch. The protocols say it for
            pFedPT's comparison (PFLlib) and the CLIP family (Dassl), whose files in ``configs/data`` set it; the
            others keep every batch.
        participation: fraction of the clients that train in a round (at least one does).
        clients_per_round: the same as a number; wins over ``participation``.
        cohort_width: clients stepped together; changes speed and memory, not results. ``auto`` picks by memory:
            what fits on a GPU; on a CPU several clients where their steps are small.
        eval_batch_size: images in one evaluation step: of one client, or of several with few images.
        val_fraction: part of each client's training images held out as split ``val``, to tune on; stratified where the
            classes allow it.
        new_clients: fraction of the clients, drawn by ``partition_seed``, that never train; they are tested as split
            ``new``, after a copy was fitted as the method says.
        cache_features: compute what the method makes of an image with frozen parts once for each image, where the
            transform is deterministic; changes speed and memory, not results. ``auto`` does so if it fits in half of
            the free memory.
        on_divergence: what becomes of a client whose losses or values were not finite in a round: ``drop`` takes the
            round without its upload, and leaves everything of its own as it was before; ``raise`` ends the run, as do
            rounds in which no client is left. The same holds for logits that are not finite: as ``drop``, the images
            count as wrong.
        compile_steps: a mode of ``torch.compile``, ``default`` or ``reduce-overhead`` (CUDA graphs), that makes one
            program of a stacked training step; None runs its operations one by one. Results agree up to rounding;
            the gradients of each program's first step are compared. Compiling takes a minute.
        num_workers: loader processes that gather the images; 0 gathers on the device.
        seed: seed of the run: order of batches, selection of clients, augmentation. Linked to ``seed_everything``.
        partition_seed: seed of the partition alone, so that all seeds of a run share one split; None takes ``seed``.

    Raises:
        ConfigurationError: an argument out of range.
    """

    def __init__(
        self,
        source: ImageSource,
        partition: Partition,
        transform: ImageTransform | None = None,
        batch_size: PositiveInt = 64,
        drop_last: bool = False,
        participation: AboveZero = 1.0,
        clients_per_round: PositiveInt | None = None,
        cohort_width: PositiveInt | Literal["auto"] = "auto",
        eval_batch_size: PositiveInt = 256,
        val_fraction: BelowOne = 0.0,
        new_clients: BelowOne = 0.0,
        cache_features: bool | Literal["auto"] = "auto",
        on_divergence: Literal["drop", "raise"] = "drop",
        compile_steps: CompileMode | None = None,
        num_workers: FewOrNone = 0,
        seed: Seed = 0,
        partition_seed: Seed | None = 0,
    ) -> None:
        super().__init__()
        self.source = source
        self.partition = partition
        self.transform = self._transform = transform or ImageTransform()
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.cohort_width = cohort_width
        self.eval_batch_size = eval_batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed
        self.partition_seed = seed if partition_seed is None else partition_seed
        self.client_names = partition.client_names(source)
        self.num_clients = len(self.client_names)
        self.num_classes = len(source.class_names)
        self.class_names = list(source.class_names)
        order = numpy_generator(self.partition_seed, "new clients").permutation(self.num_clients).tolist()
        new = min(round(new_clients * self.num_clients), self.num_clients - 1)
        self.new_clients = sorted(order[self.num_clients - new :])
        self.training_clients = sorted(order[: self.num_clients - new])
        available = len(self.training_clients)
        if clients_per_round is None:
            clients_per_round = max(1, round(participation * available))
        if clients_per_round > available:
            raise ConfigurationError(
                f"data.clients_per_round must be between 1 and the number of clients that train, {available}; got "
                f"{clients_per_round}"
            )
        self.participants = clients_per_round
        self.cache_features = cache_features
        self.on_divergence = on_divergence
        self.compile_steps = compile_steps
        #: set from the partition: per split that has one, its own classes in the order in which labels are counted
        self.label_spaces: dict[str, tuple[int, ...]] = {}
        self._positions: dict[tuple[str, torch.device], Tensor] = {}
        self._tables: _FeatureTables | None = None
        self._memory: _FeatureTables | None = None
        self._pool: ImagePool | None = None
        self._width: int | None = None
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def pool(self) -> ImagePool:
        """All images; read when the data are set up."""
        assert self._pool is not None, "setup() comes first"
        return self._pool

    def setup(self, stage: str = "fit") -> None:
        """Read the images and divide them; with a Trainer, match them to the backbone of its method.

        Raises:
            ConfigurationError: data missing or damaged, a partition that the data do not allow, or a transform that the
                backbone does not.
        """
        if self._pool is None:
            self._read()
        if self.trainer is not None:
            self.match(self._method())

    def match(self, method: nn.Module) -> None:
        """Take from the method's backbone, if it says so, the size and the statistics of the pixels it takes.

        Raises:
            ConfigurationError: the transform was given others.
        """
        for module in method.modules():
            if all(hasattr(module, name) for name in ("image_size", "mean", "std", "pretrained")):
                self.transform = self._transform.matched(module)
                return

    def _read(self) -> None:
        pool = self.source.load()
        splits = self.partition.split(pool, numpy_generator(self.partition_seed, "partition"))
        self._pool = pool
        self.splits = splits
        self.label_spaces = dict(splits.label_spaces)
        self.train_indices, self.held_out = self._hold_out(splits)
        self.train_sizes = {client: len(rows) for client, rows in self.train_indices.items()}
        labels = pool.labels.numpy()
        counts = [
            np.bincount(labels[rows], minlength=self.num_classes) for _, rows in sorted(self.train_indices.items())
        ]
        #: training images of each class, without those held out, [N, C]
        self.class_counts = torch.from_numpy(np.stack(counts))
        self.manifest = make_manifest(self.partition, pool, splits, self.source, self.partition_seed)

    def _hold_out(self, splits: ClientSplits) -> tuple[dict[int, np.ndarray], dict[str, dict[int, np.ndarray]]]:
        """Training rows, and the rows to evaluate on by split."""
        train = dict(enumerate(splits.train))
        held_out: dict[str, dict[int, np.ndarray]] = {}
        for name, lists in {"test": splits.test, **splits.others}.items():
            held_out[name] = {client: lists[client] for client in self.training_clients}
        if self.val_fraction:
            held_out["val"] = {}
            for client in self.training_clients:
                train[client], held_out["val"][client] = self._cut_validation(client, train[client])
        if self.new_clients:
            held_out["new"] = {client: splits.test[client] for client in self.new_clients}
        if "train" in self.label_spaces:
            self.label_spaces |= {n: self.label_spaces["train"] for n in ("val", "new") if n in held_out}
        return train, held_out

    def _cut_validation(self, client: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut a client's training rows; images that show the same thing stay together."""
        groups, which = np.unique(self.pool.group.numpy()[rows], return_inverse=True)
        if len(groups) < 2:
            raise ConfigurationError(
                f"data.val_fraction={self.val_fraction}: client {client} has too few training images to hold any out"
            )
        labels = self.pool.labels.numpy()[rows][np.unique(which, return_index=True)[1]]
        held = max(1, round(self.val_fraction * len(groups)))
        if held == len(groups):
            raise ConfigurationError(
                f"data.val_fraction={self.val_fraction} leaves client {client} none of its {len(rows)} images to train "
                "on; lower it"
            )
        counts = np.unique(labels, return_counts=True)[1]
        allowed = counts.min() >= 2 and held >= len(counts) and len(groups) - held >= len(counts)
        keep, cut = train_test_split(
            np.arange(len(groups)),
            test_size=held,
            stratify=labels if allowed else None,
            random_state=derived_seed(self.partition_seed, "val", client) % 2**32,
        )
        return rows[np.isin(which, keep)], rows[np.isin(which, cut)]

    # ------------------------------------------------------------------ loaders

    def _loader(self, plans: list[RoundPlan | EvaluationPlan], *key: int | str) -> DataLoader[Block]:
        # A generator of its own: otherwise the loader draws from the global one, at another moment after a resume.
        blocks: Dataset[Block] = Blocks(plans, 1 if self.num_workers else BLOCK)
        if self.num_workers:
            blocks = _Gathered(blocks, self.pool)
        return DataLoader(
            blocks,
            batch_size=None,
            num_workers=self.num_workers,
            generator=torch_generator(self.seed, "loader", *key),
        )

    def train_dataloader(self) -> DataLoader[Block]:
        """The stacked steps of the round that begins."""
        assert self.trainer is not None
        round = self.trainer.current_epoch + 1
        return self._loader([self._plan(self._method().server.select(round), "train", round)], "train", round)

    def _method(self) -> Any:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def _plan(self, clients: list[int], kind: str, round: int) -> RoundPlan:
        return RoundPlan(
            clients,
            self.train_indices,
            self._method().planned_phases(kind),
            self.batch_size,
            self.drop_last,
            self.width(),
            self.seed,
            round,
            self.transform.augment_numbers,
        )

    def _evaluation(self, held_out: Mapping[str, Mapping[int, np.ndarray]]) -> DataLoader[Block]:
        # Its draws do not depend on the round: the same state has the same scores whenever it is evaluated.
        method = self._method()
        names = method.own_names + (method.shared_names if method.evaluate_local else [])
        own = sum(value.numel() * value.element_size() for value in map(method.template, names))
        most = max(1, EVALUATED_STATE // max(own, 1))
        plans: list[RoundPlan | EvaluationPlan] = []
        for clients, kind, splits in (
            (self.training_clients, "finetune", [name for name in held_out if name != "new"]),
            (self.new_clients, "adapt", ["new"]),
        ):
            if clients:
                fitting = self._plan(clients, kind, 0) if method.phases(kind) else None
                points = ("server", "local") if method.evaluate_local and kind == "finetune" else ("server",)
                rows = {name: held_out[name] for name in splits}
                plans.append(EvaluationPlan(clients, rows, fitting, points, self.eval_batch_size, most))
        return self._loader(plans, "evaluate")

    def val_dataloader(self) -> DataLoader[Block]:
        """Every client on its held-out images: split ``test``, and whatever other splits there are."""
        return self._evaluation(self.held_out)

    def test_dataloader(self) -> DataLoader[Block]:
        """Every client on its test images."""
        return self._evaluation({name: rows for name, rows in self.held_out.items() if name != "val"})

    # ------------------------------------------------------------------ on the device

    def fill(self, batch: ClientBatch) -> ClientBatch:
        """Gather the images of a step, augment and normalise them, or take what is known of them."""
        tables = self._feature_tables()
        features = tables.rows(batch) if tables is not None else None
        if batch.x is None:
            images, labels = self._resident(batch.index.device)
            needed = features is None or self._method().needs_images
            batch = _gather(batch, images if needed else images[:, :0], labels)
        assert batch.x is not None
        assert batch.y is not None
        y = batch.y
        if batch.split in self.label_spaces:
            y = self._positions_in(batch.split, y.device)[y.clamp(min=0)]
            y = y.masked_fill(~batch.mask, IGNORE)
        x = batch.x if batch.x.shape[2] == 0 else self._input(batch.x, batch.noise)
        return replace(batch, x=x, y=y, features=features)

    def _input(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """Images as the backbone takes them, in the method's type of numbers."""
        return self.transform(images, noise).to(self._method().dtype)

    def _positions_in(self, split: str, device: torch.device) -> Tensor:
        """Per class its position in the split's label space; IGNORE where it is not in it."""
        if (split, device) not in self._positions:
            positions = torch.full((self.num_classes,), IGNORE)
            classes = self.label_spaces[split]
            positions[list(classes)] = torch.arange(len(classes))
            self._positions[split, device] = positions.to(device)
        return self._positions[split, device]

    def _resident(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The pool on the device if it takes less than half of the free memory there, else where it lies."""
        if device not in self._on_device:
            images, labels = self.pool.images, self.pool.labels
            if device.type != "cpu" and images.numel() < _free_memory(device) // 2:
                images, labels = images.to(device), labels.to(device)
            self._on_device[device] = (images, labels)
        return self._on_device[device]

    def _feature_tables(self) -> "_FeatureTables | None":
        """What the method's frozen parts make of each image, computed at the first step that asks for it."""
        method = self._method()
        if self.cache_features is False or type(method).frozen_features is FederatedMethod.frozen_features:
            return None
        if self._tables is None:
            held = [rows for split in self.held_out.values() for rows in split.values()]
            trained = [] if self.transform.augment_numbers else list(self.train_indices.values())
            self._tables = _FeatureTables(self, np.unique(np.concatenate(held + trained)))
        return self._tables if self._tables.complete else None

    def memory(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """What the method's frozen parts make of these clients' own training images, without augmentation.

        Args:
            clients: K client ids.

        Returns:
            Per name of ``frozen_features`` [K, n, ...], ``label`` int64 [K, n] and ``mask`` bool [K, n], with n the
            training images of the largest client; ``mask`` is False beyond a client's own.
        """
        if self._memory is None:
            tables = self._feature_tables()
            rows = np.unique(np.concatenate(list(self.train_indices.values())))
            held = tables is not None and not tables.augmented
            self._memory = tables if held else _FeatureTables(self, rows, limited=False)
        assert self._memory is not None
        index = torch.zeros(len(clients), max(self.train_sizes.values()), dtype=torch.int64)
        mask = torch.zeros(index.shape, dtype=torch.bool)
        for k, client in enumerate(clients):
            own = torch.from_numpy(self.train_indices[client])
            index[k, : len(own)], mask[k, : len(own)] = own, True
        device = self._memory.position.device
        label = self.pool.labels[index].to(device)
        return {**self._memory.at(index.to(device)), "label": label, "mask": mask.to(device)}

    def width(self) -> int:
        """Clients stepped together.

        ``auto`` measures what one client takes, and fills 60 % of a GPU's free memory or ``CPU_STEP`` bytes.
        """
        if self.cohort_width != "auto":
            return self.cohort_width
        if self._width is None:
            widest, device = min(WIDEST, self.participants), self._method().device
            room = int(0.6 * _free_memory(device)) if device.type == "cuda" else CPU_STEP
            # On a CPU a large network's mini-batch takes seconds; one image shows that it is large.
            for images in (1, min(self.batch_size, max(self.train_sizes.values()))):
                if widest > 1:
                    widest = min(widest, max(1, room // self._bytes_per_client(images)))
            self._width = widest
        return self._width

    def _bytes_per_client(self, images: int) -> int:
        """Memory of one client's step with so many images."""
        method = self._method()
        rows = torch.from_numpy(self.train_indices[self.training_clients[0]][:1]).repeat(images)
        x = self._input(self.pool.images[rows].unsqueeze(0).to(method.device), None)
        return method.bytes_per_client(x, self.pool.labels[rows].unsqueeze(0).to(method.device))

    # ------------------------------------------------------------------ checkpoints

    @cached_property
    def _manifest_hash(self) -> str:
        """Of the split; made once, since every round's checkpoint holds it."""
        return manifest_hash(self.manifest)

    def state_dict(self) -> dict[str, Any]:
        """What a resume must find again: the split, the images, and the width that ``auto`` chose (for bit-identical
        arithmetic).
        """
        images = self.manifest["images_sha256"]
        return {"manifest": self._manifest_hash, "images": images, "width": self._width, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the width; refuse another split, and other images.

        Raises:
            ConfigurationError: the checkpoint was made with other data, another partition or another seed.
        """
        if state_dict["seed"] != self.seed:
            raise ConfigurationError(
                f"the checkpoint is of another configuration: it was made with seed {state_dict['seed']}, this run has "
                f"{self.seed}"
            )
        if state_dict["manifest"] != self._manifest_hash:
            raise ConfigurationError(
                "the checkpoint is of another configuration: it was made with another data set or partition than "
                "this run's; "
                "give the data it was made with, or start without --ckpt_path"
            )
        if state_dict.get("images") != self.manifest["images_sha256"]:
            raise ConfigurationError(
                "the checkpoint was made with other images than this run reads: the partition and the labels are the "
                "same, the pixels are not; give the images it was made with, or start without --ckpt_path"
            )
        self._width = state_dict["width"]


def _gather(batch: ClientBatch, images: Tensor, labels: Tensor) -> ClientBatch:
    """Put the images (uint8) and labels of a step into it."""
    rows = batch.index if batch.index.device == labels.device else batch.index.to(labels.device)
    x = images[rows].to(batch.index.device)
    y = labels[rows].to(batch.index.device).masked_fill(~batch.mask, IGNORE)
    return replace(batch, x=x, y=y)


class _Gathered(Dataset[Block]):
    """Blocks whose steps bring their images: what loader processes do."""

    def __init__(self, blocks: Dataset[Block], pool: ImagePool) -> None:
        self.blocks = blocks
        self.pool = pool

    def __len__(self) -> int:
        return len(self.blocks)  # type: ignore[arg-type]

    def __getitem__(self, item: int) -> Block:
        steps = self.blocks[item].steps
        images, labels = self.pool.images, self.pool.labels
        return Block(tuple(step if step.kind == "idle" else _gather(step, images, labels) for step in steps))


class _FeatureTables:
    """Per name of ``frozen_features`` one row for each image that is ever shown without augmentation.

    Filled in one pass over the images in a fixed order, so that it does not depend on cohorts or on when a run was
    resumed.
    """

    def __init__(self, data: FederatedDataModule, rows: np.ndarray, limited: bool = True) -> None:
        method = data._method()
        device = method.device
        self.augmented = bool(data.transform.augment_numbers)
        self.position = torch.full((len(data.pool.labels),), -1, device=device)
        self.position[torch.from_numpy(rows).to(device)] = torch.arange(len(rows), device=device)
        self.tables: dict[str, Tensor] = {}
        self.complete = False
        images = data._resident(device)[0]
        with torch.no_grad():
            for start in range(0, len(rows), data.eval_batch_size):
                chosen = torch.from_numpy(rows[start : start + data.eval_batch_size]).to(images.device)
                made = method.frozen_features(data._input(images[chosen].to(device), None))
                if not self.tables:
                    need = sum(v[0].numel() * v.element_size() for v in made.values()) * len(rows)
                    if limited and data.cache_features == "auto" and need > _free_memory(device) // 2:
                        return
                    self.tables = {n: v.new_empty(len(rows), *v.shape[1:]) for n, v in made.items()}
                for name, value in made.items():
                    self.tables[name][start : start + len(chosen)] = value
        self.complete = True

    def rows(self, batch: ClientBatch) -> dict[str, Tensor] | None:
        """The features of a step's images, per name [K, B, ...]; None for augmented ones."""
        if self.augmented and batch.kind != "evaluate":
            return None
        return self.at(batch.index)

    def at(self, index: Tensor) -> dict[str, Tensor]:
        """The features of rows of the pool, per name the shape of ``index`` followed by a feature's own."""
        at = self.position[index]
        return {name: table[at] for name, table in self.tables.items()}


def _free_memory(device: torch.device) -> int:
    """Free bytes of the device, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
