"""Scored images that are kept with their logits, for metrics that counts cannot make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmark.masked import IGNORE


@dataclass(frozen=True)
class KeptImages:
    """Scored images in host memory.

    Attributes:
        client: of each image, int64 [n].
        image: row of the image pool, int64 [n]; -1 where it is not known.
        label: int64 [n], within the label space of the split.
        logits: float32 [n, C].
    """

    client: Tensor
    image: Tensor
    label: Tensor
    logits: Tensor

    @classmethod
    def none(cls, classes: int) -> "KeptImages":
        """Return those of no image."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(nothing, nothing, nothing, torch.zeros(0, classes))

    @classmethod
    def of_batch(cls, logits: Tensor, y: Tensor, clients: Sequence[int], index: Tensor | None) -> "KeptImages":
        """Take the images of a stacked batch.

        Args:
            logits: [K, B, C].
            y: [K, B], -100 where there is no image.
            clients: client ids, K of them.
            index: rows of the image pool [K, B]; None where they are not known.
        """
        there = y.cpu() != IGNORE
        client = torch.tensor(clients).unsqueeze(1).expand_as(there)
        image = torch.full_like(client, -1) if index is None else index.cpu()
        return cls(client[there], image[there], y.cpu()[there], logits.detach().float().cpu()[there])

    @classmethod
    def joined(cls, parts: "Sequence[KeptImages]") -> "KeptImages":
        """Put parts together, sorted by client and image, so that it does not matter how images were batched."""
        whole = cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in cls.names()})
        order = whole.image.argsort(stable=True)
        return whole.at(order[whole.client[order].argsort(stable=True)])

    @classmethod
    def names(cls) -> list[str]:
        """Name the columns."""
        return [field.name for field in fields(cls)]

    @classmethod
    def read(cls, columns: Mapping[str, Tensor], prefix: str) -> "KeptImages":
        """Return what :meth:`columns` returned, on the CPU."""
        return cls(**{name: columns[prefix + name].cpu() for name in cls.names()})

    def columns(self, prefix: str) -> dict[str, Tensor]:
        """Return the columns by name, with a prefix."""
        return {prefix + name: getattr(self, name) for name in self.names()}

    def at(self, rows: Tensor) -> "KeptImages":
        """Return some of them: positions, or a mask [n]."""
        return KeptImages(**{name: getattr(self, name)[rows] for name in self.names()})

    def of(self, clients: Sequence[int]) -> "KeptImages":
        """Return those of some clients."""
        return self.at(torch.isin(self.client, torch.tensor(clients, dtype=torch.int64)))
