"""Writes ``subgroups.parquet`` as a run begins."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmark.files import write_bytes
from benchmark.records.subgroups import SUBGROUPS, subgroups_parquet_of
from datamodules.subgroups import subgroups_of

if TYPE_CHECKING:
    from datamodules.federated import FederatedDataModule


def write_subgroups(run_dir: Path, data: "FederatedDataModule") -> None:
    """Write the subgroups of all held-out images; without ``data.subgroups``, remove those of another start.

    Args:
        run_dir: the run's.
        data: that are set up.

    Raises:
        ConfigurationError: a column has no subgroups to compare.
    """
    path = run_dir / SUBGROUPS
    if data.subgroups is None:
        path.unlink(missing_ok=True)
        return
    held_out = [rows for split in data.held_out.values() for rows in split.values()]
    images = np.unique(np.concatenate(held_out))
    write_bytes(path, subgroups_parquet_of({name: subgroups_of(data.source, name, images) for name in data.subgroups}))
