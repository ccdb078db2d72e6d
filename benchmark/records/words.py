"""Names of stored points, rounds and statistics as people read them."""

#: Where in a round clients are scored.
POINT_WORDS = {"server": "after aggregation", "local": "after local training"}
#: Which rounds a summary speaks of.
ROUND_WORDS = {
    "round0": "before training",
    "last": "last round",
    "last10": "last ten rounds",
    "best_on_test": "best round, chosen on test data",
}
#: Statistics over clients.
STATISTIC_WORDS = {
    "average": "average",
    "worst": "worst client",
    "worst_decile": "worst decile",
    "std": "spread over clients",
    "pooled": "pooled",
}
#: Metrics that people read in per cent; files keep fractions.
PERCENT = ("accuracy", "balanced_accuracy", "macro_f1")


def metric_words(split: str, metric: str, point: str) -> str:
    """Return what was measured, such as ``test accuracy after aggregation``."""
    name = metric.replace("_", " ")
    return f"{name} in local training" if split == "train" else f"{split} {name} {POINT_WORDS[point]}"


def metric_number(value: float, metric: str) -> str:
    """Return a number as people read it: per cent with two digits, other metrics with four."""
    return f"{100 * value:.2f}" if metric in PERCENT else f"{value:.4f}"


def unit_of(metric: str) -> str:
    """Return the unit as it stands behind a heading; empty where there is none."""
    return ", %" if metric in PERCENT else ""
