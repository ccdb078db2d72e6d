"""The building blocks of the speed measurements at tiny sizes: padding, operations, caching, parts of a round, JSON."""

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import terms
from torch.autograd import DeviceType

from benchmark.backbones.tiny_vit import TinyViT
from benchmark.contract import LocalTraining, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.speed import __main__ as speed
from benchmark.speed import convolution, features, overhead, posterior, vit, widths
from benchmark.speed.measure import Timing, report
from benchmark.speed.workloads import Workload, cnn, headtune, promptfl
from datamodules.partition import DirichletShared
from methods.fedvpt import FedVPT


def small(work: Workload) -> features.Subject:
    return features.Subject(work, clients=2, images=24, rounds=2)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_padding_is_what_the_last_batches_leave_empty(width: int) -> None:
    # 5, 3 and 2 images in batches of 2: 3 + 2 + 1 batches with room for 12 images, 10 are there. The second and third
    # client leave the stacked step after their last batch, so nothing more is padded at any width.
    indices = {0: np.arange(5), 1: np.arange(5, 8), 2: np.arange(8, 10)}
    phases = [LocalTraining(lr=0.0, epochs=1).phase()]
    plan = RoundPlan(range(3), indices, terms(3, batch_size=2, row=2), phases, Stage.TRAIN, width, round=1)
    assert widths.padding_share(plan) == pytest.approx(2 / 12)


def test_width_rows_count_one_clients_step() -> None:
    one, two, auto = widths.width_rows(promptfl("micro_clip", batch=4), 2, (1, 2, "auto"), rounds=2, turns=1)
    assert one.ratio == 1.0
    assert two.ratio == pytest.approx(two.seconds / one.seconds)
    assert one.work == "one client's step of 4 images, of 2 clients x 2 steps"
    if not torch.cuda.is_available():
        assert auto.note == "auto picks 2"


def test_unequal_clients_have_as_many_images_as_equal_ones() -> None:
    work = promptfl("micro_clip", batch=4)
    (row,) = widths.ragged_rows(work, 4, 24, (2,), rounds=2)
    data = work.data(4, 24, 2, DirichletShared(0.3, 4, min_size=1), tested=24)
    data.setup()
    sizes = list(data.train_sizes.values())
    assert sum(sizes) == 4 * 24
    assert f"with {min(sizes)} to {max(sizes)} images" in row.work
    assert min(sizes) < 24 < max(sizes)
    batches = sum(-(-size // 4) for size in sizes)
    assert row.note.startswith(f"{100 * (1 - 4 * 24 / (4 * batches)):.1f} % of the rows are padding")


def test_operations_of_a_vit_by_hand() -> None:
    # 16 patches of 4 x 4 x 3 numbers, a class token and 5 prompts; 8 layers of width 128, MLP of 256; 7 classes.
    # The last layer makes keys and values of all tokens, and the rest of the class token's alone.
    method = FedVPT(7, 2, TinyViT(image_size=16), num_prompts=5)
    T, d = 16 + 1 + 5, 128
    layer = 3 * T * d * d + 2 * T * T * d + T * d * d + 2 * T * d * 256
    last = 3 * T * d * d + 2 * T * d + d * d + 2 * d * 256
    products = 16 * 48 * d + 7 * layer + last + d * 7
    assert vit.forward_operations(method, 16) == 2 * products


@pytest.mark.parametrize("work", [promptfl("micro_clip", batch=8), headtune("micro_vit", 32)], ids=lambda w: w.name)
def test_features_made_once_leave_the_same_behind(work: Workload) -> None:
    encoded, kept = features.compare(small(work))
    assert kept.ratio == 1.0
    assert encoded.ratio == pytest.approx(encoded.seconds / kept.seconds)
    # A product of matrices rounds by its shape, which is another when all images are encoded together.
    said = re.fullmatch(r"(identical parameters|parameters differ by at most (.+)), identical accuracies", encoded.note)
    assert said
    assert float(said[2] or 0) < 1e-6


def test_largest_difference() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}
    assert features.largest_difference(one, one) == 0.0
    assert features.largest_difference(one, one | {"b": torch.tensor([0.0, -0.5])}) == 0.5
    with pytest.raises(ValueError, match=r"different tensors: \['b'\]"):
        features.largest_difference(one, {"a": one["a"]})


def test_every_rung_of_the_posterior_is_timed_against_fedvpt_deep() -> None:
    rows = posterior.rungs("micro_vit", 16, clients=2, images=16, rounds=2)
    assert [row.what for row in rows] == [work.name for work, _, _ in posterior.ladder("micro_vit", 16)]
    assert rows[0].what == "FedVPT-Deep, 10 prompts a layer"
    assert rows[0].ratio == 1
    assert all(row.ratio == pytest.approx(row.seconds / rows[0].seconds) for row in rows)
    assert rows[0].work == "one client's step of 16 images, micro_vit at 16 px"


def test_the_rungs_are_what_they_are_called() -> None:
    deep, deeper, d, g, s0, s1, s3, j4, made = (
        (work.method(2), kept) for work, kept, _ in posterior.ladder("micro_vit", 16)
    )
    depth = deep[0].backbone.depth
    assert deeper[0].prompt().numel() - deep[0].prompt().numel() == depth * deep[0].backbone.embed_dim
    assert [m.posterior for m, _ in (d, g, s0, s1)] == ["deterministic", "gaussian", "semi_implicit", "semi_implicit"]
    draws = [(m.importance_samples, m.mixing_draws) for m, _ in (s0, s1, s3, j4, made)]
    assert draws == [(1, 0), (1, 1), (1, 3), (4, 1), (1, 1)]
    assert [kept for _, kept in (s1, j4, made)] == [True, True, False]


def test_the_inner_part_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr(overhead, "now", lambda: next(clock))
    watch = overhead.Stopwatch()
    inner = watch.timed(overhead.ARITHMETIC, lambda: None)
    watch.timed("engine: steps", inner)()
    watch.on_train_epoch_end(None, None)
    (seconds,) = watch.rounds
    # Lightning until 1, the engine until 3, arithmetic until 7, the engine until 15, Lightning until the round's end.
    assert (seconds["Lightning"], seconds["engine: steps"], seconds["arithmetic"]) == (1 + 16, 2 + 8, 4)
    assert sum(seconds.values()) == 31


def test_parts_of_a_round_and_their_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(overhead, "STEPS", 2)
    step = torch.Tensor.backward
    seconds = overhead.parts_of_round(cnn(), clients=2, width=1, rounds=2)
    assert torch.Tensor.backward is step
    assert all(seconds[part] > 0 for part in overhead.PARTS)
    overhead.draw([("CNN", seconds), ("CNN again", seconds)], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_waits_are_counted_within_the_steps_alone() -> None:
    def event(name: str, start: float, end: float, kernels: tuple[str, ...] = ()) -> Any:
        named = [SimpleNamespace(name=kernel) for kernel in kernels]
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end), kernels=named, device_type=DeviceType.CPU
        )

    on_device = event("local steps", 0, 1000)
    on_device.device_type = DeviceType.CUDA
    events = [
        on_device,
        event("local steps", 10, 20),
        event("local steps", 40, 50),
        event("cudaStreamSynchronize", 5, 6),
        event("cudaStreamSynchronize", 12, 13),
        event("cudaDeviceSynchronize", 45, 46),
        event("aten::copy_", 14, 15, ("Memcpy DtoH (Device -> Pageable)",)),
        event("aten::copy_", 16, 17, ("Memcpy HtoD (Pageable -> Device)",)),
        event("aten::copy_", 30, 31, ("Memcpy DtoH (Device -> Pageable)",)),
    ]
    assert overhead.waits_inside(events, "local steps") == (2, 1)


def test_report_writes_rows_and_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Timing("engine", "10 steps", 0.25, 1.25, share_of_peak=0.5, memory=2**20, note="noted"),
        Timing("loop", "", 0.2),
    ]
    report("case", "A title", rows, tmp_path / "speed", {"extra": 3})
    record = json.loads((tmp_path / "speed" / "case.json").read_text())
    assert record["title"] == "A title"
    assert record["extra"] == 3
    assert record["rows"][0]["share_of_peak"] == 0.5
    assert record["rows"][1]["ratio"] is None
    assert record["device"] in ("cpu", "cuda")
    assert record["hardware"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert "A title" in printed
    assert "50 %" in printed
    assert "noted" in printed


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_stopped_case_keeps_what_it_has_measured(
    stop: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(count: int) -> Iterator[Timing]:
        yield from [Timing("loop", "", 0.2)] * count
        raise stop

    made = {"count": 2}
    monkeypatch.setitem(
        sys.modules, "benchmark.speed.engine", SimpleNamespace(run=lambda folder: ("A title", rows(made["count"])))
    )
    with pytest.raises(RuntimeError) if stop is RuntimeError else nullcontext():
        assert speed.main(["engine", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "engine.stopped.json").read_text())
    assert not (tmp_path / "engine.json").exists()
    assert record["title"] == "A title (stopped before its end)"
    assert len(record["rows"]) == 2
    made["count"] = 0
    with pytest.raises(stop):
        speed.main(["engine", "--out", str(tmp_path / "nothing")])
    assert not (tmp_path / "nothing").exists()


def test_several_cases_end_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "case.py"
    script.write_text(
        "import json, sys\n"
        "case, folder = sys.argv[1], sys.argv[3]\n"
        "row = dict(what=f'work of {case}', work='', seconds=1.5)\n"
        "json.dump({'rows': [row]}, open(f'{folder}/{case}.json', 'w'))\n"
        "sys.exit(3 * (case == 'growth'))\n"
    )
    monkeypatch.setattr(speed, "COMMAND", (sys.executable, str(script)))
    assert speed.main(["engine", "growth", "vit", "--out", str(tmp_path)]) == 1
    printed = capfd.readouterr().out
    assert "work of engine" in printed
    assert "work of vit" in printed
    assert "work of growth" not in printed
    assert "growth: ended with status 3" in printed
    assert speed.main(["engine", "vit", "--out", str(tmp_path)]) == 0


def test_cases_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    began = time.monotonic()
    assert speed.main(["engine", "vit", "--out", str(tmp_path), "--minutes", "0.01"]) == 1
    assert time.monotonic() - began < 20
    assert capfd.readouterr().out.endswith("engine: stopped, the time was up\nvit: not begun, the time was up\n")
    with pytest.raises(SystemExit):
        speed.main(["--minutes", "0"])


def test_all_ways_to_convolve_are_one() -> None:
    given = convolution.tensors(3, (2, 4, 3, 8))
    expected = torch.stack([torch.nn.functional.conv2d(*client) for client in zip(*given, strict=True)])
    gradients = torch.autograd.grad((expected**2).sum(), given)
    for way in convolution.WAYS.values():
        torch.testing.assert_close(way(*given), expected, rtol=1e-4, atol=1e-4)
        found = torch.autograd.grad((way(*given) ** 2).sum(), given)
        for mine, right in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


def test_both_networks_have_the_same_layers() -> None:
    plain, own = (convolution.network(own_layers) for own_layers in (False, True))
    assert [p.shape for p in plain.parameters()] == [p.shape for p in own.parameters()]
    assert [type(layer).__name__ for layer in plain.convolutions] == ["Conv2d", "MaxPool2d", "ReLU"] * 2
    rows = convolution.network_rows(2)
    assert [row.what for row in rows] == ["grouped, 2 clients", "ClientConv2d, 2 clients"]
