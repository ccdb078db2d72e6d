"""Interfaces that a datamodule and the module of a method offer to the engine."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from benchmark.engine.batches.loaders import Loaders
from benchmark.engine.batches.pool import Images, Transform
from benchmark.engine.plan.work import Shown
from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.simulation import Simulation
from benchmark.federation import Federation, Values
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.server import Declared


class FederatedData(Protocol):
    """A data set that is divided over clients, and how it is simulated; see ``FederatedDataModule``."""

    clients_at_once: int | Literal["auto"]
    cache_features: bool | str
    evaluate_local: bool | None
    metrics: list[str | dict[str, Any]] | dict[str, Any] | str | None
    min_support: int
    on_divergence: Literal["drop", "raise"]
    one_by_one: bool
    record_privacy: RecordLevelPrivacy | None
    num_workers: int
    loaders: Loaders | None

    @property
    def transform(self) -> Transform:
        """From stored images to the backbone's input."""

    @property
    def pool(self) -> Images:
        """The images, once they are read."""

    @property
    def keeps_images(self) -> bool:
        """Tell whether an evaluation keeps its images, also where no metric is made of them."""

    @property
    def others(self) -> Mapping[Shown, Images]:
        """Further images that clients score: foreign ones, whose labels count for nothing, and corrupted ones."""

    @property
    def federation(self) -> Federation:
        """The facts, once the images are divided."""


class Member(Declared, Protocol):
    """A method that takes part in a federation; see ``FederatedMethod``."""

    simulation: Simulation
    #: the server that it has joined last
    served: Any

    def join(self, data: FederatedData, ranks: Ranks | None = None) -> Simulation:
        """Freeze the parameters, and make the slots and all clients' state."""

    def initial_values(self) -> Values:
        """Return copies of what the server may see."""
