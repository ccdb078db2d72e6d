"""What the engine needs of a datamodule."""

from typing import Literal, Protocol

from torch import Tensor

from benchmark.engine.compiled_step import CompileMode
from benchmark.engine.loaders import Loaders
from benchmark.engine.pool import Transform
from benchmark.federation import Federation


class Images(Protocol):
    """All images of a data set: uint8 [n, 3, H, W], and their labels, int64 [n]."""

    @property
    def images(self) -> Tensor:
        """The pixels."""

    @property
    def labels(self) -> Tensor:
        """Classes."""


class FederatedData(Protocol):
    """A data set that is divided over clients, and how it is simulated; see ``FederatedDataModule``."""

    cohort_width: int | Literal["auto"]
    cache_features: bool | Literal["auto"]
    on_divergence: Literal["drop", "raise"]
    compile_steps: CompileMode | None
    num_workers: int
    loaders: Loaders | None

    @property
    def transform(self) -> Transform:
        """From stored images to the backbone's input."""

    @property
    def pool(self) -> Images:
        """The images, once they are read."""

    @property
    def federation(self) -> Federation:
        """The facts, once the images are divided."""
