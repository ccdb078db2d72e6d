"""Mini-batches of steps: gathered, augmented and normalised on the device, or taken from kept features."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmark.contract import ClientMethod, MiniBatch
from benchmark.engine.batches.features import FeatureTables, encoded
from benchmark.engine.batches.pool import Images, Pool
from benchmark.engine.parameters import Parameters
from benchmark.engine.plan.work import Shown, Step
from benchmark.engine.ranks.ranks import Ranks
from benchmark.federation import Federation, Values
from benchmark.masked import IGNORE

#: Bytes of the mini-batches that are made in one.
TOGETHER = 2**24


class ImageFeed:
    """Makes the stacked mini-batches of a federation.

    Args:
        method: says what its steps use.
        pool: the images, and how they are transformed.
        federation: who holds which.
        ranks: the processes.
        cache_features: keep what frozen parts make of an image; ``"auto"`` where it fits into half of the free memory;
            a folder: so, and in a file there for other runs.
        others: further images that clients score, see :class:`benchmark.engine.plan.work.Shown`.
    """

    def __init__(
        self,
        method: ClientMethod,
        pool: Pool,
        federation: Federation,
        ranks: Ranks,
        cache_features: bool | str = "auto",
        others: Mapping[Shown, Images] = MappingProxyType({}),
    ) -> None:
        self.method = method
        self.pool = pool
        self._others = others
        self._pools = {Shown.OWN: pool}
        self.terms, self.holdings = federation.terms, federation.holdings
        self.ranks = ranks
        self.cache_features = cache_features
        #: the Trainer's precision, in which the frozen parts work
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._positions: dict[tuple[str, torch.device], Tensor] = {}
        self.parameters = Parameters(method)
        #: what an image takes in a mini-batch, seen in the last one; 0 before any
        self._image_bytes = 0
        self._tables: dict[Shown, FeatureTables] = {}
        self._own: FeatureTables | None = None

    def settle(self, device: torch.device, resident: bool) -> None:
        """Place the images and the cached features on the device or in host memory, before free memory is measured.

        Args:
            device: device of the steps.
            resident: whether steps gather their images there.
        """
        if resident:
            self.pool.on(device)
        self._feature_tables()
        if Shown.FOREIGN in self._others:
            self._feature_tables(Shown.FOREIGN)
        if "own_images" in self.method.inputs:
            self._own_tables()

    def fill(self, step: Step) -> MiniBatch:
        """Return the mini-batches of a step's clients, [K, ...] throughout, without noise."""
        assert step.index is not None
        assert step.mask is not None
        mask = step.mask
        tables = self._feature_tables(step.shown)
        features = tables.rows(step) if tables is not None else None
        if step.images is None:
            pool = self.pool_of(step.shown)
            step = pool.gather(step, images=features is None or "images" in self.method.inputs)
        assert step.images is not None
        assert step.labels is not None
        y = step.labels
        space = self.terms.space_of(step.split, step.clients[0])
        if space in self.terms.label_spaces and step.shown is not Shown.FOREIGN:
            y = self._positions_in(space, y.device)[y.clamp(min=0)].masked_fill(~mask, IGNORE)
        x = step.images if step.images.shape[-3] == 0 else self.pool.input(step.images, step.uniform, self._kind)
        if features is None:
            features = self._encode(x)
        self._image_bytes = -(-sum(value.nbytes for value in (x, *features.values())) // mask.numel())
        return MiniBatch(x, y, mask, step.phase, space, features=features)

    def fill_all(self, steps: Sequence[Step]) -> Iterator[MiniBatch]:
        """Yield the mini-batches of consecutive steps; small ones are gathered and normalised several at a time."""
        rest = list(steps)
        while rest:
            alike = self._together(rest)
            if len(alike) == 1:
                yield self.fill(alike[0])
            else:
                whole = self.fill(_joined(alike))
                for n in range(len(alike)):
                    features = {name: value[n] for name, value in whole.features.items()}
                    yield replace(whole, x=whole.x[n], y=whole.y[n], mask=whole.mask[n], features=features)
            rest = rest[len(alike) :]

    def _together(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Return the first of some steps whose mini-batches can be made in one."""
        first = steps[0]
        tables = self._feature_tables(first.shown)
        # Features that are made of images now would round by how many there are.
        made_now = "features" in self.method.inputs and (tables is None or tables.augmented)
        if first.index is None or first.images is not None or made_now or not self._image_bytes:
            return steps[:1]
        most = max(1, TOGETHER // (self._image_bytes * first.index.numel()))
        return list(takewhile(lambda step: _kind_of(step) == _kind_of(first), steps[:most]))

    @property
    def _kind(self) -> torch.dtype:
        """The method's type of numbers."""
        return self.parameters.first.dtype

    def _encode(self, x: Tensor) -> Values:
        """Make the features of images [K, B, 3, H, W], without mapping as for kept ones, so that both are equal."""
        if "features" not in self.method.inputs:
            return {}
        with torch.no_grad():
            made = encoded(self.method, x.flatten(0, -4))
        return {name: value.unflatten(0, x.shape[:-3]) for name, value in made.items()}

    def _positions_in(self, space: str, device: torch.device) -> Tensor:
        """Return per class its position in a label space; IGNORE where it is not in it."""
        if (space, device) not in self._positions:
            positions = torch.full((self.terms.num_classes,), IGNORE)
            classes = self.terms.label_spaces[space]
            positions[list(classes)] = torch.arange(len(classes))
            self._positions[space, device] = positions.to(device)
        return self._positions[space, device]

    def pool_of(self, shown: Shown) -> Pool:
        """Return the images of a pool, which is made when it is first asked for."""
        if shown not in self._pools:
            images = self._others[shown]
            self._pools[shown] = Pool(images.images, images.labels, self.pool.transform)
        return self._pools[shown]

    def _feature_tables(self, shown: Shown = Shown.OWN) -> FeatureTables | None:
        """Return what the frozen parts make of each image of a pool, computed at the first step that asks for it.

        Pools are encoded apart, so that the clients' own images keep every bit. Corrupted ones are seen once, and none
        of theirs are kept.
        """
        if self.cache_features is False or "features" not in self.method.inputs or shown is Shown.CORRUPTED:
            return None
        if shown not in self._tables:
            rows = np.arange(len(self.pool_of(shown).labels))
            if shown is Shown.OWN:
                held = [rows for split in self.holdings.held_out.values() for rows in split.values()]
                trained = [] if self.pool.transform.augment_numbers else list(self.holdings.train_rows.values())
                rows = np.unique(np.concatenate(held + trained))
            self._tables[shown] = self._made(rows, self.cache_features is not True, shown)
        return self._tables[shown] if self._tables[shown].complete else None

    def _own_tables(self) -> FeatureTables:
        """Return what the frozen parts make of each client's training images without augmentation."""
        if self._own is None:
            tables = self._feature_tables()
            rows = np.unique(np.concatenate(list(self.holdings.train_rows.values())))
            self._own = tables if tables is not None and not tables.augmented else self._made(rows, limited=False)
        return self._own

    def _made(self, rows: np.ndarray, limited: bool, shown: Shown = Shown.OWN) -> FeatureTables:
        with self.precision():
            size, folder = self.terms.eval_batch_size, self.cache_features
            kept_in = folder if isinstance(folder, str) and folder != "auto" else None
            return FeatureTables(self.method, self.pool_of(shown), rows, size, limited, self.ranks, kept_in)

    def own_images(self, clients: Sequence[int]) -> Values:
        """Return ``Client.own_images`` with a leading K: features, ``label`` and ``mask`` [K, n]."""
        tables = self._own_tables()
        index = torch.zeros(len(clients), self.terms.own_row, dtype=torch.int64)
        mask = torch.zeros(index.shape, dtype=torch.bool)
        for k, client in enumerate(clients):
            own = torch.from_numpy(self.holdings.train_rows[client])
            index[k, : len(own)], mask[k, : len(own)] = own, True
        device = tables.position.device
        label = self.pool.labels[index].to(device)
        return {**tables.at(index.to(device)), "label": label, "mask": mask.to(device)}


def _kind_of(step: Step) -> tuple[Any, ...]:
    """Return what is equal for steps whose rows can be put together."""
    assert step.index is not None
    return step.stage, step.phase, step.split, step.shown, step.index.shape, step.uniform is None


def _joined(steps: Sequence[Step]) -> Step:
    """Return one step with the rows of several of a kind, [S, K, B] throughout."""
    made = {name: [getattr(step, name) for step in steps] for name in ("index", "mask", "uniform")}
    joined: dict[str, Any] = {name: torch.stack(rows) for name, rows in made.items() if rows[0] is not None}
    return replace(steps[0], **joined)
