"""A partition of several data sets: who learns which classes of which, and what is tested once for all."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.ranges import FewOrNone, PositiveInt
from datamodules.partition import ClientSplits, Indices, LabelSpace, Partition
from datamodules.partition.members import draw_shots, members_by_class
from datamodules.partition_few_shot import base_and_novel
from datamodules.several_data_sets import SeveralDataSets
from datamodules.source import ImagePool, ImageSource

Classes = tuple[int, ...]


class ClassesOfDataSets(Partition):
    """Clients learn a few classes of one of several data sets, and are tested on all that nobody has learned (FedTPG).

    The first ``ceil(C / 2)`` classes of a data set are base, the others novel. Its base classes are cut in their order
    into q groups, ``classes_per_client`` in each and what is left in the last, q being base classes by classes of a
    client, rounded half to even; a group is a client. Its label space, in training and on split ``test``, are its own
    classes, of which it trains on ``shots`` images each and is tested on all test images.

    Beside the clients there is a tester for each data set (see ``ClientSplits.testers``), which the server's values are
    scored on once:

    - ``base``: test images of all base classes of the data set,
    - ``novel``: those of its novel classes,
    - ``unseen``: those of all classes of a data set that nobody trains on.

    The average of a split over its testers is a mean over data sets. That of ``test`` is over clients, of which a large
    data set has many; FedTPG takes the mean of each data set first, as a table's statistic ``by_data_set`` does.

    FedTPG's protocols: "cross_cls" is the default with its nine data sets; "cross_data" is ``novel: false``,
    ``classes_per_client: 5`` with ImageNet and ten data sets behind it that are ``unseen``; domain generalization has
    ImageNet's four variants behind it. Their few images are other draws than here.

    Args:
        classes_per_client: classes of a client.
        shots: training images of each class, all of a class that has fewer; None for all.
        novel: keep the second half of the classes from training; without it all classes are learned, and the data sets
            that are trained on have no tester.
        unseen: so many of the data sets, the last ones, that nobody trains on.
    """

    def __init__(
        self,
        classes_per_client: PositiveInt = 20,
        shots: PositiveInt | None = 8,
        novel: bool = True,
        unseen: FewOrNone = 0,
    ) -> None:
        self.classes_per_client = classes_per_client
        self.shots = shots
        self.novel = novel
        self.unseen = unseen
        self.further_splits = (*(("base", "novel") if novel else ()), *(("unseen",) if unseen else ()))

    def client_names(self, source: ImageSource) -> list[str]:
        """The data sets' names, numbered where one has several clients; then those of the testers.

        Raises:
            ConfigurationError: not several data sets, or none that is trained on.
        """
        classes = self._classes_in(source)
        names = []
        for data_set, groups in zip(classes, self._groups([*classes.values()]), strict=False):
            names += [f"{data_set} {number}" for number in range(len(groups))] if len(groups) > 1 else [data_set]
        whole = [f"{data_set} (whole)" for data_set in classes]
        return names + whole[len(whole) - self.testers(source) :]

    def testers(self, source: ImageSource) -> int:
        """One for each data set of which classes are left out of training."""
        return len(self._tested([*self._classes_in(source).values()]))

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Cut the classes of each data set, draw the shots."""
        labels, test, data_set = pool.labels.numpy(), pool.test.numpy(), pool.domains.numpy()
        classes = [tuple(np.unique(labels[data_set == number]).tolist()) for number in range(int(data_set.max()) + 1)]
        few = np.zeros(len(labels), dtype=bool)
        few[np.concatenate(draw_shots(members_by_class(labels, ~test), self.shots, rng))] = True
        groups = [group for of in self._groups(classes) for group in of]
        tested = self._tested(classes)

        def held(side: NDArray[np.bool_], by_client: Sequence[Classes]) -> list[Indices]:
            return [np.flatnonzero(side & np.isin(labels, mine)) for mine in by_client]

        by_split = {"train": groups + [()] * len(tested)}
        by_split["test"] = by_split["train"]
        by_split |= {split: [()] * len(groups) + [of.get(split, ()) for of in tested] for split in self.further_splits}
        train, own, *others = (held(few if split == "train" else test, of) for split, of in by_split.items())
        spaces: dict[str, LabelSpace] = {**by_split}
        return ClientSplits(train, own, dict(zip(self.further_splits, others, strict=True)), spaces, len(tested))

    def _groups(self, classes: Sequence[Classes]) -> list[list[Classes]]:
        """Return the classes of each client of each data set that is trained on."""
        made = []
        for of in classes[: len(classes) - self.unseen]:
            learned, size = base_and_novel(of)[0] if self.novel else of, self.classes_per_client
            count = max(1, round(len(learned) / size))
            made.append([learned[a:b] for a, b in pairwise([*range(0, count * size, size), len(learned)])])
        return made

    def _tested(self, classes: Sequence[Classes]) -> list[dict[str, Classes]]:
        """Return the classes of each tester by split."""
        trained = len(classes) - self.unseen
        halves = map(base_and_novel, classes[:trained]) if self.novel else ()
        unseen = [{"unseen": of} for of in classes[trained:]]
        return [dict(zip(("base", "novel"), both, strict=True)) for both in halves] + unseen

    def _classes_in(self, source: ImageSource) -> dict[str, Classes]:
        if not isinstance(source, SeveralDataSets):
            raise ConfigurationError(
                f"ClassesOfDataSets divides several data sets, got {type(source).__name__}; take "
                "datamodules.SeveralDataSets with a list of sources"
            )
        if self.unseen >= len(source.data_sets):
            raise ConfigurationError(
                f"unseen={self.unseen} leaves none of the {len(source.data_sets)} data sets to train on; give less"
            )
        trained = source.sources[: len(source.sources) - self.unseen]
        if tested := [each.recorded_name for each in trained if each.test_only]:
            raise ConfigurationError(
                f"{tested[0]} has test images alone, and with unseen={self.unseen} clients would train on it; put it "
                "last in sources, and count it in unseen"
            )
        return source.data_sets
