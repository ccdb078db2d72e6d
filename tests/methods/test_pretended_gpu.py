"""Every method on a pretended GPU: the CPU's numbers, no mixed devices, and no wait for the device in a local step."""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import runs_on_gpu
from federation import CONF

METHODS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
#: How far a number may be from the CPU's after two rounds: a GPU's paths (attention in one operation, torch's own
#: convolutions) sum in another order. Most methods are within 1e-6; PromptAMP's server takes exponentials of distances
#: between prompts that are next to equal.
TOLERANCE = {"PromptAMP": 1e-3}
USUAL = 1e-5
#: What a method's own step cannot do without waiting: a singular value decomposition is driven from the host.
OWN_WAITS = {"FedPHA": "_linalg_svd"}

TINY_VIT = "--model.init_args.backbone=benchmark.backbones.tiny_vit.TinyViT"
#: What else a run may have, on the method that has it.
CASES = {
    "new clients": ("FedVPT", ("--data.partition.init_args.num_clients=3", "--data.new_clients=0.3")),
    "kept momentum, clipped, cosine": (
        "FedAvg",
        (
            "--model.init_args.training.optimizer_state=client",
            "--model.init_args.training.clip=0.5",
            "--model.init_args.training.schedule=cosine",
        ),
    ),
    "one by one": ("FedRep", ("--data.clients_at_once=1",)),
    "flipped and turned": ("FedAvg", ("--data.transform.augment=fedbn",)),
    "cropped": ("PromptFL", ("--data.transform.augment=clip",)),
    "a loader process": ("FedAvg", ("--data.num_workers=1",)),
    "a memory in training": ("PFedPrompt", ("--model.init_args.lfa_in_train=true",)),
    "features made anew": ("PromptFL", ("--data.cache_features=false",)),
    "a ViT from scratch": ("FedAvg", (TINY_VIT,)),
    "a ViT inside of a client's own gradient": ("PerFedAvg", (TINY_VIT,)),
}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process of their own for all the runs."""
    with ProcessPoolExecutor(1, get_context("spawn"), runs_on_gpu.prepare_process) as pool:
        yield pool


def check(process: ProcessPoolExecutor, conf: str, overrides: tuple[str, ...]) -> None:
    """The GPU leaves behind what the CPU does, and no step of the second round waits."""
    off, waited = process.submit(runs_on_gpu.compare, conf, overrides).result()
    assert [place for place in waited if place.split(" at ")[0] != OWN_WAITS.get(conf)] == []
    tolerance = TOLERANCE.get(conf, USUAL)
    assert {name: difference for name, difference in off.items() if not difference <= tolerance} == {}


@pytest.mark.parametrize("conf", METHODS)
def test_a_gpu_gives_the_cpus_numbers_and_no_step_waits(conf: str, process: ProcessPoolExecutor) -> None:
    check(process, conf, ())


@pytest.mark.parametrize(("conf", "overrides"), CASES.values(), ids=CASES)
def test_so_it_does_whatever_a_run_has(conf: str, overrides: tuple[str, ...], process: ProcessPoolExecutor) -> None:
    check(process, conf, overrides)


@pytest.mark.parametrize("room", [True, False], ids=["rows on the GPU", "rows in host memory"])
@pytest.mark.parametrize("conf", ["FedAvg", "FedPer", "FedVPT"])
def test_a_round_waits_for_no_copy_to_the_gpu(conf: str, room: bool, process: ProcessPoolExecutor) -> None:
    """It waits once a cohort for what comes back, losses and whether all is finite, and once for rows of the host."""
    waited = process.submit(runs_on_gpu.waits_of_round, conf, room).result()
    places = Counter(place.split(" at ")[1].split(":")[0].rpartition("/")[2] for place in waited)
    assert places == Counter({"placing.py": 1 if room or conf == "FedAvg" else 2})


@pytest.mark.parametrize("conf", ["FedPer", "PFedPT", "FedVPT"])
def test_where_clients_rows_lie_changes_no_bit(conf: str, process: ProcessPoolExecutor) -> None:
    assert process.submit(runs_on_gpu.differ_by_place_of_rows, conf).result() == []


def test_a_round_of_recorded_steps_takes_few_kernels_and_waits_once(process: ProcessPoolExecutor) -> None:
    """It waits for the losses of its one cohort, and whether all its uploads are finite."""
    waited, kernels = process.submit(runs_on_gpu.recorded_round, 50, 5).result()
    places = Counter(place.split(" at ")[1].split(":")[0].rpartition("/")[2] for place in waited)
    assert places == Counter({"placing.py": 1})
    assert kernels <= 400


@pytest.mark.parametrize("conf", ["FedVPT", "PromptFL"])
def test_steps_through_merged_layers_are_recorded(conf: str, process: ProcessPoolExecutor) -> None:
    off, repeated = process.submit(runs_on_gpu.recorded_frozen, conf).result()
    assert repeated > 0
    assert {name: difference for name, difference in off.items() if not difference <= USUAL} == {}


def check_graphs(process: ProcessPoolExecutor, conf: str, *overrides: str) -> None:
    """Recorded steps are graphs, which change no bit."""
    differing, replays, said = process.submit(runs_on_gpu.captured, conf, *overrides).result()
    assert differing == []
    assert said == []
    assert replays
    assert max(replays) > 1


@pytest.mark.parametrize("conf", ["FedAvg", "FedVPT", "PFedPT", "PromptFL"])
def test_a_recorded_step_as_a_graph_changes_no_bit(conf: str, process: ProcessPoolExecutor) -> None:
    check_graphs(process, conf)


@pytest.mark.parametrize(
    "overrides",
    [
        ("--model.init_args.training.momentum=0.9", "--model.init_args.training.weight_decay=0.01"),
        ("--model.init_args.training.optimizer=adam", "--model.init_args.training.clip=0.1"),
        ("--model.init_args.training.optimizer_state=client",),
    ],
    ids=["momentum", "adam, clipped", "kept momentum"],
)
def test_so_it_is_with_whatever_reads_the_gradients(overrides: tuple[str, ...], process: ProcessPoolExecutor) -> None:
    check_graphs(process, "FedAvg", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("conf", sorted(set(METHODS) - {"FedAvg", "FedVPT", "PFedPT", "PromptFL", "ZeroShotCLIP"}))
def test_so_it_is_with_every_method(conf: str, process: ProcessPoolExecutor) -> None:
    check_graphs(process, conf)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("large", "it takes [0-9]+ MiB"),
        ("kept", "all graphs would keep [0-9]+ MiB"),
        ("host", "CUDA error: operation not permitted.*"),
    ],
)
def test_what_cannot_be_captured_is_said_in_a_line(why: str, words: str, process: ProcessPoolExecutor) -> None:
    said, replays = process.submit(runs_on_gpu.not_captured, why).result()
    assert replays == 0
    assert said
    pattern = rf"a step of FedAvg \(train, phase 0, [12] clients\) is no CUDA graph: {words}"
    assert [line for line in said if not re.fullmatch(pattern, line)] == []


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("item", "_local_scalar_dense"),
        ("tolist", "tolist"),
        ("cpu", "a copy to the host"),
        ("mask", "a boolean index"),
        ("nonzero", "nonzero"),
        ("to", "a copy to the device"),
    ],
)
def test_a_wait_in_a_step_is_noticed(fault: str, word: str, process: ProcessPoolExecutor) -> None:
    waited = process.submit(runs_on_gpu.waits_with, fault).result()
    assert waited
    assert {place.split(" at ")[0] for place in waited} == {word}
    assert all("benchmark/engine/step_function.py" in place for place in waited)


def test_no_step_waits_for_the_progress_display(process: ProcessPoolExecutor) -> None:
    waited, counted = process.submit(runs_on_gpu.waits_shown).result()
    assert waited == []
    assert counted == 2 * (2 + 1)  # two epochs of clients with 7 and 3 images, 4 at a time


def test_a_tensor_of_the_host_in_a_step_is_noticed(process: ProcessPoolExecutor) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        process.submit(runs_on_gpu.waits_with, "mixed").result()
