"""Names of stored points and rounds, and metrics, as people read them."""

from benchmark.metrics import in_per_cent, scale_of

#: Where in a round clients are scored.
POINT_WORDS = {"server": "after aggregation", "local": "after local training"}
#: Which rounds a summary speaks of.
ROUND_WORDS = {
    "round0": "before training",
    "last": "last round",
    "last10": "last ten rounds",
    "best_on_test": "best round, chosen on test data",
}


def metric_words(split: str, metric: str, point: str) -> str:
    """Return what was measured, such as ``test accuracy after aggregation``."""
    name = metric.replace("_", " ")
    return f"{name} {place_words(split, point)}" if split == "train" else f"{split} {name} {POINT_WORDS[point]}"


def place_words(split: str, point: str) -> str:
    """Return where metrics were measured, such as ``test after aggregation``."""
    if split == "train":
        return "in local training" if point == "local" else "at the server"
    return f"{split} {POINT_WORDS[point]}"


def metric_number(value: float, metric: str) -> str:
    """Return a number as people read it: per cent with two digits, other metrics with four."""
    return f"{scale_of(metric) * value:.{digits_of(metric)}f}"


def digits_of(metric: str) -> int:
    """Return the digits behind the point with which people read a metric."""
    return 2 if in_per_cent(metric) else 4


def unit_of(metric: str) -> str:
    """Return the unit as it stands behind a heading; empty where there is none."""
    return ", %" if in_per_cent(metric) else ""
