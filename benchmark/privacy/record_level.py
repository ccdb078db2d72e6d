"""Record-level differential privacy: the settings of noisy local training, and what it has cost each client."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from benchmark.errors import ConfigurationError
from benchmark.privacy.account import INTERVAL, LEAST_AMPLIFIED, MOST_NOISE, dp_accounting, version
from benchmark.privacy.user_level import KEYED, LOW_BITS
from benchmark.ranges import InsideUnit, NonNegativeFloat, PositiveFloat, PositiveInt, checked

COVERED = (
    "every message of a client, the shared tensors after every round, and the client's own tensors",
    "whatever is computed from them alone",
)
NOT_COVERED = (
    "images of one person beyond the first: the guarantee is for one image",
    "losses, accuracies, counts and predictions of single images that this run keeps",
    "numbers of images, of classes and of local steps of each client, which size lots and weigh means; partition files",
    "copies that are fitted before they are scored, and predictions that look at the client's images",
    "the choice of hyper-parameters, the clipping norm among them",
    "initial values that were derived from these images",
)


@checked
@dataclass(frozen=True)
class RecordLevelPrivacy:
    """Differentially private SGD in the local training of every client (Abadi et al., CCS 2016).

    At each step the gradient of every image by itself is clipped to norm C over all trained tensors together; their sum
    gets noise N(0, (zC)^2) and is divided by the batch size B, a constant. The method's ``regulariser`` is added
    without clipping or noise. So all that is trained is private between neighbours that differ in one image of one
    client: what is sent, and what stays. The server need not be trusted.

    Readings and bounds:
    * ``poisson`` lots have each image with probability B/n_k at each of the steps that epochs would have, at most 2B
      images; what is left out beyond is accounted for. A client with no more than B images takes all in every step.
    * ``epochs`` is training as usual. Each image is counted once an epoch, and nothing is gained by the order.
    * Neighbours: one image contributes or does not. n_k counts as public. Nothing is gained by who takes part.

    Attributes:
        clip: C, largest norm of one image's gradient.
        noise_multiplier: z, the noise's standard deviation over C; either this or ``target_epsilon``.
        target_epsilon: what all rounds of the run may cost any client; z is made from it before the first.
        delta: of (epsilon, delta); below one in the number of any client's images.
        sampling: of a step's images, see above.
        images_at_once: gradients of so many images of each client are held at a time; None: of those that 64 MB hold.
    """

    clip: PositiveFloat = 1.0
    noise_multiplier: NonNegativeFloat | None = None
    target_epsilon: PositiveFloat | None = None
    delta: InsideUnit = 1e-5
    sampling: Literal["poisson", "epochs"] = "poisson"
    images_at_once: PositiveInt | None = None

    def __post_init__(self) -> None:
        """Refuse half a setting.

        Raises:
            ConfigurationError: both or neither of ``noise_multiplier`` and ``target_epsilon`` are given.
        """
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigurationError(
                "data.record_privacy: give either noise_multiplier, or target_epsilon, from which it is made"
            )


class Training(NamedTuple):
    """A client's local training of a round.

    Attributes:
        images: n_k.
        steps: of all phases together.
        epochs: how often each image is used, where lots are not drawn.
    """

    images: int
    steps: int
    epochs: int


class RecordAccount:
    """Accounts for the local training of every client.

    Args:
        privacy: the settings.
        batch_size: B.
        of_a_round: per client that trains, its training in a round.
        planned: per client, rounds in which it trains; a target needs them.

    Attributes:
        noise_multiplier: z, as given or made for the target.
        trainings: per client, rounds in which it has trained so far.

    Raises:
        ConfigurationError: delta is not below one in the number of a client's images, or the target can't be met.
    """

    def __init__(
        self,
        privacy: RecordLevelPrivacy,
        batch_size: int,
        of_a_round: Mapping[int, Training],
        planned: Mapping[int, int],
    ) -> None:
        self.privacy = privacy
        self.batch_size = batch_size
        self.of_a_round = of_a_round
        self.trainings = dict.fromkeys(of_a_round, 0)
        most = max(one.images for one in of_a_round.values())
        if privacy.delta * most >= 1:
            raise ConfigurationError(
                f"data.record_privacy.delta is {privacy.delta:g}; expected less than one in the {most} images of the "
                f"largest client, {1 / most:g}"
            )
        if privacy.noise_multiplier is not None:
            self.noise_multiplier = privacy.noise_multiplier
        else:
            self.noise_multiplier = self._noise_for(privacy.target_epsilon or 0.0, planned)

    def count(self, clients: tuple[int, ...]) -> None:
        """Take note that these clients have trained in a round."""
        for client in clients:
            self.trainings[client] += 1

    def epsilons(self, noise_multiplier: float, rounds: Mapping[int, int]) -> dict[int, float]:
        """Return what so many rounds cost each client; equal clients are accounted for once."""
        return {client: self._epsilon(noise_multiplier, one, rounds[client]) for client, one in self.of_a_round.items()}

    def _epsilon(self, z: float, one: Training, rounds: int) -> float:
        times = one.epochs if self.privacy.sampling == "epochs" else one.steps
        return _cost(self._lots_of(one, z), z, rounds * times, self.privacy.delta)

    def _lots_of(self, one: Training, z: float) -> tuple[int, int] | None:
        """Return n_k and B where lots hide who is in them."""
        hides = self.privacy.sampling == "poisson" and one.images > self.batch_size and z >= LEAST_AMPLIFIED
        return (one.images, self.batch_size) if hides else None

    def _noise_for(self, target: float, planned: Mapping[int, int]) -> float:
        """Return the smallest noise multiplier, rounded up to 1e-3, with which no client's rounds cost more.

        Raises:
            ConfigurationError: no client is planned to train, or no noise is enough.
        """
        from scipy.optimize import brentq

        paying = self._paying_most(planned)
        if not paying:
            raise ConfigurationError(
                "data.record_privacy: target_epsilon needs the rounds in which clients train; set trainer.max_epochs, "
                "or give noise_multiplier"
            )

        def over(z: float) -> float:
            return max(self._epsilon(z, one, rounds) for one, rounds in paying) - target

        low = high = 1.0
        while over(high) > 0:
            low, high = high, 2 * high
            if high > MOST_NOISE:
                raise ConfigurationError(
                    f"data.record_privacy: no noise_multiplier up to {MOST_NOISE:g} meets target_epsilon {target:g}"
                )
        while over(low) <= 0:
            low, high = low / 2, low
        found = math.ceil(1e3 * brentq(over, low, high, xtol=1e-4)) / 1e3
        while over(found) > 0:
            found = round(found + 1e-3, 3)
        return found

    def _paying_most(self, planned: Mapping[int, int]) -> list[tuple[Training, int]]:
        """Return clients one of which pays most, with their rounds: of those with equal steps the smallest.

        An image of a smaller client is in a step with a higher probability.
        """
        found: dict[tuple[int, int, int], Training] = {}
        for client, one in self.of_a_round.items():
            key = (one.steps, one.epochs, planned[client])
            if one.steps and planned[client] and (key not in found or one.images < found[key].images):
                found[key] = one
        return [(one, rounds) for (_, _, rounds), one in found.items()]

    def state_dict(self) -> dict[str, Any]:
        """Return who has trained how often, under which noise, and what a round of it was."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "trainings": dict(self.trainings),
            "sampling": self.privacy.sampling,
            "batch_size": self.batch_size,
            "of_a_round": {client: tuple(one) for client, one in self.of_a_round.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ValueError: its rounds had another noise, or were of other clients.
            ConfigurationError: a client's round was another, in what is accounted for; older states do not say it.
        """
        if state["noise_multiplier"] != self.noise_multiplier:
            raise ValueError(
                f"its rounds had noise_multiplier {state['noise_multiplier']:g}, this run has "
                f"{self.noise_multiplier:g}: a run with target_epsilon goes on with the number of rounds that it was "
                "made for"
            )
        if {*state["trainings"]} != {*self.trainings}:
            raise ValueError("its account is of other clients")
        settings = {"data.record_privacy.sampling": "sampling", "data.batch_size": "batch_size"}
        mine = self.state_dict()
        for option, name in settings.items():
            if state.get(name, mine[name]) != mine[name]:
                raise _other_round(option, state[name], mine[name])
        for client, one in state.get("of_a_round", {}).items():
            if tuple(one) != mine["of_a_round"][client]:
                before, now = (f"{of[1]} steps on {of[0]} images a round" for of in (one, mine["of_a_round"][client]))
                raise _other_round(f"client {client}'s training", before, now)
        self.trainings = dict(state["trainings"])

    def guarantee(self, num_clients: int) -> dict[str, object]:
        """Return what is promised to whom, and what is not, for the run's record."""
        z, privacy = self.noise_multiplier, self.privacy
        spent = self.epsilons(z, self.trainings) if z else {}
        hiding = [self._lots_of(one, z) for one in self.of_a_round.values()]
        steps = [self.trainings[client] * one.steps for client, one in self.of_a_round.items()]
        return {
            "unit": "record",
            "trusted_server": False,
            "relation": "add_or_remove",
            "sampling": privacy.sampling,
            "clients": len(self.of_a_round),
            "participants": sum(count > 0 for count in self.trainings.values()),
            "probability": None
            if privacy.sampling == "epochs"
            else max(min(1.0, self.batch_size / one.images) for one in self.of_a_round.values()),
            "releases": max(steps),
            "noise_multiplier": z,
            "clip": privacy.clip,
            "delta": privacy.delta,
            "epsilon": max(spent.values()) if z else None,
            "target_epsilon": privacy.target_epsilon,
            "accountant": "PLD" if any(hiding) else "exact Gaussian",
            "dp_accounting": version(),
            "covered": [*COVERED],
            "not_covered": [*NOT_COVERED, LOW_BITS, KEYED],
            "simulation": True,
            "epsilons": [spent.get(client) for client in range(num_clients)],
        }


def _other_round(what: str, before: object, now: object) -> ConfigurationError:
    """Return the refusal of a checkpoint whose rounds differ from this run's in what is accounted for."""
    return ConfigurationError(
        f"data.record_privacy: the checkpoint's rounds had {what} {before}, this run has {now}: all rounds are "
        "accounted for together; go on as before, or start without --ckpt_path"
    )


@lru_cache(maxsize=4096)
def _cost(lots: tuple[int, int] | None, z: float, times: int, delta: float) -> float:
    """Return epsilon of so many noisy sums of clipped gradients."""
    if not times:
        return 0.0
    if not z:
        return math.inf
    if lots is None:
        return float(dp_accounting().get_epsilon_gaussian(z / math.sqrt(times), delta))
    losses = _losses(*lots, z)
    return float((losses if times == 1 else losses.self_compose(times)).get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _losses(images: int, batch_size: int, z: float) -> Any:
    """Return the distribution of privacy losses of one step with Poisson lots of at most twice the batch size."""
    library = dp_accounting()
    make, interval = library.pld.privacy_loss_distribution, INTERVAL * max(1.0, z**-2)
    relation, probability = library.NeighboringRelation.ADD_OR_REMOVE_ONE, batch_size / images
    if images <= 2 * batch_size:
        return make.from_gaussian_mechanism(
            z, sampling_prob=probability, value_discretization_interval=interval, neighboring_relation=relation
        )
    return make.from_truncated_subsampled_gaussian_mechanism(
        images, probability, 2 * batch_size, z, value_discretization_interval=interval, neighboring_relation=relation
    )
