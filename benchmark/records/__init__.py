"""Records of finished runs: writing, reading, checking and grouping them.

A run directory holds

* ``config.yaml``: the resolved configuration,
* ``manifest.json``: the partition of the data over the clients,
* ``metrics.parquet``: the long table client x round x metric (see :data:`benchmark.records.metrics_table.COLUMNS`);
  while the run goes on, a table of the same columns for each evaluated round in the folder ``metrics``,
* with ``--data.metrics=clinical`` or ``--data.keep_predictions`` ``predictions.parquet``: the scored images of the
  evaluations that are kept (see :data:`benchmark.records.predictions.COLUMNS` and
  :mod:`benchmark.records.kept_rounds`), and ``classes.parquet``: values by client and class,
* with ``--data.subgroups`` ``subgroups.parquet``: the subgroups that these images are in
  (see :data:`benchmark.records.subgroups.COLUMNS`),
* ``checkpoints/last.ckpt``: for resuming only,
* ``record.json``: everything else. It is written last and atomically, so that a run is finished exactly when this
  file is there.

The summaries live in ``record.json``, so that many runs can be compared without opening their tables.
"""
