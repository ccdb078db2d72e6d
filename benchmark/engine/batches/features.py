"""Keep the features that frozen parts make of images."""

import logging
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from benchmark.backbones import products
from benchmark.backbones.merged_layers import MergedLayers
from benchmark.contract import ClientMethod, Stage
from benchmark.engine.batches.feature_file import FeatureFile
from benchmark.engine.batches.pool import Pool
from benchmark.engine.device.memory import free_memory
from benchmark.engine.plan.work import Step
from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.author_errors import tensors
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.placing import picked

log = logging.getLogger(__name__)

#: Seconds after which a long pass says how far it is.
PATIENCE = 30.0


def encoded(method: ClientMethod, x: Tensor) -> Values:
    """Make the features of images [B, 3, H, W], the same wherever they are made: by oneDNN where it is faster.

    Raises:
        ConfigurationError: they are no dict of tensors with a row for each image.
    """
    by_onednn = x.device.type == "cpu" and products.faster_by_onednn()
    with MergedLayers() if by_onednn else nullcontext():
        made = tensors(method, "frozen_features", method.frozen_features(x))
    for name, value in made.items():
        if value.shape[:1] != x.shape[:1]:
            raise ConfigurationError(
                f"{type(method).__name__}.frozen_features gives {name!r} of shape {tuple(value.shape)} for {len(x)} "
                "images; expected a row for each"
            )
    return made


class FeatureTables:
    """Per name of ``frozen_features`` one row for each image that is ever shown without augmentation.

    Filled in one pass over the images in a fixed order, so that it does not depend on cohorts or on when a run was
    resumed; each rank makes its part of the pass, batch by batch, and has all of it.

    Args:
        method: makes the features.
        pool: the images.
        rows: which of them.
        batch_size: images encoded at once.
        limited: make nothing (``complete`` is False then) where it takes more than half of the free memory.
        ranks: the processes; all of them are here.
        folder: of files in which features are kept for other runs; None: in memory alone.
    """

    def __init__(
        self,
        method: ClientMethod,
        pool: Pool,
        rows: np.ndarray,
        batch_size: int,
        limited: bool,
        ranks: Ranks,
        folder: str | None = None,
    ) -> None:
        self.device, self.kind = (own := next(method.parameters())).device, own.dtype
        self.method = method
        self.pool = pool
        self.augmented = bool(pool.transform.augment_numbers)
        # 0 for images that are not kept: where a mini-batch is padded, any row will do.
        self.position = torch.zeros(len(pool.labels), dtype=torch.int64, device=self.device)
        self.position[torch.from_numpy(rows).to(self.device)] = torch.arange(len(rows), device=self.device)
        self.tables: Values = {}
        log.info("keeping what frozen parts make of %s images", f"{len(rows):,}")
        self.complete = self._fill(rows, batch_size, limited, ranks, folder)

    def _fill(self, rows: np.ndarray, batch_size: int, limited: bool, ranks: Ranks, folder: str | None) -> bool:
        """Return whether there is room, and make everything then, or take it from a file."""
        first = ranks.gather("features", self._made(rows[ranks.rank * batch_size :][:batch_size]))
        need = sum(value[0].numel() * value.element_size() for value in first[0].values()) * len(rows)
        lacking = limited and need > free_memory(self.device) // 2
        if any(ranks.everybody("room for features", lacking)):
            log.info("  they do not fit into half of the free memory: made anew in every step")
            return False
        if folder is None:
            self._make(rows, batch_size, ranks, first)
            return True
        file = FeatureFile(folder, self.pool.images, rows, first[0])
        with nullcontext() if ranks.rank else file.made_once():
            ranks.everybody("turn to read or make features", None)
            kept = file.read()
            if all(ranks.everybody("features in a file", kept is not None)):
                assert kept is not None
                self.tables = {name: value.to(self.device) for name, value in kept.items()}
                log.info("  read from %s", file.path)
                return True
            self._make(rows, batch_size, ranks, first)
            if not ranks.rank:
                file.write(self.tables)
        return True

    def _make(self, rows: np.ndarray, batch_size: int, ranks: Ranks, first: list[Values]) -> None:
        """Make the features of all rows; those of the first batch of each rank are there."""
        said = time.monotonic()
        self.tables = {name: value.new_empty(len(rows), *value.shape[1:]) for name, value in first[0].items()}
        for start in range(0, len(rows), batch_size * ranks.count):
            if time.monotonic() - said > PATIENCE:
                log.info("  %s of %s images", f"{start:,}", f"{len(rows):,}")
                said = time.monotonic()
            mine = start + ranks.rank * batch_size
            parts = ranks.gather("features", self._made(rows[mine : mine + batch_size])) if start else first
            for rank, part in enumerate(parts):
                for name, value in part.items():
                    at = start + rank * batch_size
                    self.tables[name][at : at + len(value)] = value

    @torch.no_grad()
    def _made(self, rows: np.ndarray) -> Values:
        """Make the features of some images; nothing of none."""
        if not len(rows):
            return {}
        images = self.pool.images_at(torch.from_numpy(rows), self.device)
        return encoded(self.method, self.pool.input(images, None, self.kind))

    def rows(self, step: Step) -> Values | None:
        """Return the features of a step's images, per name [K, B, ...]; None for augmented ones."""
        assert step.index is not None
        if self.augmented and step.stage is not Stage.EVALUATE:
            return None
        return self.at(step.index)

    def at(self, index: Tensor) -> Values:
        """Return the features of rows of the pool, per name the shape of ``index`` followed by a feature's own."""
        at = picked(self.position, index)
        return {name: picked(table, at) for name, table in self.tables.items()}
