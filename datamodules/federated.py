"""The LightningDataModule of every data set: a source of images, a partition over clients, and how they are batched."""

import logging
import time
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from benchmark.engine.batches.loaders import Loaders
from benchmark.engine.batches.pool import Images
from benchmark.engine.plan.work import Share, Shown
from benchmark.errors import ConfigurationError
from benchmark.federation import CorruptedRows, Federation, Holdings, Terms
from benchmark.hostile import hostile_clients
from benchmark.own_metrics import chosen_metrics
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.ranges import AboveZero, BelowOne, Checked, FewOrNone, PositiveInt, Seed, UnitInterval, check_share
from benchmark.records.kept_rounds import Keep
from benchmark.seeds import numpy_generator
from datamodules.corruptions import CorruptedTests
from datamodules.label_orders import flipped, reordered
from datamodules.manifest import OF_THE_STREAM, FromManifest, record_split
from datamodules.ood_stream import ForeignImages, OODStream
from datamodules.partition import ClientSplits, Partition
from datamodules.partition.client_rows import ByClient, ClientRows, Rows, class_counts
from datamodules.scoring import checked_scoring
from datamodules.source import ImagePool, ImageSource, load_pool, require_names, require_training_images
from datamodules.split_record import Manifest, SplitRecord
from datamodules.transform import ImageTransform
from datamodules.validation import cut_validation

log = logging.getLogger(__name__)


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
            pFedPT's comparison (PFLlib) and the CLIP family (Dassl), and most of their files in ``configs/partitions``
            set it; the others keep every batch.
        participation: fraction of the clients that train in a round (at least one does).
        clients_per_round: the same as a number; wins over ``participation``.
        clients_at_once: clients stepped together; changes speed and memory, not results. ``auto`` picks by memory:
            what fits on a GPU; on a CPU several clients where their steps are small.
        eval_batch_size: images in one evaluation step: of one client, or of several with few images.
        val_fraction: part of each client's training images held out as split ``val``, to tune on; stratified where the
            classes allow it.
        label_orders: G; above 1 the clients conflict: client k counts the classes in order k mod G (see
            :func:`datamodules.label_orders.reordered`).
        label_flipping: beta; ``floor(beta N)`` of the clients that train are hostile, and have class C - 1 - y in place
            of y on their training images (see :func:`datamodules.label_orders.flipped`). They are drawn by ``seed``,
            the same ones as :class:`benchmark.robust.Byzantine` draws.
        record_privacy: hides every single image in local training (see
            :class:`benchmark.privacy.record_level.RecordLevelPrivacy`), for example ``{clip: 1.0, target_epsilon: 8}``.
        val_only: score split ``val`` and no other: no test image is evaluated, as where a tuning chooses.
        evaluate_local: also score every client that has trained as its last local training left it (point ``local``),
            besides after the aggregation (point ``server``); the shared parameters are kept for each client then. None:
            as the method has it.
        metrics: ``clinical`` scores more than accuracies and loss: sensitivity, specificity, predictive values, kappa,
            Matthews' coefficient, AUROC, average precision, calibration error and Brier score, per client and pooled.
            None is ``basic``. A list may hold ``clinical`` and metrics of your own: dotted paths, or
            :class:`benchmark.own_metrics.OwnMetric` with its arguments.
        min_support: a class is part of ``auroc`` and ``ap``, means over classes, if it has at least so many images and
            all other classes together have: with fewer, one image moves its area by much. 1: all that occur do.
        keep_predictions: whose scored images are kept in ``predictions.parquet``: of no evaluation (``none``), the
            ``last`` one, the one with the best mean accuracy on split ``val`` (``best_on_val``), or ``all``. None:
            those of the last one where metrics are made of them, as clinical and own ones are.
        subgroups: columns of an index (:class:`datamodules.own_images.ImageIndex`), such as ``[sex, age_band]``: the
            run keeps in ``subgroups.parquet`` which held-out image has which value, and ``benchmark show
            --subgroups sex`` compares the metrics of these subgroups.
        ood: foreign images that each client's model scores in every evaluation, beside the client's own images of split
            ``test``, ``val`` or ``new``: how well it tells them apart (see
            :class:`datamodules.ood_stream.OODStream`), for example ``{source: datamodules.Letters, images: 500}``.
        corruptions: some test images of each client are scored in corrupted versions, too, in the last round:
            ``default``, or what differs from it, for example ``{kinds: [jpeg], severities: [1, 5], images: 50}`` (see
            :class:`datamodules.corruptions.CorruptedTests`).
        new_clients: fraction of the clients, drawn by ``partition_seed``, that never train; they are tested as split
            ``new``, after a copy was fitted as the method says.
        cache_features: compute what the method makes of an image with frozen parts once for each image, where the
            transform is deterministic; changes speed and memory, not results. ``auto`` does so if it fits in half of
            the free memory. A folder, such as ``data/features``: so, and in a file there, which later runs read that
            make the same features of the same images, bit for bit; it may be removed at any time.
        on_divergence: what becomes of a client whose losses or values were not finite in a round: ``drop`` takes the
            round without its upload, and leaves everything of its own as it was before; ``raise`` ends the run, as do
            rounds in which no client is left. The same holds for logits that are not finite: as ``drop``, the images
            count as wrong.
        compile_steps: always None: it is gone, and stands in configurations of older runs.
        cohort_width: older name of ``clients_at_once``, as in configurations of older runs; it wins where it is given.
        one_by_one: for a debugger: clients are stepped one after the other in plain PyTorch, without vmap, whatever
            ``clients_at_once`` says, and an error names client, round and step. Results agree up to rounding.
        num_workers: loader processes that gather the images; 0 gathers on the device.
        seed: seed of the run: order of batches, selection of clients, augmentation. Linked to ``seed_everything``.
        partition_seed: seed of the partition alone, so that all seeds of a run share one split; None takes ``seed``.

    Raises:
        ConfigurationError: an argument out of range, or a source without names of its classes.
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
        clients_at_once: PositiveInt | Literal["auto"] = "auto",
        eval_batch_size: PositiveInt = 256,
        val_fraction: BelowOne = 0.0,
        label_orders: PositiveInt = 1,
        label_flipping: UnitInterval | None = None,
        record_privacy: RecordLevelPrivacy | None = None,
        val_only: bool = False,
        evaluate_local: bool | None = None,
        metrics: list[str | dict[str, Any]] | dict[str, Any] | str | None = None,
        min_support: PositiveInt = 1,
        keep_predictions: Keep | None = None,
        subgroups: list[str] | None = None,
        ood: OODStream | None = None,
        corruptions: CorruptedTests | Literal["default"] | None = None,
        new_clients: BelowOne = 0.0,
        cache_features: bool | str = "auto",
        on_divergence: Literal["drop", "raise"] = "drop",
        compile_steps: Any = None,
        cohort_width: PositiveInt | Literal["auto"] | None = None,
        one_by_one: bool = False,
        num_workers: FewOrNone = 0,
        seed: Seed = 0,
        partition_seed: Seed | None = 0,
    ) -> None:
        super().__init__()
        for name, given, kind in (("source", source, ImageSource), ("partition", partition, Partition)):
            if not isinstance(given, kind):
                raise ConfigurationError(
                    f"FederatedDataModule: {name} must be one of datamodules, or derive from {kind.__name__}; got "
                    f"{given!r:.80}"
                )
        require_names(source)
        require_training_images(source)
        self.source = source
        self.partition = partition
        self.transform = self._transform = transform or ImageTransform()
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.clients_at_once = 1 if one_by_one else clients_at_once if cohort_width is None else cohort_width
        self.eval_batch_size = eval_batch_size
        self.val_fraction = val_fraction
        self.label_orders = label_orders
        self.label_flipping = label_flipping
        self.record_privacy = record_privacy
        self.val_only = val_only
        self.evaluate_local = evaluate_local
        self.metrics = metrics
        self.min_support, self.keep_predictions, self.subgroups = min_support, keep_predictions, subgroups
        #: evaluations whose images are kept
        self.kept_rounds = checked_scoring(
            source, metrics, min_support, keep_predictions, subgroups, val_fraction, val_only, label_orders
        )
        self.keeps_images = self.kept_rounds != "none"
        self.ood = ood
        if ood is not None:
            ood.check_classes(source)
        self.corruptions = CorruptedTests() if corruptions == "default" else corruptions
        self.num_workers = num_workers
        self.seed = seed
        self.partition_seed = seed if partition_seed is None else partition_seed
        self.client_names = partition.named_clients(source)
        self.num_clients = len(self.client_names)
        self.num_classes = len(source.class_names)
        self.class_names = list(source.class_names)
        self.class_templates = source.class_templates
        trained = self.num_clients - partition.testers(source)
        self.testers = list(range(trained, self.num_clients))
        order = numpy_generator(self.partition_seed, "new clients").permutation(trained).tolist()
        new = min(round(new_clients * trained), trained - 1)
        self.new_clients = sorted(order[trained - new :])
        self.training_clients = sorted(order[: trained - new])
        #: hostile clients, whose training images have other labels
        self.flipped_clients = hostile_clients(seed, self.training_clients, label_flipping or 0.0)
        check_share("new_clients", new_clients, new, trained)
        check_share("label_flipping", label_flipping, len(self.flipped_clients), len(self.training_clients))
        available = len(self.training_clients)
        if clients_per_round is None:
            clients_per_round = max(1, round(participation * available))
        if clients_per_round > available:
            raise ConfigurationError(
                f"data.clients_per_round must be between 1 and the number of clients that train, {available}; got "
                f"{clients_per_round}"
            )
        self.participants = clients_per_round
        if isinstance(cache_features, str) and cache_features != "auto" and "/" not in cache_features:
            raise ConfigurationError(
                "data.cache_features must be true, false, auto or a folder, written with a slash; got "
                f"{cache_features!r} (for a folder here: ./{cache_features})"
            )
        self.cache_features = cache_features
        self.on_divergence = on_divergence
        if compile_steps is not None:
            raise ConfigurationError(
                f"data.compile_steps={compile_steps!r:.40} is gone: compiled steps were not equal to the bit, and few "
                "were faster; leave it out (small steps are recorded and repeated without it)"
            )
        self.one_by_one = one_by_one
        #: set from the partition, as ``Terms`` have them
        self.label_spaces: dict[str, tuple[int, ...]] = {}
        self.own_spaces: dict[str, tuple[int, ...]] = {}
        self._pool: ImagePool | None = None
        #: further images that clients score, of `ood` and `corruptions`
        self.others: dict[Shown, Images] = {}
        self._foreign: ForeignImages | None = None
        self._corrupted = CorruptedRows()
        #: with the labels of the data set
        self._recorded_pool: ImagePool | None = None
        #: what the Trainer iterates over; from the engine, once a method has joined
        self.loaders: Loaders | None = None

    @property
    def pool(self) -> ImagePool:
        """All images; read when the data are set up."""
        assert self._pool is not None, "setup() comes first"
        return self._pool

    @cached_property
    def split_record(self) -> SplitRecord:
        """Return what names this split in records; made when first asked for, since every image is hashed for it."""
        assert self._recorded_pool is not None, "setup() comes first"
        made = record_split(self.partition, self._recorded_pool, self.splits, self.source, self.partition_seed)
        if self.label_orders > 1:
            made = made.with_fields(label_orders=self.label_orders)
        return made if self._foreign is None else made.with_fields(**{OF_THE_STREAM: self._foreign.facts})

    @property
    def manifest(self) -> Manifest:
        """The record of the split as plain values, see :mod:`datamodules.manifest`."""
        return self.split_record.manifest

    def setup(self, stage: str = "fit") -> None:
        """Read the images and divide them; with a Trainer, match them to the backbone of its method.

        Raises:
            ConfigurationError: data missing or damaged, a partition that the data do not allow, or a transform that the
                backbone does not.
        """
        if self._pool is None:
            self._read()
        if self.trainer is not None:
            self.match(self.trainer.lightning_module)

    def match(self, method: nn.Module) -> None:
        """Take from the method's backbone, if it says so, the size and the statistics of the pixels it takes.

        Raises:
            ConfigurationError: the transform was given others.
        """
        self.transform = self._transform.for_method(method)

    def _check_training(self, pool: ImagePool, splits: ClientSplits) -> None:
        """Refuse a split in which clients train on images that are for tests alone."""
        allowed = self.source.may_train(pool).numpy()
        if allowed.all():
            return
        for rows in splits.train:
            if len(wrong := rows[~allowed[rows]]):
                raise ConfigurationError(
                    f"{type(self.partition).__name__} has clients train on "
                    f"{self.source.domain_names[int(pool.domains[wrong[0]])]}, which has test images alone; take the "
                    "partition datamodules.ClassesOfDataSets with unseen"
                )

    def _read(self) -> None:
        log.info("reading %s", self.source.recorded_name)
        began = time.monotonic()
        pool = load_pool(self.source)
        splits = self.partition.split(pool, numpy_generator(self.partition_seed, "partition"))
        if not isinstance(splits, ClientSplits):
            raise ConfigurationError(
                f"{type(self.partition).__name__}.split gives {str(splits)[:80]}; expected ClientSplits (of assign, in "
                "its place, lists of images)"
            )
        if len(splits.train) != self.num_clients:
            raise ConfigurationError(
                f"{type(self.partition).__name__} has given images to {len(splits.train)} clients, and there are "
                f"{self.num_clients}; assign must return a list for each client"
            )
        self._check_training(pool, splits)
        self._recorded_pool = pool
        if isinstance(self.partition, FromManifest):
            self.partition.check_names(self.source)
            if (orders := self.partition.manifest.get("label_orders", 1)) != self.label_orders:
                raise ConfigurationError(
                    f"{self.partition.path} is of data with labels in {orders} order{'s' * (orders != 1)}; give "
                    f"data.label_orders={orders}, which is {self.label_orders}"
                )
        if self.label_orders > 1:
            pool = replace(pool, labels=reordered(pool.labels, splits, self.label_orders, self.num_classes))
        self._pool = pool
        self.splits = splits
        self.label_spaces, self.own_spaces = splits.spaces()
        self._check_own_spaces()
        self.train_indices, self.held_out = self._hold_out(splits)
        if self.flipped_clients:
            scored = [splits.test, *splits.others.values(), *(rows.values() for rows in self.held_out.values())]
            changed = flipped(pool.labels, splits, self.flipped_clients, self.train_indices, scored, self.num_classes)
            self._pool = pool = replace(pool, labels=changed)
        self._held_out_row = {split: max(map(len, rows.values()), default=0) for split, rows in self.held_out.items()}
        labels = pool.labels.numpy()
        rows = ClientRows.of(list(self.train_indices.values()) if self.val_fraction else splits.train)
        self.train_sizes = dict(enumerate(rows.sizes.tolist()))
        #: training images of each class, without those held out, [N, C]
        self.class_counts = torch.from_numpy(class_counts(rows, labels, self.num_classes))
        trained, seconds = self.num_clients - len(self.testers), time.monotonic() - began
        sizes = [self.train_sizes[client] for client in range(trained)]
        span = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        log.info(
            f"  {len(labels):,} images of {self.num_classes} classes; {trained} clients with {span} training images "
            f"({seconds:.1f} s)"
        )
        if self.ood is not None:
            self._foreign = self.others[Shown.FOREIGN] = self.ood.read(pool, self.held_out)
        if self.corruptions is not None and "test" in self.held_out:
            self.others[Shown.CORRUPTED], self._corrupted = self.corruptions.read(pool, self.held_out["test"])

    def _hold_out(self, splits: ClientSplits) -> tuple[Rows, dict[str, Rows]]:
        """Training rows, and the rows to evaluate on by split."""
        train: Rows = ByClient(ClientRows.of(splits.train))
        held_out: dict[str, Rows] = {}
        if not self.val_only:
            for name, lists in {"test": splits.test, **splits.others}.items():
                rows: Rows = ByClient(ClientRows.of(lists))
                if self.testers:
                    who = [client for client in self.testers if len(rows[client])] or self.training_clients
                    rows = {client: rows[client] for client in who}
                elif self.new_clients:
                    rows = {client: rows[client] for client in self.training_clients}
                held_out[name] = rows
        if self.val_fraction:
            whole = {client: train[client] for client in self.training_clients}
            cut = cut_validation(whole, self.pool, self.val_fraction, self.partition_seed)
            train = {**train, **{client: trained for client, (trained, _) in cut.items()}}
            held_out["val"] = {client: held for client, (_, held) in cut.items()}
        if self.new_clients and not self.val_only:
            held_out["new"] = {client: splits.test[client] for client in self.new_clients}
        for name in ("val", "new"):  # as in training
            if name in held_out and "train" in self.label_spaces:
                self.label_spaces[name] = self.label_spaces["train"]
            elif name in held_out and "train" in self.own_spaces:
                self.own_spaces[name] = self.own_spaces["train"]
                for number in {*self.own_spaces["train"]} - {-1}:
                    self.label_spaces[f"{name}/{number}"] = self.label_spaces[f"train/{number}"]
        return train, held_out

    def _check_own_spaces(self) -> None:
        """Refuse what compares classes where clients count labels among different ones."""
        further = chosen_metrics(self.metrics) != chosen_metrics(None)
        asked = {"metrics": further, "ood": self.ood is not None, "record_privacy": self.record_privacy is not None}
        asked["keep_predictions"] = self.keeps_images
        for what, given in asked.items():
            if given and self.own_spaces:
                raise ConfigurationError(
                    f"data.{what} compares classes, and with {type(self.partition).__name__} clients tell different "
                    f"classes apart; leave data.{what} out, or take a partition with one label space"
                )

    @property
    def test_sizes(self) -> tuple[int, ...]:
        """Test images of each client that trains, 0 of the others, whether or not they are scored."""
        sizes = ClientRows.of(self.splits.test).sizes.copy()
        sizes[self.new_clients] = 0
        return tuple(sizes.tolist())

    @property
    def federation(self) -> Federation:
        """Return who there is and what each holds; known once the data are set up."""
        largest = max(self.train_sizes.values())
        terms = Terms(
            seed=self.seed,
            num_clients=self.num_clients,
            training_clients=tuple(self.training_clients),
            new_clients=tuple(self.new_clients),
            participants=self.participants,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            eval_batch_size=self.eval_batch_size,
            num_classes=self.num_classes,
            row=min(self.batch_size, largest),
            own_row=largest,
            label_spaces=self.label_spaces,
            held_out_row=self._held_out_row,
            poisson_lots=self.record_privacy is not None and self.record_privacy.sampling == "poisson",
            own_spaces=self.own_spaces,
            testers={name: tuple(rows) for name, rows in self.held_out.items() if set(rows) <= set(self.testers)},
        )
        streams = {} if self._foreign is None else self._foreign.rows
        of_all = self.train_indices, self.train_sizes, self.held_out, self.class_counts
        return Federation(terms, Holdings(*of_all, streams, self._corrupted))

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> Share:
        """Return the cohorts of the round that begins."""
        assert self.trainer is not None
        return self._joined.training(self.trainer.current_epoch + 1)

    def val_dataloader(self) -> Share:
        """Return every client on its held-out images: split ``test``, and whatever other splits there are.

        ``Trainer.validate`` scores what is held out of the training images alone, as ``Trainer.test`` scores the rest.

        Raises:
            ConfigurationError: for ``Trainer.validate``, none are held out.
        """
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            self.require_validation()
            return self._joined.evaluation(["val"])
        return self._joined.evaluation(list(self.held_out))

    def require_validation(self) -> None:
        """Refuse to validate where nothing is held out of the training images.

        Raises:
            ConfigurationError: it is so.
        """
        if not self.val_fraction:
            raise ConfigurationError(
                "validate scores images held out of the training images, and data.val_fraction=0 holds none out; take "
                "`lightning-cli test` for the test images, or train with for example --data.val_fraction=0.1"
            )

    def test_dataloader(self) -> Share:
        """Return every client on its test images.

        Raises:
            ConfigurationError: only split ``val`` is scored.
        """
        if self.val_only:
            raise ConfigurationError("data.val_only scores no test image; take `lightning-cli validate`")
        return self._joined.evaluation([name for name in self.held_out if name != "val"])

    @property
    def _joined(self) -> Loaders:
        assert self.loaders is not None, "a method joins the federation first"
        return self.loaders

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: the split, the images, and the width that ``auto`` chose (for bit-identical
        arithmetic).
        """
        return {
            "manifest": self.split_record.hash,
            "images": self.split_record.images_sha256,
            "width": self.loaders.chosen if self.loaders else None,
            "seed": self.seed,
            "flipped": self.flipped_clients,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the width that ``auto`` chose; refuse another split, and other images.

        Raises:
            ConfigurationError: the checkpoint was made with other data, another partition or another seed.
        """
        if state_dict["seed"] != self.seed:
            raise ConfigurationError(
                f"the checkpoint is of another configuration: it was made with seed {state_dict['seed']}, this run has "
                f"{self.seed}"
            )
        if state_dict["manifest"] != self.split_record.hash:
            raise ConfigurationError(
                "the checkpoint is of another configuration: it was made with another data set or partition than "
                "this run's; "
                "give the data it was made with, or start without --ckpt_path"
            )
        if state_dict.get("images") != self.split_record.images_sha256:
            raise ConfigurationError(
                "the checkpoint was made with other images than this run reads: the partition and the labels are the "
                "same, the pixels are not; give the images it was made with, or start without --ckpt_path"
            )
        if tuple(state_dict.get("flipped", ())) != self.flipped_clients:  # none in older checkpoints
            raise ConfigurationError(
                "the checkpoint is of another configuration: it was made with labels of other clients flipped; give "
                "the data.label_flipping that it was made with"
            )
        if self.loaders is not None and self.clients_at_once == "auto":
            self.loaders.chosen = state_dict["width"]
