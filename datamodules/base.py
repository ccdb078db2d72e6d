"""The LightningDataModule of every data set: a source of images, a partition over clients, and how they are batched."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmark.batch import ClientBatch, EvaluationPlan, RoundPlan
from benchmark.errors import ConfigurationError
from benchmark.metrics import IGNORE
from benchmark.seeds import derived_seed, numpy_generator, torch_generator
from datamodules.manifest import make_manifest, manifest_hash
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform

#: Widest cohort that ``auto`` picks. On a CPU one client keeps all cores busy; beyond 64 a GPU gains no more.
WIDEST = {"cpu": 1, "cuda": 64}


class FederatedDataModule(LightningDataModule):
    """Clients' images, and the protocol by which clients take part.

    The images live in memory as uint8, on the device if they fit; a loader yields rows of the pool, and the images are
    gathered, resized, augmented and normalised on the device.

    Args:
        source: the data set.
        partition: which client holds which images.
        transform: from stored images to the backbone's input.
        batch_size: B, a client's mini-batch.
        drop_last: drop a client's incomplete last batch if it has at least one full batch.
        participation: fraction of the clients that train in a round (at least one does).
        clients_per_round: the same as a number; wins over ``participation``.
        cohort_width: clients stepped together; changes speed and memory, not results. ``auto`` picks by memory.
        eval_batch_size: images of a client in one evaluation step.
        val_fraction: part of each client's training images held out as split ``val``, to tune on; stratified where the
            classes allow it.
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
        batch_size: int = 64,
        drop_last: bool = False,
        participation: float = 1.0,
        clients_per_round: int | None = None,
        cohort_width: int | Literal["auto"] = "auto",
        eval_batch_size: int = 256,
        val_fraction: float = 0.0,
        num_workers: int = 0,
        seed: int = 0,
        partition_seed: int | None = 0,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ConfigurationError(f"data.{name} must be at least 1, got {value}")
        if cohort_width != "auto" and cohort_width < 1:
            raise ConfigurationError(
                f"data.cohort_width must be at least 1 (clients stepped together) or auto, got {cohort_width}"
            )
        if not 0 < participation <= 1:
            raise ConfigurationError(f"data.participation must be a fraction in (0, 1], got {participation}")
        if not 0 <= val_fraction < 1:
            raise ConfigurationError(f"data.val_fraction must be in [0, 1), got {val_fraction}")
        self.source = source
        self.partition = partition
        self.transform = transform or ImageTransform()
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
        self.training_clients = list(range(self.num_clients))
        if clients_per_round is None:
            clients_per_round = max(1, round(participation * self.num_clients))
        if not 1 <= clients_per_round <= self.num_clients:
            raise ConfigurationError(
                f"data.clients_per_round must be between 1 and the number of clients, {self.num_clients}; got "
                f"{clients_per_round}"
            )
        self.participants = clients_per_round
        self._pool: ImagePool | None = None
        self._width: int | None = None
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def pool(self) -> ImagePool:
        """All images; read when the data are set up."""
        assert self._pool is not None, "setup() comes first"
        return self._pool

    def setup(self, stage: str = "fit") -> None:
        """Read the images and divide them.

        Raises:
            ConfigurationError: data missing or damaged, or a partition that the data do not allow.
        """
        if self._pool is not None:
            return
        pool = self.source.load()
        splits = self.partition.split(pool, numpy_generator(self.partition_seed, "partition"))
        self._pool = pool
        self.splits = splits
        self.train_indices, self.held_out = self._hold_out(splits)
        self.train_sizes = {client: len(rows) for client, rows in self.train_indices.items()}
        self.manifest = make_manifest(self.partition, pool, splits, self.source, self.partition_seed)

    def _hold_out(self, splits: ClientSplits) -> tuple[dict[int, np.ndarray], dict[str, dict[int, np.ndarray]]]:
        """Training rows, and the rows to evaluate on by split."""
        train = dict(enumerate(splits.train))
        held_out = {"test": dict(enumerate(splits.test))}
        if self.val_fraction:
            held_out["val"] = {}
            for client, rows in train.items():
                train[client], held_out["val"][client] = self._cut_validation(client, rows)
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

    def _loader(self, plan: Dataset[ClientBatch], *key: int | str) -> DataLoader[ClientBatch]:
        # A generator of its own: otherwise the loader draws from the global one, at another moment after a resume.
        if self.num_workers:
            plan = _Gathered(plan, self.pool)
        return DataLoader(
            plan,
            batch_size=None,
            num_workers=self.num_workers,
            generator=torch_generator(self.seed, "loader", *key),
        )

    def train_dataloader(self) -> DataLoader[ClientBatch]:
        """The stacked steps of the round that begins."""
        method, trainer = self._method(), self.trainer
        assert trainer is not None
        round = trainer.current_epoch + 1
        clients = method.server.select(round)
        plan = RoundPlan(
            clients,
            self.train_indices,
            method.planned_phases("train"),
            self.batch_size,
            self.drop_last,
            self.width(),
            self.seed,
            round,
            self.transform.augment_numbers,
        )
        return self._loader(plan, "train", round)

    def _method(self) -> Any:
        assert self.trainer is not None
        return self.trainer.lightning_module

    def _evaluation(self, held_out: Mapping[str, Mapping[int, np.ndarray]]) -> DataLoader[ClientBatch]:
        # Its draws do not depend on the round: the same state has the same scores whenever it is evaluated.
        method = self._method()
        clients = list(range(self.num_clients))
        finetune = method.planned_phases("finetune")
        training = (
            RoundPlan(
                clients,
                self.train_indices,
                finetune,
                self.batch_size,
                self.drop_last,
                self.width(),
                self.seed,
                0,
                self.transform.augment_numbers,
            )
            if finetune
            else None
        )
        points = ("server", "local") if method.evaluate_local else ("server",)
        plan = EvaluationPlan(clients, held_out, training, points, self.eval_batch_size, self.width())
        return self._loader(plan, "evaluate")

    def val_dataloader(self) -> DataLoader[ClientBatch]:
        """Every client on its held-out images: split ``test``, and ``val`` if there is one."""
        return self._evaluation(self.held_out)

    def test_dataloader(self) -> DataLoader[ClientBatch]:
        """Every client on its test images."""
        return self._evaluation({"test": self.held_out["test"]})

    # ------------------------------------------------------------------ on the device

    def on_after_batch_transfer(self, batch: ClientBatch, dataloader_idx: int) -> ClientBatch:
        """Gather, augment and normalise the images of a step."""
        if batch.kind == "idle":
            return batch
        if batch.x is None:
            images, labels = self._resident(batch.index.device)
            batch = _gather(batch, images, labels)
        assert batch.x is not None
        return replace(batch, x=self.transform(batch.x, batch.noise))

    def _resident(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The pool on the device if it takes less than half of the free memory there, else where it lies."""
        if device not in self._on_device:
            images, labels = self.pool.images, self.pool.labels
            if device.type == "cuda" and images.numel() < torch.cuda.mem_get_info(device)[0] // 2:
                images, labels = images.to(device), labels.to(device)
            self._on_device[device] = (images, labels)
        return self._on_device[device]

    def width(self) -> int:
        """Clients stepped together; ``auto`` measures what one client takes and fills 60 % of the free memory."""
        if self.cohort_width != "auto":
            return self.cohort_width
        if self._width is None and WIDEST.get(self._method().device.type, 1) == 1:
            self._width = 1
        if self._width is None:
            method = self._method()
            device = method.device
            rows = torch.from_numpy(self.train_indices[self.training_clients[0]][:1]).repeat(self.batch_size)
            x = self.transform(self.pool.images[rows].unsqueeze(0), None).to(device)
            need = method.bytes_per_client(x, self.pool.labels[rows].unsqueeze(0).to(device))
            if device.type == "cuda":
                free = torch.cuda.mem_get_info(device)[0]
            else:
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            self._width = max(1, min(int(0.6 * free / need), WIDEST.get(device.type, 1), self.participants))
        return self._width

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resume must find again: the split, and the width that ``auto`` chose (for bit-identical
        arithmetic).
        """
        return {"manifest": manifest_hash(self.manifest), "width": self._width, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the width; refuse another split.

        Raises:
            ConfigurationError: the checkpoint was made with other data, another partition or another seed.
        """
        if state_dict["seed"] != self.seed:
            raise ConfigurationError(
                f"the checkpoint is of another configuration: it was made with seed {state_dict['seed']}, this run has "
                f"{self.seed}"
            )
        if state_dict["manifest"] != manifest_hash(self.manifest):
            raise ConfigurationError(
                "the checkpoint is of another configuration: it was made with another data set or partition than "
                "this run's; "
                "give the data it was made with, or start without --ckpt_path"
            )
        self._width = state_dict["width"]


def _gather(batch: ClientBatch, images: Tensor, labels: Tensor) -> ClientBatch:
    """Put the images (uint8) and labels of a step into it."""
    rows = batch.index if batch.index.device == labels.device else batch.index.to(labels.device)
    x = images[rows].to(batch.index.device)
    y = labels[rows].to(batch.index.device).masked_fill(~batch.mask, IGNORE)
    return replace(batch, x=x, y=y)


class _Gathered(Dataset[ClientBatch]):
    """A plan whose steps bring their images: what loader processes do."""

    def __init__(self, plan: Dataset[ClientBatch], pool: ImagePool) -> None:
        self.plan = plan
        self.pool = pool

    def __len__(self) -> int:
        return len(self.plan)  # type: ignore[arg-type]

    def __getitem__(self, item: int) -> ClientBatch:
        batch = self.plan[item]
        return batch if batch.kind == "idle" else _gather(batch, self.pool.images, self.pool.labels)
