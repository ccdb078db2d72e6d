"""Decision curves of a finished run's test images: the net benefit of acting on a class, by threshold."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark.errors import ConfigurationError, printable
from benchmark.formulas import THRESHOLDS, net_benefit
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.class_values import label_of
from benchmark.records.predictions import images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.words import POINT_WORDS

if TYPE_CHECKING:  # slow to import
    import pandas as pd


class DecisionCurve(NamedTuple):
    """Net benefits at the thresholds .05 to .95 (:data:`benchmark.formulas.THRESHOLDS`); acting on no image has 0.

    Attributes:
        images: that it is made of.
        own: those of the class.
        model: of acting where the model gives the class at least the threshold as probability.
        every: of acting on every image.
    """

    images: int
    own: int
    model: tuple[float, ...]
    every: tuple[float, ...]


def decision_curves(run: StoredRun, of: int, point: str) -> dict[int, DecisionCurve]:
    """Return the decision curve of each client's test images, and of all clients' together (-1).

    Args:
        run: that kept its images.
        of: the class, a label of the split ``test``.
        point: of a round, ``"server"`` or ``"local"``.

    Raises:
        ConfigurationError: the run kept no test images at this point, or they are not the ones that it wrote.
    """
    rows = images_scored_on_test(run, point)
    own = {int(client): rows[rows["client"] == client] for client in sorted({*rows["client"]})}
    return {client: _curve(images, of) for client, images in {POOLED_CLIENT: rows, **own}.items()}


def images_scored_on_test(run: StoredRun, point: str) -> "pd.DataFrame":
    """Return the rows of a run's kept test images at a point of a round.

    Raises:
        ConfigurationError: there are none, or they are not the ones that the run wrote.
    """
    rows = run.scored(point, "test")
    if not len(rows):
        raise ConfigurationError(
            f"{run.folder} stored no predictions of test images {POINT_WORDS[point]}; after local training "
            "--data.evaluate_local=true scores them"
        )
    return rows


def _curve(rows: "pd.DataFrame", of: int) -> DecisionCurve:
    model, every = net_benefit(images_of(rows), of)
    return DecisionCurve(len(rows), int((rows["label"] == of).sum()), tuple(model.tolist()), tuple(every.tolist()))


def print_net_benefit(run_dir: str | Path, named: str) -> None:
    """Print the decision curve of all clients' test images together, a table for each point.

    Args:
        run_dir: of a run that kept its images.
        named: the class, by its name or its label.

    Raises:
        ConfigurationError: as :func:`decision_curves`; or the run has no such class.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run, console = stored_run(run_dir), Console(highlight=False, markup=False)
    for point in run.points_scored("test") or ["server"]:  # without any, it says so
        names = run.class_names(len(images_scored_on_test(run, point)["logits"].iloc[0]))
        of = label_of(named, names, f"{run.folder}")
        curve = decision_curves(run, of, point)[POOLED_CLIENT]
        title = f"net benefit of acting on {names[of]}, test images {POINT_WORDS[point]}"
        shown = Table("threshold", "model", "every image", "no image", title=Text(printable(title), style="italic"))
        for threshold, model, every in zip(THRESHOLDS, curve.model, curve.every, strict=True):
            shown.add_row(f"{threshold:.2f}", f"{model:.4f}", f"{every:.4f}", "0")
        console.print(shown)
        console.print(
            f"{curve.own} of {curve.images} images are of the class. All clients' images together: where models are "
            "personal, this compares probabilities of different models."
        )
