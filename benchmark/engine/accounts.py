"""Account for private local training, as a federation's rule plans it."""

from benchmark.contract import Stage
from benchmark.engine.plan.round_plan import steps_of
from benchmark.engine.private_step import PrivateSteps
from benchmark.engine.roles import overrides
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.privacy.record_level import RecordAccount, Training
from benchmark.server import ServerRule


def record_account(simulation: Simulation, rule: ServerRule, precision: str) -> RecordAccount | None:
    """Make the account of private local training, and with it its noise; None where training is not private.

    Args:
        simulation: whose local training.
        rule: started; it selects.
        precision: the Trainer's.

    Raises:
        ConfigurationError: the precision is mixed, the rule is private too, or see
            :class:`benchmark.privacy.record_level.RecordAccount`.
    """
    if not isinstance(simulation.gradients, PrivateSteps):
        return None
    if "mixed" in precision:
        raise ConfigurationError(
            f"data.record_privacy takes the norm of every image's gradient, which trainer.precision {precision} would "
            "round; set 32-true or 64-true"
        )
    private = [part.title for part in rule.modules() if isinstance(part, ServerRule) and part.outermost]
    if private:
        raise ConfigurationError(
            f"data.record_privacy and {private[0]} protect the same tensors twice; take one of them"
        )
    terms, rounds = simulation.terms, simulation.rounds
    planned = dict.fromkeys(terms.training_clients, rounds)
    if not overrides(rule, "select"):  # by the seed's schedule, which anybody can look up
        planned = dict.fromkeys(terms.training_clients, 0)
        for number in range(1, rounds + 1):
            for client in rule.select(number):
                planned[client] += 1
    of_a_round = {client: _training_of(simulation, client) for client in terms.training_clients}
    account = RecordAccount(simulation.gradients.privacy, terms.batch_size, of_a_round, planned)
    simulation.gradients.noise_multiplier = account.noise_multiplier
    return account


def _training_of(simulation: Simulation, client: int) -> Training:
    """Return what a client does in a round."""
    images = simulation.holdings.train_sizes[client]
    counts = [steps_of(phase, images, simulation.terms) for phase in simulation.phases[Stage.TRAIN]]
    return Training(images, sum(own for _, own in counts), sum(-(-own // epoch) for epoch, own in counts))
