"""Scores as numbers for loggers and as a table to read."""

import math

import pytest
import torch

from benchmark.run.scores import logged_numbers, print_scores

ACCURACY = torch.tensor([0.5, 0.25, math.nan])  # the third client has no images here
LOSS = torch.tensor([math.nan, 0.5, math.nan])  # the first one has diverged


def test_a_client_that_diverged_is_not_averaged_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert logged_numbers("server", "test", "accuracy", ACCURACY, ACCURACY)["test/server/accuracy"] == 0.375
    assert math.isnan(logged_numbers("server", "test", "loss", LOSS, ACCURACY)["test/server/loss"])
    whole = torch.tensor([1.0, 0.5, math.nan])
    assert logged_numbers("server", "test", "loss", whole, ACCURACY)["test/server/loss"] == 0.75
    # Of a metric that need not be defined, NaN says that it is not.
    assert logged_numbers("server", "test", "auroc", LOSS, ACCURACY)["test/server/auroc"] == 0.5

    print_scores({(1, "server", "test", n): v for n, v in (("accuracy", ACCURACY), ("loss", LOSS))}, ["a", "b", "c"])
    average = next(line for line in capsys.readouterr().out.splitlines() if "average" in line)
    assert average.replace("│", " ").split() == ["average", "37.50", "nan"]


def test_names_of_clients_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_scores({(1, "server", "test", "accuracy"): torch.tensor([0.5, 0.25])}, ["site [a]", "ward [/a]"])
    shown = capsys.readouterr().out
    assert "site [a]" in shown
    assert "ward [/a]" in shown
