"""Check what every metric must keep, on images with random logits."""

from benchmark.metrics import Metric
from benchmark.own_metrics import check_number, check_order

#: Classes of the images that it is checked with.
CLASSES = 4


def check_values(subject: Metric) -> None:
    """It gives one number of the images of a client, also where these are of one class."""
    check_number(subject, CLASSES)


def check_same(subject: Metric) -> None:
    """It depends on the images alone: neither on their order nor on what it saw before."""
    check_order(subject, CLASSES)


CHECKS = (check_values, check_same)
