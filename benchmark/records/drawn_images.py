"""Metrics of images that are drawn anew, of each client and over clients: what intervals are made of."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmark import intervals
from benchmark.intervals import DRAWS, Interval
from benchmark.metrics import Metric, value_of_images
from benchmark.seeds import numpy_generator

if TYPE_CHECKING:  # slow to import
    import numpy as np
    import pandas as pd
    from torch import Tensor

    from benchmark.counts import ScoredBatch

#: Images in the draws that are computed together, for memory.
MOST_AT_ONCE = 1_000_000


class Draws(NamedTuple):
    """Images that are drawn anew, those of a group together.

    Attributes:
        own: where each client's images stand among the rows, by its number.
        times: how often each image is in each draw of its client's images, int32 [draws, n].
        over: likewise, for what is made of several clients: the same draws, unless a group has images at several
            clients; then groups are drawn from those of all clients.
        once: likewise, of one draw that has each image once, [1, n].
    """

    own: "dict[int, np.ndarray]"
    times: "np.ndarray"
    over: "np.ndarray"
    once: "np.ndarray"

    @property
    def span_clients(self) -> bool:
        """Return whether a group has images at several clients."""
        return self.over is not self.times


def draw_images(rows: "pd.DataFrame", *key: str) -> Draws:
    """Draw the images of rows of one split anew, always alike for a key."""
    import numpy as np
    import pandas as pd

    rng = numpy_generator(0, "bootstrap", *key, str(rows["split"].iloc[0]))
    numbers, group = rows["client"].to_numpy(), rows["group"].to_numpy()
    own = {int(client): np.flatnonzero(numbers == client) for client in np.unique(numbers)}
    drawn = np.zeros((DRAWS, len(rows)), dtype="int32")
    for places, times in zip(own.values(), intervals.drawn([group[each] for each in own.values()], rng), strict=True):
        drawn[:, places] = times
    spans = bool((pd.Series(numbers).groupby(group).nunique() > 1).any())
    over = intervals.drawn([group], rng)[0] if spans else drawn
    return Draws(own, drawn, over, np.ones((1, len(rows)), dtype="int32"))


def has_groups(group: "np.ndarray") -> bool:
    """Return whether some images show the same thing, given the group of each."""
    import numpy as np

    return len(np.unique(group)) < len(group)


def by_client(
    metric: Metric, images: "ScoredBatch", own: "Mapping[int, np.ndarray]", times: "np.ndarray"
) -> "dict[int, np.ndarray]":
    """Return a metric of draws of each client's images, float64 [draws] by the client's number.

    Arguments as in :func:`values_in` and :class:`Draws`.
    """
    return {client: values_in(metric, at_places(images, places), times[:, places]) for client, places in own.items()}


def of_drawn(values: "np.ndarray") -> Interval:
    """Return the interval of drawn images; none where all draws are alike, which a few easy images give at 0 or 1."""
    ends = intervals.of_draws(values)
    return intervals.NONE if ends.low == ends.high else ends


def number(value: float) -> float | None:
    """Return a value, None for NaN."""
    return float(value) if value == value else None


def mean_over(clients: "Sequence[int]", by_client: "Mapping[int, np.ndarray]") -> "np.ndarray":
    """Return the mean over some clients of their values, [draws]; NaN where one of them has none.

    They are the same clients in each draw: a mean over whoever has a value would be one of other clients each time.
    """
    import numpy as np

    made: np.ndarray = np.stack([by_client[client] for client in clients]).mean(0) if clients else np.full(1, np.nan)
    return made


def at_places(images: "ScoredBatch", places: "np.ndarray") -> "ScoredBatch":
    """Return some of the images."""
    from benchmark.counts import ScoredBatch

    return ScoredBatch(images.logits[places], images.y[places])


def values_in(metric: Metric, images: "ScoredBatch", times: "np.ndarray") -> "np.ndarray":
    """Return a metric of draws of images, float64 [draws]; NaN where it is not defined.

    Args:
        metric: which.
        images: n of them.
        times: how often each image is in each draw, [draws, n].
    """
    import numpy as np

    together = max(1, MOST_AT_ONCE // len(images.y))
    parts = [_in_draws(metric, images, times[start : start + together]) for start in range(0, len(times), together)]
    return np.concatenate(parts)


def _in_draws(metric: Metric, images: "ScoredBatch", times: "np.ndarray") -> "np.ndarray":
    import numpy as np
    import torch

    weights = torch.from_numpy(times)
    if metric.of is not None:
        made = metric.of(*(_counted(kind.count(_apart(images)), weights) for kind in metric.counts))
        return np.asarray(made, dtype="float64")
    if metric.of_draws is not None:
        unknown = images.predictions == images.classes  # without a prediction: it counts for nothing if not drawn
        drawn = (weights[:, unknown] > 0).any(1)
        return metric.of_draws(images, weights).masked_fill(drawn, float("nan")).numpy()
    rows = [torch.arange(len(images.y)).repeat_interleave(each) for each in weights]
    return np.asarray([value_of_images(metric, at_places(images, each.numpy())) for each in rows])


def _apart(images: "ScoredBatch") -> "ScoredBatch":
    """Return images as if each were a client's."""
    from benchmark.counts import ScoredBatch

    return ScoredBatch(images.logits.unsqueeze(1), images.y.unsqueeze(1))


def _counted(of_images: "Tensor", times: "Tensor") -> "Tensor":
    """Sum what each image counts for, [n, ...], as often as it is in each draw: float64 [draws, ...]."""
    whole = times.double() @ of_images.double().reshape(len(of_images), -1)
    return whole.view(len(times), *of_images.shape[1:])
