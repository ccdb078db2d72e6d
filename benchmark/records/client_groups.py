"""Groups of a run's clients over whose means a statistic is the mean."""

from collections.abc import Callable, Sequence

from benchmark.records.data_sets import data_sets_of
from benchmark.records.record import RunRecord

#: Each is a list of clients by index.
Groups = list[list[int]]
#: Makes groups of a record and the training images of each client, None where they are not known.
GroupsOf = Callable[[RunRecord, Sequence[int] | None], Groups]


def groups_of(record: RunRecord, train_sizes: Sequence[int] | None, statistic: str) -> Groups:
    """Return the groups of a statistic of :data:`GROUPS`; none where the run has none or does not say."""
    return [group for group in GROUPS[statistic](record, train_sizes) if group]


def _of_a_data_set(record: RunRecord, train_sizes: Sequence[int] | None) -> Groups:
    data_sets = data_sets_of(record) or ()
    return [[k for k, of in enumerate(data_sets) if of == name] for name in dict.fromkeys(data_sets)]


def _that_trained(record: RunRecord, train_sizes: Sequence[int] | None) -> Groups:
    return [[k for k, trained in enumerate(record.trained or ()) if trained is True]]


def _that_never_trained(record: RunRecord, train_sizes: Sequence[int] | None) -> Groups:
    return [[k for k, trained in enumerate(record.trained or ()) if trained is False]]


def _third(number: int) -> GroupsOf:
    """Return a function for a third of the clients with training and test images, by their training images.

    The first and the last third are of one size. Of two clients with as many images the one with the lower index
    counts as the smaller. A client that never took part is in none: a model of its own that was never trained says
    nothing about its images. The others stay in the third that they have where all take part.
    """

    def of(record: RunRecord, train_sizes: Sequence[int] | None) -> Groups:
        sizes = zip(train_sizes or (), record.test_sizes, strict=False)
        ordered = sorted((trained, k) for k, (trained, tested) in enumerate(sizes) if trained and tested)
        outer = round(len(ordered) / 3)
        cuts = (0, outer, len(ordered) - outer, len(ordered))
        of_all = sorted(k for _, k in ordered[cuts[number] : cuts[number + 1]])
        return [[k for k in of_all if not record.trained or record.trained[k] is not False]]

    return of


#: Thirds of the clients, the one with the fewest training images first.
THIRDS = ("fewest", "medium", "most")
#: By the statistic's name, in :data:`benchmark.metrics.STATISTICS`.
GROUPS: dict[str, GroupsOf] = {
    "by_data_set": _of_a_data_set,
    "trained": _that_trained,
    "untrained": _that_never_trained,
    **{name: _third(number) for number, name in enumerate(THIRDS)},
}
