"""User-level differential privacy as a rule around any other: clip every client's update, and add Gaussian noise."""

import math
import secrets
import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values, flat
from benchmark.privacy.account import Mechanism, version
from benchmark.ranges import InsideUnit, NonNegativeFloat, PositiveFloat
from benchmark.seeds import derived_seed, keyed_uniform
from benchmark.server import Declared, ServerRule, WrappedRule

#: From so many clients on, a run without a choice samples them by Poisson.
MANY = 100
#: Step of the logarithm of an adaptive norm.
ADAPTION = 0.2

COVERED = "the shared tensors after every round, and whatever is computed from them alone"
NOT_COVERED = (
    "personal tensors, and predictions made with them",
    "losses, accuracies, counts, the share of clipped updates and predictions of single images that this run keeps",
    "numbers of images, of classes and of local steps of each client, partition files, lists of classes",
    "the choice of hyper-parameters, the clipping norm among them",
    "initial values that were derived from these images",
)
SAMPLED = "who took part in which round, with bytes and losses of each client"
LOW_BITS = "attacks on the low-order bits of floating-point noise"
KEYED = (
    "anybody who knows the seed: noise has a key, so that runs are reproducible (noise_seed: entropy for deployment)"
)


DRAWN = "anybody who knows the run's seed, by which the clients of a round are drawn"


class UserLevelPrivacy(WrappedRule):
    """User-level differentially private federated averaging around a server's rule (McMahan et al., ICLR 2018).

    Neighbouring federations differ in ONE CLIENT's whole data. Of a client k, ``u_k`` is the end value less the
    received one, of all shared tensors together. It is clipped to the norm C, and the server makes

        Delta = (sum_k u_k min(1, C / ||u_k||) + N(0, (zC)^2 I)) / m,  theta <- theta + Delta

    with the constant m, the clients of a round (on average, where they are sampled by Poisson). Sums and noise are
    float64. Clients that are lost, late or not finite count as zero; a round without any still adds noise. All weigh
    the same: numbers of images are data. The inner rule is given the noised mean as if one client had sent it, so that
    a server's optimizer is post-processing.

    With ``noise: local`` each update is noised by itself before the inner rule sees it, so that the server need not be
    trusted, and rules that look at single clients can be used. What such a client uploads of personal tensors is noised
    as well, less what the server last had of it.

    Readings and bounds:
    * With ``sampling: full`` the rounds' clients follow the seed's schedule, which counts as public, whatever
      ``clients_per_round`` is. A run costs as many releases as any client has taken part in.
    * After the noise of the planned rounds is spent there are no more: a run that asks for more is refused.
    * Adaptive clipping is Andrew et al.'s (NeurIPS 2021), with the noise of its bits accounted for.

    Args:
        inner: the rule that is given the noised values; None for the method's own.
        clip: C, largest norm of an update; the first one, where it adapts.
        noise_multiplier: z, the noise's standard deviation over C; either this or ``target_epsilon``.
        target_epsilon: what all rounds of the run may cost together; z is made from it before the first.
        delta: of (epsilon, delta); below one in the number of clients.
        sampling: ``full`` (schedule of the seed, nothing hidden), ``poisson`` (each client with probability m/N) or
            ``fixed`` (m of N); by default ``poisson`` from a hundred clients on.
        relation: of neighbours: a client contributes or not, or has any other data. ``fixed`` has the second alone.
        noise: ``central`` on the sum, or ``local`` on each client's update.
        scope: clip all tensors together, or each of g tensors to C / sqrt(g).
        clip_quantile: gamma, the share of updates below the norm to which it adapts; None keeps the norm.
        noise_seed: ``run`` keys the noise by the run's seed, ``entropy`` draws it from the operating system.
    """

    outermost = True

    def __init__(
        self,
        inner: ServerRule | None = None,
        clip: PositiveFloat = 1.0,
        noise_multiplier: NonNegativeFloat | None = None,
        target_epsilon: PositiveFloat | None = None,
        delta: InsideUnit = 1e-5,
        sampling: Literal["full", "poisson", "fixed"] | None = None,
        relation: Literal["add_or_remove", "replace_one"] | None = None,
        noise: Literal["central", "local"] = "central",
        scope: Literal["joint", "per_tensor"] = "joint",
        clip_quantile: InsideUnit | None = None,
        noise_seed: Literal["run", "entropy"] = "run",
    ) -> None:
        super().__init__(inner)
        if (noise_multiplier is None) == (target_epsilon is None):
            raise ConfigurationError(
                "UserLevelPrivacy: give either noise_multiplier, or target_epsilon, from which it is made"
            )
        if noise == "local" and sampling in ("poisson", "fixed"):
            raise ConfigurationError(
                f"UserLevelPrivacy: with noise local everybody sees who sends: sampling {sampling} hides nobody; "
                "leave sampling out"
            )
        if noise == "local" and clip_quantile is not None:
            raise ConfigurationError(
                "UserLevelPrivacy: a norm adapts with noise central alone; leave clip_quantile out"
            )
        self.clip, self.noise_multiplier, self.target_epsilon = clip, noise_multiplier, target_epsilon
        self.delta, self.sampling, self.relation, self.noise = delta, sampling, relation, noise
        self.scope, self.clip_quantile, self.noise_seed = scope, clip_quantile, noise_seed
        self.mechanism: Mechanism
        self.participations: Tensor
        self.spent: Tensor
        self.norm: Tensor
        self._disclosed: tuple[str, ...] = ()
        self._clipped = self._below = 0.0
        self._void = False
        self._last = (0, 0.0)

    @property
    def empty_rounds(self) -> Literal["void", "aggregate"]:  # type: ignore[override]
        """Have rounds without uploads aggregated: to leave one out would tell that no client took part.

        With local noise what clients have sent is spent, also where a delivery refuses or loses it.
        """
        return "aggregate"

    @property
    def noises_uploads(self) -> bool:  # type: ignore[override]
        """Return whether noise is local."""
        return self.noise == "local"

    @property
    def draws_without_key(self) -> bool:  # type: ignore[override]
        """Return whether noise is the operating system's."""
        return self.noise_seed == "entropy"

    def accept(self, method: Declared) -> str | None:
        """Refuse methods of which something would travel without noise."""
        title = type(method).__name__
        if not (method.shared or method.uploads or method.sends_of_its_own):
            return "nothing leaves its clients, so that there is nothing to protect"
        names = [name for name, _ in method.named_parameters()]
        below = {one: [name for name in names if f"{name}.".startswith(f"{one}.")] for one in method.uploads}
        self._disclosed = tuple(name for found in below.values() for name in found)
        reported = [one for one, found in below.items() if not found]
        if reported:
            return f"its clients upload {', '.join(reported)}, counts of their images, which no norm bounds"
        if method.sends_of_its_own:
            return f"{title}.message sends what is no update, so that no norm bounds it"
        if self.noise == "central" and (method.uploads or self.wrapped.reads_rows):
            return (
                f"its server, {self.wrapped.title}, looks at single clients' uploads, and noise on their sum does not "
                "hide them; give noise: local"
            )
        return self.wrapped.accept(method)

    def start(self, initial: Values, terms: Terms) -> None:
        """Make the account, and the noise multiplier where a target is given.

        Raises:
            ConfigurationError: the setting has no account (see :class:`Mechanism`), or the target can't be met.
        """
        super().start(initial, terms)
        self.mechanism = self.mechanism_of(terms)
        if terms.new_clients and self.noise == "local":
            raise ConfigurationError(
                f"UserLevelPrivacy: {len(terms.new_clients)} clients never train, and what they send to be fitted is "
                "not noised; hold out no clients"
            )
        self.register_buffer("participations", torch.zeros(terms.num_clients, dtype=torch.int64))
        self.register_buffer("spent", torch.tensor(0))
        self.register_buffer("norm", torch.tensor(self.clip, dtype=torch.float64))
        self.z = self._noise_multiplier(terms)
        self.z_of_updates, self.std_of_bits = self._shared_out(self.z)
        self.mechanism.epsilon(self.z, 1)  # the account is there, or the run does not begin
        if not self.z:
            warnings.warn(
                "UserLevelPrivacy: noise_multiplier is 0: updates are clipped, nothing is private", stacklevel=1
            )
        self.floats = sum(value.numel() for value in initial.values())
        self.held = ClientStore({name: initial[name] for name in self._disclosed}, terms.num_clients)

    def mechanism_of(self, terms: Terms) -> Mechanism:
        """Return what is accounted for in a federation.

        Raises:
            ConfigurationError: see :class:`Mechanism`.
        """
        clients = len(terms.training_clients)
        by_default: Literal["full", "poisson"] = "poisson" if clients >= MANY and self.noise == "central" else "full"
        sampling = self.sampling or by_default
        relation = self.relation or ("replace_one" if sampling == "fixed" else "add_or_remove")
        return Mechanism(sampling, clients, terms.participants, relation, self.delta)

    def _noise_multiplier(self, terms: Terms) -> float:
        """Return z: as given, or made for the target.

        Raises:
            ConfigurationError: nobody says for how many rounds.
        """
        if self.target_epsilon is None:
            assert self.noise_multiplier is not None
            return self.noise_multiplier
        if not terms.rounds:
            raise ConfigurationError(
                "UserLevelPrivacy: target_epsilon needs the number of rounds; set trainer.max_epochs, or give "
                "noise_multiplier"
            )
        return self.mechanism.noise_for(self.target_epsilon, self._releases(terms.rounds))

    def _releases(self, rounds: int) -> int:
        """Return how many releases of so many rounds any client takes part in at most, or could."""
        if self.mechanism.amplifies or self.mechanism.participants == self.mechanism.clients:
            return rounds
        counts = torch.zeros(self.terms.num_clients, dtype=torch.int64)
        for number in range(1, rounds + 1):
            counts[self.select(number)] += 1
        return int(counts.max())

    def _shared_out(self, z: float) -> tuple[float, float]:
        """Return the multiplier of updates and the standard deviation of bits that together cost z.

        Raises:
            ConfigurationError: the bits alone cost more.
        """
        if self.clip_quantile is None:
            return z, 0.0
        std = self.mechanism.participants / 20
        rest = (z**-2 if z else math.inf) - (2 * std) ** -2
        if z and rest <= 0:
            raise ConfigurationError(
                f"UserLevelPrivacy: with {self.mechanism.participants} clients a round, an adaptive norm alone costs "
                f"more than noise_multiplier {z:g} allows; take more clients a round, or leave clip_quantile out"
            )
        return (rest**-0.5 if z else 0.0), (std if z else 0.0)

    def select(self, number: int) -> list[int]:
        """Draw the clients of a round; they do not depend on what was learned.

        Raises:
            ConfigurationError: the noise was made for fewer rounds.
        """
        terms = self.terms
        if self.target_epsilon is not None and number > terms.rounds:
            raise ConfigurationError(
                f"UserLevelPrivacy: target_epsilon {self.target_epsilon:g} is spent after {terms.rounds} rounds"
            )
        if self.mechanism.sampling != "poisson":
            return ServerRule.select(self, number)
        clients = np.array(terms.training_clients)
        drawn = keyed_uniform(derived_seed(terms.seed, "dp-select", number), clients)
        return [int(client) for client in clients[drawn < self.mechanism.probability]]

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Clip, add noise, and have the inner rule make what it makes of that."""
        self.spent += 1
        self.participations[list(round.clients)] += 1
        self._clipped = 0.0
        self._void = not uploads.clients and self.noise == "local" and self.wrapped.empty_rounds == "void"
        if self._void:
            warnings.warn(
                f"round {round.number} is void: nothing has arrived; the server's values stay as they were, and what "
                "was sent is accounted for",
                stacklevel=1,
            )
            return {}
        ready = self._central(round, shared, uploads) if self.noise == "central" else self._local(round, uploads)
        return self.wrapped.aggregate(round, shared, ready)

    def _central(self, round: Round, shared: Values, uploads: Uploads) -> Uploads:
        """Return the noised mean as the upload of one client."""
        clipped = self._clip({n: uploads.values[n].double() - uploads.received[n].double() for n in shared})
        mean: Values = {}
        for name, value in shared.items():
            total = clipped[name].sum(0) + self._noise(round, name, value.shape, value.device)
            mean[name] = (value.double() + total / self.mechanism.participants).to(value.dtype).unsqueeze(0)
        if self.clip_quantile is not None:
            self._adapt_norm(round)
        return Uploads.alone(self.terms.training_clients[0], mean, shared, round.number)

    def _local(self, round: Round, uploads: Uploads) -> Uploads:
        """Return every client's upload, clipped and noised, all of the same weight."""
        device = next(iter(uploads.values.values())).device
        before = {
            name: uploads.received[name] if name in uploads.received else self.held.rows(name, uploads.clients, device)
            for name in uploads.values
        }
        values: Values = {}
        for name, update in self._clip({n: v.double() - before[n].double() for n, v in uploads.values.items()}).items():
            noise = [self._noise(round, name, update.shape[1:], device, client) for client in uploads.clients]
            noised = before[name].double() + update + (torch.stack(noise) if noise else 0.0)
            values[name] = noised.to(uploads.values[name].dtype)
            if name in self._disclosed:
                self.held.write(name, uploads.clients, values[name])
        return replace(uploads, values=values, weights=torch.ones_like(uploads.weights))

    def _clip(self, updates: Values) -> Values:
        """Scale updates [S, ...] to the norm, rows that are not finite to zero; note how many were longer."""
        finite = torch.stack([flat(rows).isfinite().all(1) for rows in updates.values()]).all(0)
        updates = {name: torch.where(_along(finite, rows), rows, 0.0) for name, rows in updates.items()}
        squares = torch.stack([flat(rows).square().sum(1) for rows in updates.values()])  # [g, S]
        norm = float(self.norm)
        if self.scope == "joint":
            lengths = squares.sum(0, keepdim=True).sqrt().expand(len(updates), -1)
        else:
            lengths, norm = squares.sqrt(), norm / math.sqrt(len(updates))
        scales = (norm / lengths.clamp(min=1e-12)).clamp(max=1.0)
        over = (lengths > norm).any(0)
        self._clipped = float(over.double().mean()) if len(over) else 0.0
        if self.clip_quantile is not None:
            self._below = float((~over).double().sub(0.5).sum())
        return {name: _along(scale, rows) * rows for (name, rows), scale in zip(updates.items(), scales, strict=True)}

    def _noise(self, round: Round, name: str, shape: torch.Size, device: torch.device, *client: int) -> Tensor:
        """Draw N(0, (zC)^2) in float64, by a key of round, tensor and, where it has its own, client."""
        drawn = torch.randn(
            shape,
            generator=self._generator(device, "dp-noise", round.number, *client, name),
            dtype=torch.float64,
            device=device,
        )
        return drawn * (self.z_of_updates * float(self.norm))

    def _generator(self, device: torch.device, *key: int | str) -> torch.Generator:
        """Return a generator by a key, or by the operating system's entropy."""
        if self.noise_seed == "entropy":
            return torch.Generator(device).manual_seed(secrets.randbits(63))
        return torch.Generator(device).manual_seed(derived_seed(self.terms.seed, *key))

    def _adapt_norm(self, round: Round) -> None:
        """Move the norm towards the quantile, by noised counts of the updates below it."""
        assert self.clip_quantile is not None
        generator = self._generator(torch.device("cpu"), "dp-quantile", round.number)
        noise = torch.randn((), generator=generator, dtype=torch.float64) * self.std_of_bits
        share = (self._below + float(noise)) / self.mechanism.participants + 0.5
        self.norm *= math.exp(-ADAPTION * (share - self.clip_quantile))

    @property
    def releases(self) -> int:
        """Return how many releases have been made until now; without amplification those of the client in the most."""
        return int(self.spent) if self.mechanism.amplifies else int(self.participations.max())

    @property
    def epsilon(self) -> float:
        """Return what the rounds until now have cost."""
        if self._last[0] != self.releases:
            self._last = (self.releases, self.mechanism.epsilon(self.z, self.releases))
        return self._last[1]

    @property
    def noise_to_clip(self) -> float:
        """Return the expected norm of the noise in Delta over the largest that one client's update could be."""
        return (
            self.z_of_updates * math.sqrt(self.floats) / (1 if self.noise == "local" else self.mechanism.participants)
        )

    def report(self, round: Round) -> Facts:
        """Report epsilon until now, the share of updates that were clipped (not private), and noise over C."""
        found = super().report(round) | {"clipped_share": self._clipped, "noise_to_clip": self.noise_to_clip}
        if self.clip_quantile is not None:
            found["clip"] = float(self.norm)
        if self._void:
            found["void"] = 1.0
        return found | ({"epsilon": self.epsilon} if self.z else {})

    def guarantee(self) -> dict[str, object]:
        """Return what is promised to whom, and what is not, for the run's record."""
        mechanism = self.mechanism
        not_covered = [*NOT_COVERED, LOW_BITS]
        not_covered += [SAMPLED] if mechanism.amplifies else []
        not_covered += [KEYED] if self.noise_seed == "run" else [DRAWN] if mechanism.amplifies else []
        return {
            "unit": "user",
            "trusted_server": self.noise == "central",
            "relation": mechanism.relation,
            "sampling": mechanism.sampling,
            "clients": mechanism.clients,
            "participants": mechanism.participants,
            "probability": mechanism.probability if mechanism.sampling == "poisson" else None,
            "releases": self.releases,
            "noise_multiplier": self.z,
            "clip": self.clip,
            "delta": self.delta,
            "epsilon": self.epsilon if self.z else None,
            "target_epsilon": self.target_epsilon,
            "accountant": mechanism.accountant(self.z),
            "dp_accounting": version(),
            "covered": [COVERED],
            "not_covered": not_covered,
            "simulation": self.noise_seed == "run",
        }

    def _settings(self) -> dict[str, object]:
        """Return what all rounds of a run must have in common, beside z: they are accounted for together."""
        mechanism = self.mechanism
        return {
            "sampling": mechanism.sampling,
            "clients": mechanism.clients,
            "participants": mechanism.participants,
            "relation": mechanism.relation,
            "noise": self.noise,
            "clip": self.clip,
            "scope": self.scope,
            "clip_quantile": self.clip_quantile,
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Return the noise multiplier, and what else the rounds until now had in common."""
        return {"noise_multiplier": self.z, "settings": self._settings()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that was made with another noise multiplier, or other settings.

        Raises:
            ValueError: it was made with another noise multiplier.
            ConfigurationError: with other settings; states of older versions hold the norm alone.
        """
        if state["noise_multiplier"] != self.z:
            raise ValueError(
                f"its rounds had noise_multiplier {state['noise_multiplier']:g}, this run has {self.z:g}: a run with "
                "target_epsilon goes on with the number of rounds that it was made for"
            )
        held = {"clip": float(self.norm)} if self.clip_quantile is None else {}
        for name, given in {**held, **state.get("settings", {})}.items():
            if given != self._settings()[name]:
                raise ConfigurationError(
                    f"UserLevelPrivacy: the checkpoint's rounds had {name} {_said(given)}, this run has "
                    f"{_said(self._settings()[name])}: all rounds are accounted for together; go on with {name} "
                    f"{_said(given)}, or start without --ckpt_path"
                )


def _said(setting: object) -> str:
    """Write a setting as a configuration has it."""
    return "null" if setting is None else f"{setting:g}" if isinstance(setting, float) else str(setting)


def _along(rows: Tensor, like: Tensor) -> Tensor:
    """Give [S] as many dimensions as ``like`` [S, ...] has."""
    return rows.view(-1, *(1,) * (like.ndim - 1))
