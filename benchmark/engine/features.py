"""What frozen parts make of images, kept."""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from benchmark.contract import ClientMethod, Stage
from benchmark.engine.memory import free_memory
from benchmark.engine.plan import Step
from benchmark.engine.pool import Pool
from benchmark.federation import Values

log = logging.getLogger(__name__)

#: Seconds after which a long pass says how far it is.
PATIENCE = 30.0


class FeatureTables:
    """Per name of ``frozen_features`` one row for each image that is ever shown without augmentation.

    Filled in one pass over the images in a fixed order, so that it does not depend on cohorts or on when a run was
    resumed.

    Args:
        method: makes the features.
        pool: the images.
        rows: which of them.
        batch_size: images encoded at once.
        limited: make nothing (``complete`` is False then) where it takes more than half of the free memory.
    """

    def __init__(self, method: ClientMethod, pool: Pool, rows: np.ndarray, batch_size: int, limited: bool) -> None:
        device, kind = (own := next(method.parameters())).device, own.dtype
        self.augmented = bool(pool.transform.augment_numbers)
        self.position = torch.full((len(pool.labels),), -1, device=device)
        self.position[torch.from_numpy(rows).to(device)] = torch.arange(len(rows), device=device)
        self.tables: Values = {}
        self.complete = False
        log.info("keeping what frozen parts make of %s images", f"{len(rows):,}")
        said = time.monotonic()
        with torch.no_grad():
            for start in range(0, len(rows), batch_size):
                if time.monotonic() - said > PATIENCE:
                    log.info("  %s of %s images", f"{start:,}", f"{len(rows):,}")
                    said = time.monotonic()
                chosen = torch.from_numpy(rows[start : start + batch_size])
                made = method.frozen_features(pool.input(pool.images_at(chosen, device), None, kind))
                if not self.tables:
                    need = sum(v[0].numel() * v.element_size() for v in made.values()) * len(rows)
                    if limited and need > free_memory(device) // 2:
                        log.info("  they do not fit into half of the free memory: made anew in every step")
                        return
                    self.tables = {n: v.new_empty(len(rows), *v.shape[1:]) for n, v in made.items()}
                for name, value in made.items():
                    self.tables[name][start : start + len(chosen)] = value
        self.complete = True

    def rows(self, step: Step) -> Values | None:
        """Return the features of a step's images, per name [K, B, ...]; None for augmented ones."""
        assert step.index is not None
        if self.augmented and step.stage is not Stage.EVALUATE:
            return None
        return self.at(step.index)

    def at(self, index: Tensor) -> Values:
        """Return the features of rows of the pool, per name the shape of ``index`` followed by a feature's own."""
        at = self.position[index]
        return {name: table[at] for name, table in self.tables.items()}
