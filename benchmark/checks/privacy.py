"""Check what record-level privacy takes a method's word for."""

from dataclasses import replace

from torch import Tensor

from benchmark.checks.methods import MethodUnderCheck
from benchmark.checks.outcome import NotCheckedError, require
from benchmark.contract import Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.private_step import ClippedSteps
from benchmark.engine.step_function import AsWritten
from benchmark.federation import Round
from benchmark.privacy.record_level import RecordLevelPrivacy

#: A norm that no gradient reaches, and no noise.
PLAIN = "{clip: 1e9, noise_multiplier: 0.0, sampling: epochs}"


def check_single_images(subject: MethodUnderCheck) -> None:
    """The gradients of single images and of the regulariser add up to that of a mini-batch.

    Raises:
        NotCheckedError: the method does not say that its loss is one of single images.
    """
    method, data = subject.make(f"--data.record_privacy={PLAIN}", "--data.drop_last=false")
    if not method.per_example:
        raise NotCheckedError("it does not say per_example, so that record-level privacy refuses it")
    data.setup()
    simulation = method.join(data)
    rule = method.make_server()
    rule.start(method.initial_values(), simulation.terms)
    client = max(simulation.terms.training_clients, key=simulation.holdings.train_sizes.__getitem__)
    round = Round(1, (client,), simulation.terms.seed)
    received = rule.broadcast(round, simulation.shared(), (client,)).to(simulation.device)
    for number, phase in enumerate(simulation.phases[Stage.TRAIN]):
        cohort = simulation.begin((client,), Stage.TRAIN, round, received)
        simulation.local_steps.start(phase, simulation.local_steps.optimizers([phase])[0], 1.0, {})
        plan = RoundPlan((client,), simulation.holdings.train_rows, simulation.terms, [phase], Stage.TRAIN, 1, 1)
        if not plan.steps:
            continue
        step = replace(plan[0], phase=number)
        batch = replace(simulation.mini_batch(step), phase=number)
        privacy, count = RecordLevelPrivacy(1e9, 0.0), int(batch.mask.sum())
        as_written = AsWritten(method, simulation.clients, simulation.slots)
        together = dict(as_written(cohort, step, batch).gradients)
        alone = ClippedSteps(method, simulation.clients, simulation.slots, privacy, count, simulation.terms.seed)
        for name, value in alone(cohort, step, batch).gradients.items():
            _require_equal(name, value, together[name], 10 * subject.tolerance)


def _require_equal(name: str, found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert found is not None
    apart = float((found - (0.0 if expected is None else expected)).abs().max())
    largest = 1.0 if expected is None else max(float(expected.abs().max()), 1.0)
    require(
        apart <= tolerance * largest,
        f"per_example: the gradients of {name} of single images do not add up to the mini-batch's (they differ by "
        f"{apart:.1g}): the loss is no mean over single images, or regulariser is not what it has beside",
    )
