"""Compiled training steps: what ``data.compile_steps`` changes, and what it must not."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from federation import build, fit, learned

import methods
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.compiled_step import CompiledLoss, graphs_made
from benchmark.engine.plan import Step
from benchmark.errors import ConfigurationError
from benchmark.masked import cross_entropy
from benchmark.method import FederatedMethod
from benchmark.speed.compiled import rows_of
from benchmark.speed.workloads import headtune

TRAINED = sorted(set(methods.__all__) - {"ZeroShotCLIP"})


def programs(method: FederatedMethod) -> dict[tuple[Stage, int, int], Callable[..., Any]]:
    """The compiled programs, by stage, phase and cohort width."""
    compiled = method.simulation.local_steps.compiled
    return {} if compiled is None else compiled.programs


def assert_compiling_changes_nothing(conf: str) -> None:
    """Two rounds of ragged clients, in cohorts of 3, 3 and 1, end as without compiling, up to rounding."""
    ends = []
    for mode in ("null", "default"):
        torch.compiler.reset()
        method, data = build(conf, f"--data.compile_steps={mode}")
        fit(method, data, 2)
        ends.append({n: v for n, v in learned(method).items() if not n.startswith("metric.")})
        assert bool(programs(method)) == (mode == "default")
    for name, expected in ends[0].items():
        torch.testing.assert_close(ends[1][name], expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("conf", ["FedAvg", "FedVPT"])
def test_every_kind_of_step_can_be_traced_whole(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the code generator, which takes a minute for each method and is torch's own.
    traced = partial(torch.compile, backend="aot_eager", fullgraph=True)

    def compile_(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        return traced(function, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_)
    assert_compiling_changes_nothing(conf)


@pytest.mark.slow
@pytest.mark.parametrize("conf", TRAINED)
def test_every_method_compiles_to_the_same_or_is_refused(conf: str) -> None:
    with contextlib.suppress(ConfigurationError):  # refused; test_a_compiler_that_errs checks what it says
        assert_compiling_changes_nothing(conf)


def test_a_compiler_that_errs_is_refused_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        return lambda *arguments: function(*arguments) * 1.02

    monkeypatch.setattr(torch, "compile", wrong)
    method, data = build("FedVPT", "--data.compile_steps=default")
    with pytest.raises(ConfigurationError, match=r"gradient of 'prompt.*' of FedVPT 2 % off, 0.1 % are allowed"):
        fit(method, data, 1)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_a_gradient_that_is_missing_or_no_number_is_refused(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        return lambda *arguments: function(*arguments) * factor

    monkeypatch.setattr(torch, "compile", wrong)
    method, data = build("FedVPT", "--data.compile_steps=default")
    with pytest.raises(ConfigurationError, match=r"of FedVPT .*% off, 0.1 % are allowed"):
        fit(method, data, 1)


def test_fine_tuning_has_a_program_of_its_own_and_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    method, data = build("FedBABU", "--data.compile_steps=default", "--data.clients_per_round=6")
    fit(method, data, 1)
    assert {(kind, width) for kind, _, width in programs(method)} >= {("train", 3), ("finetune", 3), ("finetune", 2)}
    assert len(made) == len(programs(method))


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        def fail(*arguments: Any) -> Any:
            raise torch._dynamo.exc.TorchDynamoException("No working C++ compiler\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", failing)
    method, data = build("FedVPT", "--data.compile_steps=default")
    with pytest.raises(ConfigurationError, match=r"failed on FedVPT \(No working C\+\+ compiler\); leave"):
        fit(method, data, 1)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="compile_steps"):
        build("FedVPT", "--data.compile_steps=fast")


def test_the_speed_case_compares_or_names_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = headtune("micro_vit", 32)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    rows = rows_of(work)
    assert [row.what.rpartition(", ")[2] for row in rows] == ["not compiled", "compiled"]
    assert rows[1].ratio == rows[1].seconds / rows[0].seconds
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *arguments: function(*arguments) * 2)
    (alone,) = rows_of(work)
    assert "compiling refused: data.compile_steps: torch.compile makes the gradient" in alone.note


def later_graphs_wrong(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend of torch.compile whose first graph alone is right."""
    later_graphs_wrong.made += 1  # type: ignore[attr-defined]
    if later_graphs_wrong.made == 1:  # type: ignore[attr-defined]
        return graph.forward
    return lambda *arguments: tuple(1.02 * value for value in graph.forward(*arguments))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile without its code generator; yields what the gradients of were compared."""
    compiled, checked = torch.compile, []
    torch.compiler.reset()
    later_graphs_wrong.made = 0  # type: ignore[attr-defined]

    def compile_(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        return compiled(function, dynamic=dynamic, backend="eager")

    def compare(self: CompiledLoss, cohort: Cohort, step: Step, batch: MiniBatch, program: Callable[..., Any]) -> None:
        checked.append(batch.x.shape)
        check(self, cohort, step, batch, program)

    check = CompiledLoss.compare
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(CompiledLoss, "compare", compare)
    yield checked
    torch.compiler.reset()


#: Rounds of three clients, in cohorts of two and of one.
RAGGED = ("--data.batch_size=64", "--data.clients_per_round=3", "--data.cohort_width=2", "--data.compile_steps=default")


def test_every_graph_that_is_made_is_checked(eager: list[torch.Size]) -> None:
    method, data = build("FedAvg", *RAGGED)
    made = graphs_made()
    fit(method, data, 4)
    assert len(set(eager)) > 1
    assert len(eager) == graphs_made() - made == len(set(eager)) == len(programs(method))


def test_a_later_graph_that_errs_is_refused(eager: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: torch._dynamo.optimize(later_graphs_wrong)(f))
    assert compiled is not torch.compile
    method, data = build("FedAvg", *RAGGED)
    with pytest.raises(ConfigurationError, match=r"of FedAvg 2 % off, 0.1 % are allowed"):
        fit(method, data, 4)
    assert len(eager) == 2


def test_a_weight_that_grows_with_the_rounds_makes_no_graph_of_each(eager: list[torch.Size]) -> None:
    overrides = ("--model.init_args.kl_warmup_rounds=4", "--data.clients_per_round=3", "--data.compile_steps=default")
    method, data = build("PFedBayesPT", *overrides)
    made = graphs_made()
    fit(method, data, 1)
    first = graphs_made() - made
    method, data = build("PFedBayesPT", *overrides)
    torch.compiler.reset()
    made = graphs_made()
    fit(method, data, 3)
    assert graphs_made() - made == first == len(eager) / 2


def test_the_number_of_the_round_is_that_of_each_round(
    eager: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    def louder(self: FederatedMethod, client: Client, batch: MiniBatch) -> torch.Tensor:
        return cross_entropy(self(batch.x), batch.y, batch.mask) * client.round.number

    monkeypatch.setattr(methods.FedAvg, "client_loss", louder)
    ends = []
    for mode in ("null", "default"):
        method, data = build("FedAvg", f"--data.compile_steps={mode}")
        fit(method, data, 2)
        ends.append(method.simulation.shared())
    assert eager
    for name, expected in ends[0].items():
        torch.testing.assert_close(ends[1][name], expected, rtol=1e-4, atol=1e-5)
