"""Metrics of a user's own: a class of torchmetrics, or of any module, or a function of logits and labels.

A metric sees all images of a client at once, in the order of the image pool, in a new object in one process: so neither
batches nor ranks can change it. One that has no number for some images returns NaN there.
"""

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pydoc import ErrorDuringImport, locate
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, with_config

from benchmark.config.yaml_files import as_declared
from benchmark.counts import ScoredBatch
from benchmark.errors import ConfigurationError
from benchmark.metrics import HUGE, LONGEST_NAME, METRICS, SETS, Metric, know_metric, metrics_of, with_support

if TYPE_CHECKING:  # slow to import
    import torchmetrics
    from torch import Tensor


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class OwnMetric:
    """Declaration of a metric in ``data.metrics``.

    Attributes:
        class_path: dotted path of a class that derives from ``torchmetrics.Metric``, or of a function that takes
            predictions [n, C] or [n] and labels [n] and returns a number.
        init_args: of its constructor, or further arguments of the function; ``num_classes`` and ``task: multiclass``
            are added where it takes them.
        name: in files and tables; by default the class's in snake case.
        input: what it takes; by default probabilities for a class, logits for a function.
        higher_is_better: by default what the class says.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    input: Literal["logits", "probabilities", "predictions"] | None = None
    higher_is_better: bool | None = None

    @property
    def called(self) -> str:
        """Return the metric's name."""
        last = self.class_path.rpartition(".")[2]
        return self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", last).lower()


#: What ``data.metrics`` may be: a set's name, a metric, or a list of both.
Given = Sequence[str | Mapping[str, Any]] | Mapping[str, Any] | str | None


def _entries(given: Given) -> list[str | Mapping[str, Any]]:
    """Return the entries of what ``data.metrics`` is given."""
    if given is None:
        return []
    return [given] if isinstance(given, str | Mapping) else [*given]


def declared(given: Given) -> list[OwnMetric]:
    """Return the own metrics of what ``data.metrics`` is given, in which names of sets stand for these.

    Raises:
        ConfigurationError: an entry of another form, or a name that another metric has.
    """
    entries = [entry for entry in _entries(given) if entry not in SETS]
    declarations = [entry if isinstance(entry, Mapping) else {"class_path": entry} for entry in entries]
    found = [as_declared(OwnMetric, e, f"data.metrics: {e!s:.80} declares no metric") for e in declarations]
    names = [each.called for each in found]
    for each in found:
        if "." not in each.class_path:
            raise ConfigurationError(
                f"data.metrics: there is no set of metrics {each.class_path!r:.80}; give {' or '.join(SETS)}, or the "
                "dotted path of a class or a function, such as torchmetrics.classification.MulticlassJaccardIndex"
            )
        if not re.fullmatch(r"[a-z0-9_]+", each.called):
            raise ConfigurationError(f"data.metrics: the name {each.called!r:.80} must be of a-z, 0-9 and _ only")
        if len(each.called) > LONGEST_NAME:
            raise ConfigurationError(
                f"data.metrics: the name {each.called!r:.80}... has {len(each.called)} signs, and at most "
                f"{LONGEST_NAME} are recorded; give a shorter name: {{class_path: {each.class_path:.80}, name: short}}"
            )
        ours = each.called in METRICS and METRICS[each.called].first_in is not None
        if ours or names.count(each.called) > 1:
            raise ConfigurationError(
                f"data.metrics: two metrics are called {each.called!r}; give {each.class_path} another name: "
                f"{{class_path: {each.class_path}, name: my_{each.called}}}"
            )
    return found


def chosen_metrics(given: Given, min_support: int = 1) -> tuple[Metric, ...]:
    """Return the metrics that ``data.metrics`` asks for, and make its own ones known by name.

    Args:
        given: what ``data.metrics`` is.
        min_support: what ``data.min_support`` is (see :func:`benchmark.metrics.with_support`).

    Raises:
        ConfigurationError: see :func:`declared` and :func:`found`.
    """
    sets = [entry for entry in _entries(given) if isinstance(entry, str) and entry in SETS]
    own = [_metric(each) for each in declared(given)]
    for metric in own:
        METRICS[metric.name] = metric
    suites = metrics_of(max(sets, key=SETS.index, default="basic"))
    return (*(with_support(metric, min_support) for metric in suites), *own)


def know_declared(given: Given) -> None:
    """Make own metrics known by name and direction; what they compute is imported only where the class says the latter.

    Raises:
        ConfigurationError: as for :func:`chosen_metrics`.
    """
    for each in declared(given):
        know_metric(each.called, not _higher_is_better(each))


def paths_of(given: Given) -> list[dict[str, str]]:
    """Return the paths of own metrics as configurations name classes."""
    return [{"class_path": each.class_path} for each in declared(given)]


def own_facts(given: Given) -> dict[str, Any] | None:
    """Return what a record says of own metrics, by name; None without any."""
    made = {
        each.called: {"class_path": each.class_path, "lower_is_better": not _higher_is_better(each)}
        for each in declared(given)
    }
    return made or None


def found(path: str) -> Any:
    """Return the class or the function at a dotted path.

    Raises:
        ConfigurationError: it is not there, cannot be imported, or is something else.
    """
    from torchmetrics import Metric as TorchMetric

    try:
        kind: Any = locate(path)
    except (ErrorDuringImport, SystemExit) as error:
        reason = error.value if isinstance(error, ErrorDuringImport) else f"its module calls sys.exit({error.code})"
        raise ConfigurationError(f"the metric {path} cannot be imported: {reason}") from error
    if kind is None:
        raise ConfigurationError(
            f"there is no metric {path!r:.80}; expected the dotted path of a class that derives from "
            "torchmetrics.Metric, or of a function of logits and labels, in a package or in the folder in which the "
            "command is started"
        )
    if not (inspect.isclass(kind) and issubclass(kind, TorchMetric)) and not inspect.isfunction(kind):
        raise ConfigurationError(
            f"{path} is no metric: expected a class that derives from torchmetrics.Metric, or a function of logits "
            "[n, C] and labels [n]"
        )
    return kind


def _higher_is_better(own: OwnMetric) -> bool:
    said = own.higher_is_better
    if said is None:
        kind = found(own.class_path)
        said = getattr(kind, "higher_is_better", None)
        if said is None and inspect.isclass(kind):
            said = getattr(_made(own, kind, 3), "higher_is_better", None)  # of the class that `task` chooses
    if said is None:
        raise ConfigurationError(
            f"data.metrics: {own.class_path} does not say whether higher is better; give "
            f"{{class_path: {own.class_path}, higher_is_better: true}}, or false"
        )
    return bool(said)


def _metric(own: OwnMetric) -> Metric:
    """Return the metric that is declared."""
    compute = functools.partial(_value, own, found(own.class_path))
    lower = not _higher_is_better(own)
    return Metric(
        own.called, (), of_images=compute, lower_is_better=lower, pooled="counts", always_defined=False, first_in=None
    )


def _made(own: OwnMetric, kind: Callable[..., Any], classes: int) -> Any:
    """Return a new object of a class, or the function with its further arguments.

    Raises:
        ConfigurationError: it does not take these arguments.
    """
    taken = inspect.signature(kind).parameters
    added = {"num_classes": classes, "task": "multiclass"}
    arguments = {name: value for name, value in added.items() if name in taken} | own.init_args
    if not inspect.isclass(kind):
        return functools.partial(kind, **arguments)
    try:
        made: Any = kind(**arguments)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigurationError(f"the metric {own.class_path} cannot be made with {arguments}: {said}") from error
    made.distributed_available_fn = lambda: False  # every rank has all images
    return made


def _value(own: OwnMetric, kind: Callable[..., Any], images: ScoredBatch) -> float:
    """Return the metric of some images; NaN where it is not finite, or larger than a record's numbers are.

    Raises:
        ConfigurationError: it ends in an error, or gives something else than one number.
    """
    import torch

    wanted = own.input or ("probabilities" if inspect.isclass(kind) else "logits")
    made = _made(own, kind, images.classes)
    given = {"logits": images.logits, "probabilities": images.probabilities.float(), "predictions": images.predictions}
    there = f"{len(images.y)} images of classes {images.y.unique().tolist()[:20]}"
    try:
        with torch.no_grad():
            value = _asked(made, given[wanted].clone(), images.y.clone())
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigurationError(
            f"the metric {own.called} ({own.class_path}) of {there} ends in {type(error).__name__}: {said}; return NaN "
            "where it is not defined"
        ) from error
    if not (isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
        shape = f"a tensor {[*value.shape]}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigurationError(
            f"the metric {own.called} ({own.class_path}) of {there} gives {shape}; expected one number: in "
            "torchmetrics average=None gives one value per class, choose an average"
        )
    try:
        number = float(value)
    except OverflowError:  # of a whole number or a fraction
        return math.nan
    return number if abs(number) <= HUGE else math.nan


def _asked(made: Any, predictions: "Tensor", labels: "Tensor") -> Any:
    from torchmetrics import Metric as TorchMetric

    if not isinstance(made, TorchMetric):
        return made(predictions, labels)
    metric: torchmetrics.Metric = made
    metric.update(predictions, labels)
    return metric.compute()


def trial_images(classes: int, occurring: int) -> ScoredBatch:
    """Return images with random logits, three of each of so many classes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(occurring).repeat(3)
    return ScoredBatch(torch.randn(len(labels), classes, generator=generator), labels)


def check_number(metric: Metric, classes: int) -> None:
    """It gives one number, or NaN, of images of all classes and of one class.

    Raises:
        ConfigurationError: it does not.
    """
    assert metric.of_images is not None
    for occurring in (classes, 1):
        metric.of_images(trial_images(classes, occurring))


def check_order(metric: Metric, classes: int) -> None:
    """The order of images does not change it, nor does asking twice.

    Raises:
        ConfigurationError: it does.
    """
    assert metric.of_images is not None
    images = trial_images(classes, classes)
    turned = ScoredBatch(images.logits.flip(0), images.y.flip(0))
    values = [metric.of_images(each) for each in (images, images, turned)]
    # Sums of float32 in another order differ in their last digits, however large they are.
    if not all(math.isclose(value, values[0], rel_tol=1e-5, abs_tol=1e-6) or value != value for value in values):
        raise ConfigurationError(
            f"the metric {metric.name} of the same images in another order, or asked again, is {values[1:]} instead of "
            f"{values[0]}; it must depend on nothing but the images"
        )


def check_own_metrics(metrics: Sequence[Metric], classes: int) -> None:
    """Try own metrics on a few random images, before any training.

    Raises:
        ConfigurationError: one does not give a number, or another one for the same images.
    """
    for metric in metrics:
        if metric.first_in is None:
            check_number(metric, classes)
            check_order(metric, classes)
