"""A folder of results as ``benchmark report`` reads it, with hostile names in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image
from three_clients import HELD, LABELS, LOGITS

from benchmark.files import write_json
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.predictions import PREDICTIONS, parquet_of
from benchmark.records.record import RunRecord
from benchmark.records.record_file import write_record
from benchmark.records.subgroups import SUBGROUPS, subgroups_parquet_of
from benchmark.tables.frame import LONG_COLUMNS

HOSTILE = '</script><img src=x onerror="document.title=1">'


def record_of(clients: int | Sequence[str] = 2, seed: int = 3, **fields: Any) -> RunRecord:
    """Return the record of a run of two rounds, without a summary; each client has ten test images.

    Args:
        clients: how many, or their names.
        seed: of the run.
        fields: of the record that differ.
    """
    names = [f"domain {client}" for client in range(clients)] if isinstance(clients, int) else clients
    usual: dict[str, Any] = {
        "method": "FedAvg",
        "dataset": "Digits",
        "setting": "one domain per client",
        "test_sizes": tuple([10] * len(names)),
        "manifest_hash": "abc",
        "device": "cpu",
        "environment": {"hardware": {"cpu": "test", "cores": 1, "gpus": []}},
        "rounds": 2,
        "rounds_trained": 2,
        "communication": {"up_bytes": 40.0, "down_bytes": 40.0, "up_floats": 10.0, "down_floats": 10.0},
        "seconds": {"total": 3.0, "training": 2.0, "evaluation": 1.0},
        "peak_memory_bytes": None,
    }
    return RunRecord(client_names=tuple(names), seed=seed, **{**usual, **fields})


def write_run(
    folder: Path,
    method: str,
    seed: int,
    accuracies: list[float],
    lr: float = 0.1,
    up: float = 4000.0,
    local: list[float] | None = None,
    root: str = "data",
    split: str = "abc",
    source: str = "CIFAR10",
    arguments: Mapping[str, Any] = {},
    kept: pd.DataFrame | None = None,
    subgroups: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    data: Mapping[str, Any] = {},
    **fields: Any,
) -> None:
    """A run of three clients with further arguments of the method, of data, and fields; the last one's name is hostile.

    With ``kept`` images it has three classes, of which the last one's name is hostile, too. Their subgroups are by
    column and value.
    """
    folder.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "model": {"class_path": f"methods.{method}", "init_args": {"backbone": "PaperCNN", "lr": lr, **arguments}},
        "data": {
            "source": {"class_path": f"datamodules.{source}", "init_args": {"root": root}},
            "partition": {"class_path": "datamodules.DirichletShared", "init_args": {"alpha": 0.1}},
            "clients_per_round": 2,
            "batch_size": 8,
            **data,
        },
    }
    write_json(folder / "config.yaml", config)  # JSON is YAML
    names = ("amazon", "dslr", HOSTILE)
    classes, counts = ["bike", "mug"], [[5, 0], [1, 1], [0, 7]]
    if kept is not None:
        classes, counts = [*classes, HOSTILE], [[*each, 0] for each in counts]
        (folder / PREDICTIONS).write_bytes(parquet_of(kept))
    if subgroups is not None:
        (folder / SUBGROUPS).write_bytes(subgroups_parquet_of(subgroups))
    clients = [{"name": n, "train_classes": c, "test_classes": c} for n, c in zip(names, counts, strict=True)]
    write_json(folder / "manifest.json", {"class_names": classes, "clients": clients})
    points = {"server": accuracies} | ({"local": local} if local else {})
    rows = [
        (number, client, point, "test", "accuracy", value * number / 2)
        for number in (0, 1, 2)
        for point, values in points.items()
        for client, value in enumerate(values)
    ]
    of_this_run = {
        "method": method,
        "dataset": source,
        "setting": "Dirichlet",
        "test_sizes": (10, 20, 30),
        "manifest_hash": split,
        "environment": {},
        "communication": {"up_bytes": up, "down_bytes": up, "up_floats": up / 4, "down_floats": up / 4},
        "seconds": {"total": 30.0, "training": 2.0, "evaluation": 1.0},
        "peak_memory_bytes": 123_000_000,
    }
    record = record_of(names, seed, **{**of_this_run, **fields})
    write_record(folder, record, pd.DataFrame(rows, columns=list(COLUMNS)), predictions=kept is not None)


def kept_images(point: str = "server") -> pd.DataFrame:
    """The twelve images of three clients as a run keeps them."""
    client = [number for number, (begin, end) in enumerate(HELD) for _ in range(begin, end)]
    made = {"point": point, "split": "test", "round": 2, "client": client, "image": range(12), "group": range(12)}
    predicted = [max(range(3), key=row.__getitem__) for row in LOGITS]
    return pd.DataFrame(made | {"label": LABELS, "prediction": predicted, "logits": LOGITS})


def write_results(folder: Path) -> Path:
    """Four runs of two methods, a table, one of an older form, and a figure."""
    write_run(folder / "runs" / "a0", "FedAvg", 0, [0.5, 0.7, 0.9], local=[0.6, 0.7, 0.8])
    write_run(folder / "runs" / "a1", "FedAvg", 1, [0.6, 0.8, 1.0], local=[0.6, 0.7, 0.8])
    write_run(folder / "runs" / "b0", "FedVPT", 0, [0.2, 0.4, 0.3], up=0.0)
    write_run(folder / "runs" / "b1", "FedVPT", 0, [0.1, 0.4, 0.4], lr=0.5)
    (folder / "paper").mkdir()
    heads = "paper,table,dataset,setting,backbone,method,metric,value,std"
    (folder / "paper" / "one.csv").write_text(f"{heads}\npFedPT,1,CIFAR-10,dir0.1,CNN,FedAvg,best accuracy,61.92,\n")
    (folder / "tables").mkdir()
    shared = {"table": "t", "preset": "paper", "title": "A <table>", "dataset": "Rooms", "method": "Alpha", "seeds": 2}
    shared |= {"asked": 3, "finished": 2, "codes": 1, "rows": 4}
    shared |= {"split": "test", "metric": "accuracy", "summary": "last", "bytes_up": 1000.0, "seconds": 3.0}
    lines: list[dict[str, Any]] = [
        {"kind": "column", "column": "Avg", "ours": 60.0, "std": 1.5, "paper": 62.0, "difference": -2.0},
        {"kind": "statistic", "column": "average", "ours": 60.0},
        {"kind": "paired", "column": "minus Beta", "ours": 2.5, "low": 1.0, "high": 4.0, "pairs": 6, "over": "clients"},
        {"kind": "note", "column": "Eight of <100> rounds.", "dataset": None},
    ]
    frame = pd.DataFrame([shared | line for line in lines]).reindex(columns=list(LONG_COLUMNS))
    frame.to_csv(folder / "tables" / "t_paper.csv", index=False)
    (folder / "tables" / "old_demo.csv").write_text("table,preset\nx,y\n")
    (folder / "figures").mkdir()
    Image.new("RGB", (40, 30), "red").save(folder / "figures" / "prompt_sizes.png")
    (folder / "figures" / "prompt_sizes.txt").write_text("Accuracy against the prompt's size & shape.")
    return folder
