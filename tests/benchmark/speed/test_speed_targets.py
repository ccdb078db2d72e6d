"""The case that says which targets are met."""

from dataclasses import replace

import pytest
import torch
from repeated_steps import repeated_steps

from benchmark.engine.repeat import recorded_step
from benchmark.speed import engine, features, targets, vit
from benchmark.speed.measure import fit, rounds_until_repeated
from benchmark.speed.peer_scripts.cifar10_setting import Setting
from benchmark.speed.workloads import headtune, tiny


def test_a_target_is_met_up_to_itself() -> None:
    assert targets.verdict(0.65, 0.65) == "target 0.65: met"
    assert targets.verdict(9.1, 9.0) == "target 9: not met"
    assert targets.verdict(1.1, 1.0, 0.45) == "target 0.45: not met"


def test_the_hosts_time_is_less_without_steps_and_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CLIENTS", 3)
    monkeypatch.setattr(targets, "STEPS", 2)
    whole, beside, kernels = targets.host_rows(rounds=16)
    assert 0 < beside.seconds < whole.seconds
    assert kernels.ratio is not None
    # two steps of at least a kernel for each of eight tensors' update and gradient, forward and backward
    assert 2 * 30 < kernels.ratio * targets.KERNELS < 300


def test_products_are_timed_forward_and_backward_and_nothing_else() -> None:
    x, weight = torch.randn(256, 256, requires_grad=True), torch.randn(256, 256)
    with targets.Products() as products:
        x.exp().sum().backward()
    assert products.seconds == 0
    with targets.Products() as products:
        made = x @ weight
    forward = products.seconds
    assert forward > 0
    with targets.Products() as products:
        made.sum().backward()
    assert products.seconds > 0


def test_rows_compare_with_a_loop_and_with_steps_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CLIENTS", 2)
    monkeypatch.setattr(engine, "IMAGES", 16)
    rows = targets.loop_rows(2, 1)
    assert [row.what for row in rows[::3]] == [
        "FedAvg, pFedPT's CNN: a bare loop",
        "pFedPT, its CNN: a bare loop",
        "FedAvg, tiny ViT: a bare loop",
    ]
    loop, alone, stacked = rows[3:6]
    assert stacked.ratio == pytest.approx(stacked.seconds / loop.seconds)
    assert alone.ratio == pytest.approx(alone.seconds / loop.seconds)
    assert alone.seconds > 0
    kept = targets.kept_rows([headtune("micro_vit", 32)], 2, 8, 1)
    assert [row.what.rpartition(": ")[2] for row in kept] == ["as written", "recorded"]
    assert kept[0].ratio == 1.0


def test_a_whole_benchmark_counts_its_rounds_and_evaluations() -> None:
    row = targets.published_row(Setting(clients=6, images=20, cohort=2, test=12, rounds=4, evaluate_every=2), 1e6)
    assert row.work == "4 rounds of 2 clients, 2 evaluations"
    assert row.note.startswith("target 1e+06: met; ")
    assert row.ratio == pytest.approx(row.seconds / 1e6)


def test_on_a_gpu_a_large_vit_is_to_reach_a_share_and_kept_features_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "large_frozen_vit", lambda: ("micro_vit", 32))
    share_row = vit.share_row
    monkeypatch.setattr(vit, "share_row", lambda batch, width, epochs, peak: share_row(4, width, 1, peak))
    for peak, found in ((1.0, "met"), (1e18, "not met")):
        monkeypatch.setattr(targets, "matmul_peak", lambda kind, peak=peak: peak)
        row = targets.share_of_peak_row()
        assert row.share_of_peak is not None
        assert row.ratio == pytest.approx(0.45 / row.share_of_peak)
        assert row.note.endswith(f"images/s; target 0.45: {found}")
    subject = replace(features.clip_subjects()[0], clients=1, rounds=3)
    anew, kept = targets.made_anew_rows(subject)
    assert [row.what.rpartition(", ")[2] for row in (anew, kept)] == ["encoded in every step", "encoded once"]
    assert anew.ratio == pytest.approx(anew.seconds / kept.seconds)
    assert anew.note.endswith(f"target 20: {'met' if anew.ratio >= 20 else 'not met'}")


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 10])
def test_in_the_last_round_all_steps_are_repeated_and_none_is_compared(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_step, "WORTHWHILE", float("inf"))
    rounds, small = rounds_until_repeated(steps), tiny()
    with repeated_steps() as repeated:
        fit(small.method(1), small.data(1, steps * small.batch, 1), rounds - 1)
        before = len(repeated)
        fit(small.method(1), small.data(1, steps * small.batch, 1), rounds)
    assert len(repeated) - 2 * before == steps
    assert before > 0
