"""Epsilon of rounds with Gaussian noise, by dp-accounting (extra ``privacy``)."""

import importlib.metadata
import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

from benchmark.errors import ConfigurationError

#: Steps of the privacy losses, which are rounded up, where z is 1 or more; below they grow with 1 / z^2.
INTERVAL = 1e-3
#: With less noise than that sampling gains next to nothing, and losses take minutes to add up.
LEAST_AMPLIFIED = 0.3
#: Noise multiplier beyond which none is looked for.
MOST_NOISE = 1e5

Sampling = Literal["full", "poisson", "fixed"]
Relation = Literal["add_or_remove", "replace_one"]


def dp_accounting() -> ModuleType:
    """Import the library.

    Raises:
        ConfigurationError: it is not installed, or too old.
    """
    try:
        import dp_accounting
        from dp_accounting import pld, rdp

        if not (pld and rdp and hasattr(dp_accounting, "get_epsilon_gaussian")):
            raise ImportError("it is older than 0.6")
    except ImportError as error:
        raise ConfigurationError(
            f"differential privacy is accounted by dp-accounting>=0.6, which can't be imported ({error}); "
            "pip install 'federated-prompt-benchmark[privacy]'"
        ) from error
    return dp_accounting


@dataclass(frozen=True)
class Mechanism:
    """One round's release: the sum of clipped updates, with Gaussian noise.

    Attributes:
        sampling: ``full``: who takes part follows a public schedule. ``poisson``: each client by itself, with
            probability m/N. ``fixed``: m of N, drawn without replacement.
        clients: N, that can take part.
        participants: m of a round, on average.
        relation: of neighbouring federations: one client contributes or does not (``add_or_remove``), or has any other
            data (``replace_one``).
        delta: of (epsilon, delta).
    """

    sampling: Sampling
    clients: int
    participants: int
    relation: Relation
    delta: float

    def __post_init__(self) -> None:
        """Refuse what has no account.

        Raises:
            ConfigurationError: delta is not below 1/N, or fixed-size sampling is accounted for another relation.
        """
        if not 0 < self.delta < 1 / self.clients:
            raise ConfigurationError(
                f"delta is {self.delta:g}; expected more than 0 and less than one in {self.clients} clients, "
                f"{1 / self.clients:g}"
            )
        if self.sampling == "fixed" and self.relation != "replace_one":
            raise ConfigurationError(
                "sampling fixed is accounted for relation replace_one alone; set it, or take sampling poisson"
            )

    @property
    def probability(self) -> float:
        """Return q, of a client in a round."""
        return self.participants / self.clients

    @property
    def amplifies(self) -> bool:
        """Return whether sampling amplifies privacy, which assumes that nobody knows the participants."""
        return self.sampling != "full" and self.participants < self.clients

    def accountant(self, noise_multiplier: float) -> str:
        """Return the name of what accounts for a noise multiplier, as records have it."""
        if not self.amplifies or noise_multiplier < LEAST_AMPLIFIED:
            return "exact Gaussian"
        return "RDP" if self.sampling == "fixed" else "PLD"

    def epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return what so many rounds cost; without amplification so many rounds in which a client takes part.

        Args:
            noise_multiplier: z, standard deviation of the noise over the clipping norm.
            rounds: T.
        """
        if not rounds:
            return 0.0
        if not noise_multiplier:
            return math.inf
        library = dp_accounting()
        if self.accountant(noise_multiplier) == "exact Gaussian":
            # Another client's data moves the sum by up to two clipping norms, its absence by one.
            z = noise_multiplier / (2 if self.relation == "replace_one" else 1)
            return float(library.get_epsilon_gaussian(z / math.sqrt(rounds), self.delta))
        if self.sampling == "poisson":
            losses = _losses(self, noise_multiplier)
            return float((losses if rounds == 1 else losses.self_compose(rounds)).get_epsilon_for_delta(self.delta))
        # RDP does not double the sensitivity for replace-one by itself, as PLD does.
        noise = library.GaussianDpEvent(noise_multiplier / 2)
        event = library.SampledWithoutReplacementDpEvent(self.clients, self.participants, noise)
        accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
        return float(accountant.compose(event, rounds).get_epsilon(self.delta))

    def noise_for(self, epsilon: float, rounds: int) -> float:
        """Return the smallest noise multiplier, rounded up to 1e-4, with which rounds cost no more than epsilon.

        Raises:
            ConfigurationError: no noise is enough for the account.
        """
        from scipy.optimize import brentq

        # Without amplification rounds cost at least as much, and one at most, so that these are around what is looked
        # for; a distribution of losses of very little noise takes long to make.
        twice = 2 if self.relation == "replace_one" else 1
        high = twice * dp_accounting().get_sigma_gaussian(epsilon, self.delta) * math.sqrt(rounds)
        most = max(MOST_NOISE, 2 * high)
        while self.epsilon(high, rounds) > epsilon:  # RDP's account is not exact
            high *= 2
            if high > most:
                raise ConfigurationError(
                    f"no noise_multiplier up to {most:g} meets target_epsilon {epsilon:g} with sampling "
                    f"{self.sampling}; give a larger target, or take another sampling"
                )
        low = high / 2
        while self.epsilon(low, rounds) <= epsilon:
            low, high = low / 2, low
        found = brentq(lambda z: self.epsilon(z, rounds) - epsilon, low, high, rtol=1e-5) if self.amplifies else high
        rounded = round(found, 4)
        while self.epsilon(rounded, rounds) > epsilon:
            rounded = round(rounded * (1 + 1e-5) + 1e-4, 4)
        return rounded


@lru_cache(maxsize=4)
def _losses(mechanism: Mechanism, noise_multiplier: float) -> Any:
    """Return the distribution of a round's privacy losses; every round of a run asks for it."""
    library = dp_accounting()
    relation = library.NeighboringRelation
    return library.pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=mechanism.probability,
        value_discretization_interval=INTERVAL * max(1.0, noise_multiplier**-2),
        neighboring_relation=relation.REPLACE_ONE
        if mechanism.relation == "replace_one"
        else relation.ADD_OR_REMOVE_ONE,
    )


def version() -> str:
    """Return which dp-accounting there is."""
    return importlib.metadata.version("dp-accounting")
