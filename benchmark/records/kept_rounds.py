"""The evaluations whose scored images a run keeps: which, and where they lie until the run ends."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, read_regular, replacing, write_bytes
from benchmark.metrics import EVALUATED
from benchmark.records.metrics_table import readable, round_file, rounds_in
from benchmark.records.predictions import CLASSES, PREDICTIONS, merged, parquet_of, parse_predictions
from benchmark.records.record_file import LARGEST
from benchmark.records.summary import average_by_round, best_round

if TYPE_CHECKING:  # slow to import
    import pandas as pd

Keep = Literal["none", "last", "best_on_val", "all"]
#: What of the scores chooses the best round: the mean over clients of this metric, at this point, on this split.
BEST = ("server", "val", EVALUATED)
#: Folder of the images of a run that goes on, a file for each round that may have to be kept.
PARTS = "predictions"


def rounds_to_keep(keep: Keep, metrics: "pd.DataFrame", test_sizes: tuple[int, ...]) -> set[int]:
    """Return the rounds whose images a finished run has.

    Args:
        keep: what the run was asked for.
        metrics: the long table of all evaluations.
        test_sizes: test images per client.
    """
    evaluated = set(metrics.loc[metrics["metric"] == EVALUATED, "round"])
    if keep == "best_on_val":
        return {best_round(metrics, test_sizes, *BEST)}
    return {"none": set(), "last": {max(evaluated)}, "all": evaluated}[keep]


class KeptRounds:
    """Keeps images of a run's evaluations in its directory.

    The file of the last evaluation is written over by the next one. Of ``all``, and of each round that was the best
    when it came, there is a file in :data:`PARTS` until the run ends: so a run can go on from any of its checkpoints.
    Which rounds these are follows from the metrics of the evaluations, and no checkpoint knows of it.

    Args:
        run_dir: the run's.
        keep: which evaluations.
    """

    def __init__(self, run_dir: Path, keep: Keep) -> None:
        self.run_dir = run_dir
        self.keep = keep
        self._best: tuple[bool, float] | None = None  # trained, and the value; of the best evaluation so far
        self._source: Path | None = None  # where the last images come from, until this run has taken some itself

    @property
    def _folder(self) -> Path:
        return self.run_dir / PARTS

    def take(self, round: int, metrics: "pd.DataFrame", images: "pd.DataFrame | None") -> None:
        """Keep the images of an evaluation, if they are to be kept so far.

        Args:
            round: that was evaluated.
            metrics: the long table of this evaluation.
            images: columns of :data:`benchmark.records.predictions.COLUMNS`; None where no image was scored.
        """
        wanted = self._wants(round, metrics)
        if images is None or not wanted:
            return
        if self.keep == "last":
            write_bytes(self.run_dir / PREDICTIONS, parquet_of(images))
            self._source = None
        else:
            write_bytes(round_file(make_folder(self._folder), round), parquet_of(images))

    def _wants(self, round: int, metrics: "pd.DataFrame") -> bool:
        """Return whether an evaluation may have to be kept, given those before it."""
        if self.keep != "best_on_val":
            return self.keep != "none"
        value = _on_val(metrics)
        # As of the best round in a summary: after training began, the first of equals.
        better = self._best is None or (not self._best[0] and round > 0) or value > self._best[1]
        if better:
            self._best = round > 0, value
        return better

    def take_up(self, source: Path, evaluations: "Iterator[tuple[int, pd.DataFrame]]") -> None:
        """Have the images of the evaluations so far in the run's directory, and no others.

        Args:
            source: the directory in which the run was, the same one or another.
            evaluations: rounds and long tables.

        Raises:
            ConfigurationError: images that must be kept are not there, or are those of another round.
        """
        elsewhere = not source.samefile(self.run_dir)
        if self.keep == "last":
            self._source = source
            scored = {round for round, table in evaluations if (table["metric"] == EVALUATED).any()}
            if elsewhere and scored and _rounds_of(source / PREDICTIONS) == {max(scored)}:
                write_bytes(self.run_dir / PREDICTIONS, _content(source / PREDICTIONS))
            elif elsewhere:  # a further evaluation makes the file; without one, the run does not finish
                (self.run_dir / PREDICTIONS).unlink(missing_ok=True)
        if self.keep not in ("best_on_val", "all"):
            self._remove_of_another_start()
            return
        self._best = None
        wanted = [round for round, table in evaluations if self._wants(round, table)]
        found = dict(rounds_in(source / PARTS))
        of_the_end = {} if found else _parts_of(source / PREDICTIONS)  # another run, which is finished
        needed = wanted if self.keep == "all" else wanted[-1:]
        if missing := [round for round in needed if round not in found and round not in of_the_end]:
            raise self._lacks(source, missing[0])
        for round in wanted:
            if round in found:  # better now than when the run ends
                _check_round(found[round], round)
        if elsewhere:
            for round in wanted:
                if round in found:
                    write_bytes(round_file(make_folder(self._folder), round), _content(found[round]))
                elif round in of_the_end:
                    write_bytes(round_file(make_folder(self._folder), round), parquet_of(of_the_end[round]))
        for round, path in rounds_in(self._folder):
            if round not in wanted:
                path.unlink()

    def _lacks(self, source: Path, round: int) -> ConfigurationError:
        return ConfigurationError(
            f"{source} does not have the images of round {round}, which data.keep_predictions={self.keep} keeps; put "
            f"back {PARTS}/ or {PREDICTIONS} as they were, or start without --ckpt_path"
        )

    def _remove_of_another_start(self) -> None:
        """Remove images of a run that was begun here, kept more, and was killed before its first checkpoint."""
        self.remove_parts()
        if self.keep == "none":
            for name in (PREDICTIONS, CLASSES):
                (self.run_dir / name).unlink(missing_ok=True)

    def finish(self, metrics: "pd.DataFrame", test_sizes: tuple[int, ...]) -> bool:
        """Write ``predictions.parquet`` of the run's rounds; return whether images are kept.

        Args:
            metrics: the long table of all evaluations.
            test_sizes: test images per client.

        Raises:
            ConfigurationError: nothing was evaluated after a checkpoint whose last images are not there.
        """
        if self._source is not None and (metrics["metric"] == EVALUATED).any():
            wanted = rounds_to_keep(self.keep, metrics, test_sizes)
            if _rounds_of(self.run_dir / PREDICTIONS) != wanted:
                raise self._lacks(self._source, max(wanted))
        if self.keep in ("best_on_val", "all"):
            wanted = rounds_to_keep(self.keep, metrics, test_sizes)
            parts = [path for round, path in rounds_in(self._folder) if round in wanted]
            if parts:
                with replacing(self.run_dir / PREDICTIONS) as stream:
                    merged(parts, stream)
        return self.keep != "none"

    def remove_parts(self) -> None:
        """Remove the files of single rounds, which ``predictions.parquet`` holds."""
        if self._folder.is_dir():
            for _, path in rounds_in(self._folder):
                path.unlink()
            if not any(self._folder.iterdir()):
                self._folder.rmdir()


def _on_val(metrics: "pd.DataFrame") -> float:
    """Return what chooses the best round, of one evaluation; minus infinity where it is no number."""
    clients = [0] * (1 + int(metrics["client"].max()))
    _, found = average_by_round(metrics, clients, *BEST)
    value = float(found["average"][0]) if found else float("nan")
    return value if value == value else float("-inf")


def _content(path: Path) -> bytes:
    with readable(path, "table of predictions"):
        return read_regular(path, LARGEST[PREDICTIONS])


def _rounds_of(path: Path) -> set[int]:
    """Return the rounds of a file of images; none where there is no such file."""
    if not path.is_file():
        return set()
    with readable(path, "table of predictions"):
        rows = parse_predictions(read_regular(path, LARGEST[PREDICTIONS]), every=True, columns=("round",))
    return {*rows["round"].unique().tolist()}


def _check_round(path: Path, round: int) -> None:
    with readable(path, "table of predictions"):
        if (rounds := sorted(_rounds_of(path))) != [round]:
            raise ValueError(f"it is of {f'round {rounds[0]}' if rounds else 'no round'}, expected {round}")


def _parts_of(path: Path) -> "Mapping[int, pd.DataFrame]":
    """Return the rows of a finished run's images by round; none where there is no such file."""
    if not path.is_file():
        return {}
    with readable(path, "table of predictions"):
        rows = parse_predictions(read_regular(path, LARGEST[PREDICTIONS]), every=True)
    return {cast(int, round): part for round, part in rows.groupby("round", sort=True)}
