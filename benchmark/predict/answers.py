"""Ask a client about images, one after the other, and make tables of its answers."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.predict.client_model import ClientModel

#: What a spreadsheet takes for the beginning of a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Answer:
    """A client's answer about one image.

    Attributes:
        name: of the image.
        probabilities: of the classes, float64 [C].
        order: the classes, the most probable first.
    """

    name: str
    probabilities: Tensor
    order: list[int]


@dataclass(frozen=True)
class Unread:
    """An image that could not be read, and why."""

    name: str
    why: str


def answers(
    model: ClientModel, images: Iterable[tuple[str, NDArray[np.uint8] | str]], batch_size: int | None = None
) -> Iterator[Answer | Unread]:
    """Ask a client about images, some at a time; no more are held.

    Args:
        model: the client's.
        images: name and pixels of each, uint8 [3, H, W], or why it cannot be read.
        batch_size: images at a time; None for those of a step of the run's evaluation.

    Raises:
        ConfigurationError: another batch size than the run's, where logits rest on draws, which are a step's.
    """
    if model.draws and batch_size not in (None, model.step):
        raise ConfigurationError(
            f"{type(model.method).__name__} draws for each step of its evaluation, of {model.step} images: leave the "
            "batch size out"
        )
    together, number = batch_size or model.step, 0
    names: list[str] = []
    waiting: list[NDArray[np.uint8]] = []
    for name, pixels in images:
        if isinstance(pixels, str):
            yield Unread(name, pixels)
            continue
        names.append(name)
        waiting.append(pixels)
        if len(waiting) == together:
            yield from _asked(model, names, waiting, number)
            names, waiting, number = [], [], number + 1
    if waiting:
        yield from _asked(model, names, waiting, number)


def _asked(
    model: ClientModel, names: Sequence[str], pixels: Sequence[NDArray[np.uint8]], number: int
) -> Iterator[Answer]:
    logits = model.logits(torch.from_numpy(np.stack(pixels)), number)
    orders = logits.argsort(dim=1, descending=True, stable=True)  # of equal ones the first, as it is counted in a run
    for name, of_image, order in zip(names, logits.double().softmax(dim=1), orders.tolist(), strict=True):
        yield Answer(name, of_image, order)


# ------------------------------------------------------------------ tables


def heads(class_names: Sequence[str], top: int = 1, every: bool = False) -> list[str]:
    """Return the columns of a table of answers, without that of the images' names.

    Args:
        class_names: in the order of the logits.
        top: classes of each image, the most probable first.
        every: also the probability of every class, a column each.
    """
    ranks = ["", *(f"_{rank}" for rank in range(2, min(top, len(class_names)) + 1))]
    found = [f"{name}{rank}" for rank in ranks for name in ("class", "probability")]
    return found + [f"p({name})" for name in class_names] * every


def cells(answer: Answer, class_names: Sequence[str], top: int = 1, every: bool = False) -> list[Any]:
    """Return an answer's cells below :func:`heads`."""
    of_class = answer.probabilities.tolist()
    found: list[Any] = []
    for label in answer.order[:top]:
        found += [class_names[label], of_class[label]]
    return found + of_class * every


def csv_line(*cells: Any) -> str:
    """Return a line of a CSV file, in which no cell is a formula to a spreadsheet."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow([_plain(cell) for cell in cells])
    return stream.getvalue()


def csv_path(path: str) -> str:
    """Return a path that begins as no formula does, and names the same file."""
    return f"./{path}" if path.startswith(FORMULA) else path


def _plain(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    text = str(cell)
    return f"'{text}" if text.startswith(FORMULA) else text
