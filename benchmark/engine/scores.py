"""Per-client scores, kept as counts so that they do not depend on how clients and images were batched."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from benchmark.counts import ClassCounts, Counts, ScoredBatch
from benchmark.engine.kept_images import KeptImages
from benchmark.engine.plan.work import Shown
from benchmark.engine.stream_scores import StreamScores
from benchmark.errors import ConfigurationError
from benchmark.formulas import classes_in_mean
from benchmark.metrics import CORRUPTED_ACCURACY, CORRUPTED_DROP, keep_images, metrics_of, value_of_images
from benchmark.metrics import Metric as MetricOfClients
from benchmark.placing import placed

#: State that counts corrupted images.
VERSIONS = "right_of_versions"


class ClientScores(Metric):
    """The metrics of :data:`benchmark.metrics.METRICS` of every client on its own held-out images.

    Metrics share counts: each kind is one state, [N, ...], and is counted once for each batch. An image whose logits
    have no largest one (NaN, or infinite) has no prediction: it counts as wrong, and its client's loss is NaN. Where a
    metric is made of images together, they are kept.

    Args:
        num_clients: N.
        num_classes: C.
        chosen: which metrics: one of :data:`benchmark.metrics.SETS`, or themselves.
        stream: whether the images are held against a stream of foreign ones.
        versions: what the accuracies on corrupted versions of images are called; the first is of images as they were.
        keeps_images: keep images with their logits, also where no metric is made of them.
    """

    full_state_update = False
    counts: Tensor
    loss_sum: Tensor

    def __init__(
        self,
        num_clients: int,
        num_classes: int,
        chosen: str | tuple[MetricOfClients, ...] = "basic",
        stream: bool = False,
        versions: Sequence[str] = (),
        keeps_images: bool = False,
    ) -> None:
        super().__init__(sync_on_compute=False)  # ranks gather scores by themselves
        self.num_classes = num_classes
        self.metrics = metrics_of(chosen) if isinstance(chosen, str) else chosen
        self.keeps_images = keeps_images or keep_images(self.metrics)
        self._kept = [KeptImages.none(num_classes)]
        self.stream = StreamScores() if stream else None
        used = (kind for metric in self.metrics for kind in metric.counts)
        self.kinds: tuple[type[Counts], ...] = tuple(dict.fromkeys((ClassCounts, *used)))
        for kind in self.kinds:
            zeros = torch.zeros(num_clients, *kind.shape(num_classes), dtype=getattr(torch, kind.dtype))
            self.add_state(kind.name, zeros, dist_reduce_fx="sum")
        self.versions = tuple(versions)
        if versions:  # right predictions and images of each
            self.add_state(
                VERSIONS, torch.zeros(num_clients, len(versions), 2, dtype=torch.int64), dist_reduce_fx="sum"
            )
        #: names of what is counted
        self.states = [*(kind.name for kind in self.kinds), *([VERSIONS] if versions else [])]

    def update(
        self,
        logits: Tensor,
        y: Tensor,
        clients: Sequence[int],
        index: Tensor | None = None,
        shown: Shown = Shown.OWN,
    ) -> None:
        """Count one stacked batch.

        Args:
            logits: [K, B, C].
            y: [K, B], -100 where there is no image.
            clients: client ids, K of them.
            index: rows of the images' pool [K, B]: kept images are sorted by them, corrupted ones have their versions.
            shown: whose pool. The clients' own images are held against foreign ones; no other metric knows these.
        """
        if shown is Shown.CORRUPTED and index is not None:
            self._count_versions(ScoredBatch(logits, y), clients, index)
            return
        if self.stream is not None:
            self.stream.update(logits, y, clients, shown is Shown.FOREIGN)
        if shown is Shown.FOREIGN:
            return
        rows, batch = placed(torch.tensor(clients), logits.device), ScoredBatch(logits, y)
        for kind in self.kinds:
            self._state(kind.name).index_add_(0, rows, kind.count(batch))
        if self.keeps_images:
            self._kept.append(KeptImages.of_batch(logits, y, clients, index))

    def _count_versions(self, batch: ScoredBatch, clients: Sequence[int], index: Tensor) -> None:
        """Count corrupted images by version."""
        place = index % len(self.versions) + placed(torch.tensor(clients), index.device)[:, None] * len(self.versions)
        numbers = torch.stack([(batch.predictions == batch.y) & batch.there, batch.there], -1).long()
        self.versions_counted.view(-1, 2).index_add_(0, place.flatten(), numbers.flatten(0, 1))

    def add(self, clients: Sequence[int], counted: Mapping[str, Tensor]) -> None:
        """Add what was counted elsewhere.

        Args:
            clients: K of them, each at most once.
            counted: by kind of counts [K, ...], as :meth:`counted` returns them.
        """
        rows = torch.tensor(clients, dtype=torch.int64, device=self.counts.device)
        state = {
            name: torch.zeros_like(self._state(name)).index_copy_(0, rows, values.to(rows.device))
            for name, values in counted.items()
        }
        self.merge_state(state)
        self._update_count += 1  # else it warns that nothing has been counted

    @property
    def kept(self) -> KeptImages:
        """Return the images that are kept, sorted by client and image."""
        if len(self._kept) > 1:
            self._kept = [KeptImages.joined(self._kept)]
        return self._kept[0]

    def keep(self, images: KeptImages) -> None:
        """Keep images that were scored elsewhere."""
        self._kept.append(images)

    def counted(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return the counts of some clients, by kind, [K, ...]."""
        return {name: self._state(name)[[*clients]] for name in self.states}

    def scored(self) -> list[int]:
        """Return the clients of whom an image was counted."""
        return self.images().nonzero().flatten().tolist()

    def compute(self) -> dict[str, Tensor]:
        """Return each metric by name, float64 [N]; NaN for a client that was not evaluated."""
        made = {}
        for metric in self.metrics:
            if metric.of is not None:
                made[metric.name] = metric.of(*(self._state(kind.name) for kind in metric.counts))
            else:
                made[metric.name] = torch.full((len(self.counts),), math.nan, dtype=torch.float64)
        for client, images in self._by_client().items():
            for name, value in self._of_images(images).items():
                made[name][client] = value
        made |= {} if self.stream is None else self.stream.compute(len(self.counts))
        return made | self._of_versions(lambda counts: counts)

    @property
    def versions_counted(self) -> Tensor:
        """Return right predictions and images of each version of corrupted images, int64 [N, V, 2]."""
        return self._state(VERSIONS)

    def _of_versions(self, summed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the metrics of corrupted images by name, float64 [N]; none before any is scored.

        Args:
            summed: sums counts, [N, V, 2], over clients, or leaves them.
        """
        if not self.versions or not self.versions_counted.any():
            return {}
        right, images = summed(self.versions_counted).double().unbind(-1)
        clean, *corrupted = (right / images).unbind(1)
        mean = torch.stack(corrupted, 1).mean(1)
        of_versions = dict(zip(self.versions[1:], corrupted, strict=True))
        return {CORRUPTED_ACCURACY: mean, CORRUPTED_DROP: clean - mean} | of_versions

    def pooled(self) -> dict[str, float]:
        """Return the metrics of all clients' images together, but for means over images; NaN where not defined."""
        made = {}
        for metric in self.metrics:
            if metric.pooled == "counts" and metric.of is not None:
                sums = (self._state(kind.name).sum(0, keepdim=True) for kind in metric.counts)
                made[metric.name] = metric.of(*sums).item()
        of_all = self._of_images(self.kept)
        made |= {each.name: of_all[each.name] for each in self.metrics if each.name in of_all and each.pooled}
        made |= {} if self.stream is None else self.stream.pooled()
        of_versions = self._of_versions(lambda counts: counts.sum(0, keepdim=True))
        return made | {name: value.item() for name, value in of_versions.items()}

    def averaged_classes(self, min_support: int) -> dict[int, tuple[int, ...]]:
        """Return the classes that each client's mean AUROC is of, where images are kept; none where it has no value.

        Args:
            min_support: images of a class, and of others beside it, from which it is part of the mean.
        """
        made = {}
        for client, images in self._by_client().items():
            batch = ScoredBatch(images.logits, images.label)
            counted = classes_in_mean(batch, min_support) & (batch.predictions < batch.classes).all()
            made[client] = tuple(counted.nonzero().flatten().tolist())
        return made

    def _by_client(self) -> dict[int, KeptImages]:
        """Return the images of each client of whom any are kept."""
        clients, counts = self.kept.client.unique_consecutive(return_counts=True)
        starts = (counts.cumsum(0) - counts).tolist()
        return {
            client: self.kept.at(torch.arange(start, start + count))
            for client, start, count in zip(clients.tolist(), starts, counts.tolist(), strict=True)
        }

    def _of_images(self, images: KeptImages) -> dict[str, float]:
        """Return the metrics that are made of images together; NaN without any, or where one has no prediction."""
        batch = ScoredBatch(images.logits, images.label)
        try:
            return {each.name: value_of_images(each, batch) for each in self.metrics if each.of_images is not None}
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (clients {images.client.unique().tolist()[:5]})") from error

    def images(self) -> Tensor:
        """Count each client's images that were scored, int64 [N]."""
        return self.counts[..., 2].sum(1)

    def without_prediction(self) -> Tensor:
        """Count each client's images without a prediction (non-finite logits), int64 [N]."""
        return self.counts[:, -1, 1]

    def _state(self, name: str) -> Tensor:
        state: Tensor = getattr(self, name)
        return state
