"""What a figure is drawn from, and what a drawing is."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict, with_config

from benchmark.errors import ConfigurationError
from benchmark.yaml_files import as_declared, read_yaml

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from matplotlib.figure import Figure


CONFIG = "configs/figures/pfedpt.yaml"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class RunSpec:
    """One run: the beginning of its directory's name, its configs and its overrides."""

    name: str
    configs: list[str]
    overrides: list[str] = field(default_factory=list)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PartitionSpec:
    """One partition: its heading, a data configuration, and overrides without the leading dashes."""

    label: str
    config: str
    overrides: list[str] = field(default_factory=list)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Preset:
    """One preset of ``configs/figures/pfedpt.yaml``.

    Attributes:
        note: first sentence of every caption; empty for none.
        seed: of all runs.
        runs: by the name that a figure asks for.
        partitions: of Fig. 8.
        new_client_images: at most so many training images of a new client are used (Fig. 11).
        adaptation_epochs: passes over them (Fig. 11).
    """

    note: str
    seed: int
    runs: dict[str, RunSpec]
    partitions: list[PartitionSpec]
    new_client_images: int = 400
    adaptation_epochs: int = 10


def load_preset(name: str) -> Preset:
    """Read one preset of ``configs/figures/pfedpt.yaml``.

    Raises:
        ConfigurationError: no such file or preset, or a key or value that does not fit.
    """
    content = read_yaml(Path(CONFIG))
    if not isinstance(content, dict) or name not in content:
        raise ConfigurationError(f"{CONFIG} has no preset {name!r}; it has {', '.join(content or ())}")
    return as_declared(Preset, content[name], f"{CONFIG}, preset {name}")


@dataclass(frozen=True)
class Sources:
    """What a figure may draw from.

    Attributes:
        runs: directories of finished runs, in the order in which the figure names them.
        data_dir: folder of the data sets, or None.
        preset: sizes and partitions.
        table: the CSV of Fig. 6's table; None for other figures.
    """

    runs: list[Path]
    data_dir: Path | None
    preset: Preset
    table: Path | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture, the numbers in it, and what it shows in words."""

    figure: "Figure"
    numbers: "pd.DataFrame"
    caption: str
