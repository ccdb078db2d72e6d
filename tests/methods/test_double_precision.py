"""64-true: every method runs in float64 from end to end, and learns what it learns in float32."""

from pathlib import Path

import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit, learned

METHODS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
TINY = ("--data.partition.init_args.num_clients=2", "--data.clients_per_round=2", "--data.clients_at_once=2")
DOUBLE = {"num_sanity_val_steps": 0, "precision": "64-true"}


@pytest.mark.parametrize("conf", METHODS)
def test_64_true_runs_and_learns_what_float32_learns(conf: str) -> None:
    """One round: all that is kept of clients and shared is float64, and within 1e-4 of float32's."""
    left = {}
    for precision in ("32-true", "64-true"):
        method, data = build(conf, *TINY)
        fit(method, data, 1, settings=DOUBLE | {"precision": precision})
        left[precision] = learned(method)
    single, double = left["32-true"], left["64-true"]
    assert single.keys() == double.keys()
    kept = [n for n in double if not n.startswith("metric.") and single[n].is_floating_point()]
    assert {double[name].dtype for name in kept} <= {torch.float64}
    off = {
        name: (double[name].double() - value.double()).abs().nan_to_num().max().item()
        for name, value in single.items()
        if value.numel()
    }
    assert {name: difference for name, difference in off.items() if difference > 1e-4} == {}


def test_64_true_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A checkpoint is loaded before the Trainer converts the method: its float64 numbers must not be rounded."""
    settings = DOUBLE | EACH_ROUND
    whole, data = build("FedPer", *TINY)
    fit(whole, data, 2, settings=settings)
    half, data = build("FedPer", *TINY)
    fit(half, data, 1, save_to=tmp_path, settings=settings)
    resumed, data = build("FedPer", *TINY)
    fit(resumed, data, 2, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"), settings=settings)
    expected, found = learned(whole), learned(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].nan_to_num(), value.nan_to_num()) for name, value in expected.items())
