"""Validation of every upload before a server's rule sees it: names, shapes, types, finite values, size."""

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from benchmark.delivery import Delivery, Effect
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values, flat
from benchmark.ranges import PositiveFloat, PositiveInt


def fault_of(message: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return why a client's message can't be read, or None: the first of names, shapes, types and finite values.

    Args:
        message: as it came, per name [...].
        expected: per name a tensor of the shape and type that it must have.
    """
    for name in sorted(expected.keys() - message.keys()):
        return f"{name!r} is missing"
    for name in sorted(message.keys() - expected.keys()):
        return f"{name!r:.60} was not asked for"
    for name, like in expected.items():
        if message[name].shape != like.shape:
            return f"{name!r} has shape {tuple(message[name].shape)}, expected {tuple(like.shape)}"
        if message[name].dtype != like.dtype:
            return f"{name!r} is {message[name].dtype}, expected {like.dtype}"
    for name in expected:
        if not message[name].isfinite().all():
            return f"{name!r} is not finite"
    return None


class Validation(Delivery):
    """Every upload is looked at, and a broken one is refused: its client is named, and the round goes on.

    Args:
        on_invalid: ``drop``: as if it had not arrived. ``zero``: as if the client had not moved what it received, so
            that it still counts; messages that can't be read are dropped. ``raise``: the run ends.
        personal_fault: what a refused client keeps of its own, its momentum too. ``keep``: what its training has left,
            as with an upload that is lost. ``revert``: what it had before the round, as if it had not taken part.
        max_norm: of an update, all tensors that the server has sent together; None for any.
        max_ratio: of an update's norm to the median of the round's; None for any.
        min_valid: uploads without which the round is void.
        inner: what a message goes through before.

    Raises:
        ConfigurationError: the run ends with a broken upload, and its client is to go back.
    """

    def __init__(
        self,
        on_invalid: Literal["drop", "zero", "raise"] = "drop",
        personal_fault: Literal["keep", "revert"] = "keep",
        max_norm: PositiveFloat | None = None,
        max_ratio: PositiveFloat | None = None,
        min_valid: PositiveInt = 1,
        inner: Delivery | None = None,
    ) -> None:
        super().__init__(inner)
        if on_invalid == "raise" and personal_fault == "revert":
            raise ConfigurationError("Validation: with on_invalid raise the run ends; leave personal_fault out")
        self.on_invalid, self.max_norm, self.max_ratio, self.min_valid = on_invalid, max_norm, max_ratio, min_valid
        self.personal_fault = personal_fault
        self.refused: Tensor
        self._refused_now: frozenset[int] = frozenset()

    @property
    def effects(self) -> frozenset[Effect]:
        """Return whether a refused upload counts as no change."""
        return frozenset({"replaced"} if self.on_invalid == "zero" else ())

    @property
    def may_revert(self) -> bool:
        """Return whether refused clients go back."""
        return self.personal_fault == "revert" or super().may_revert

    @property
    def reverted(self) -> frozenset[int]:
        """Return the refused clients of the last round, if they go back."""
        mine: frozenset[int] = self._refused_now if self.personal_fault == "revert" else frozenset()
        return super().reverted | mine

    @property
    def each_by_itself(self) -> bool:
        """Return whether nothing is compared with others: not with their median, and not counted."""
        return self.max_ratio is None and self.min_valid == 1

    def start(self, terms: Terms) -> None:
        """Begin with nobody refused."""
        super().start(terms)
        self.register_buffer("refused", torch.zeros(terms.num_clients, dtype=torch.float64))

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Refuse broken uploads.

        Raises:
            ConfigurationError: there is one, and ``on_invalid`` is ``raise``.
        """
        sent = super().arrive(round, sent)
        reasons = self._unreadable(sent) | self._unusable(sent)
        self._refused_now = frozenset(reasons)
        for client, reason in sorted(reasons.items()):
            said = f"round {round.number}: the upload of client {client} is refused: {reason}"
            if self.on_invalid == "raise":
                raise ConfigurationError(f"{said}; see what the client sends, or set on_invalid to drop or zero")
            warnings.warn(said, stacklevel=1)
            self.refused[client] += 1
        if self.on_invalid == "zero":
            valid = self._zeroed(sent, [client for client in reasons if client in sent.clients])
        else:
            valid = sent.without([place for place, client in enumerate(sent.clients) if client in reasons], {})
        if len(valid.clients) < self.min_valid:
            if valid.clients:
                warnings.warn(
                    f"round {round.number}: {len(valid.clients)} valid uploads are less than {self.min_valid}",
                    stacklevel=1,
                )
            return valid.of([])
        return valid

    def _unreadable(self, sent: Uploads) -> dict[int, str]:
        expected = {name: rows.new_zeros(rows.shape[1:]) for name, rows in sent.values.items()}
        return {client: fault_of(message, expected) or "no row" for client, message in sent.misfits.items()}

    def _unusable(self, sent: Uploads) -> dict[int, str]:
        """Return why uploads that can be read can't be used, by client."""
        found: dict[int, str] = {}
        if not sent.clients:
            return found
        for name, rows in sent.values.items():
            finite = flat(rows).isfinite().all(1)
            for place in (~finite).nonzero().flatten().tolist():
                found.setdefault(sent.clients[place], f"{name!r} is not finite")
        if not sent.received or (self.max_norm is None and self.max_ratio is None):
            return found
        squares = [flat(rows.double()).square().sum(1) for rows in sent.updates().values()]
        norms = dict(zip(sent.clients, torch.stack(squares).sum(0).sqrt().tolist(), strict=True))
        fine = torch.tensor([norm for client, norm in norms.items() if client not in found], dtype=torch.float64)
        limits = [self.max_norm] if self.max_norm is not None else []
        limits += [self.max_ratio * fine.quantile(0.5).item()] if self.max_ratio is not None and len(fine) else []
        for client, norm in norms.items():
            if client not in found and limits and norm > min(limits):
                found[client] = f"its update has norm {norm:.4g}, at most {min(limits):.4g} is let through"
        return found

    def _zeroed(self, sent: Uploads, clients: list[int]) -> Uploads:
        """Replace the clients' uploads by the values that they had received."""
        places = [sent.clients.index(client) for client in clients]
        if sent.values.keys() - sent.received.keys() and places:
            own = sorted(sent.values.keys() - sent.received.keys())
            raise ConfigurationError(
                f"Validation: on_invalid zero has nothing to put in the place of {own[0]!r}, which the server never "
                "sends; set on_invalid to drop"
            )
        values: Values = {}
        for name, rows in sent.values.items():
            values[name] = rows.clone()
            values[name][places] = sent.received[name][places]
        return sent.with_values(values).without([], {})

    def report(self, round: Round) -> Facts:
        """Report how many uploads of each client were refused until now."""
        return super().report(round) | {"refused": self.refused.clone(), "refused_in_all": float(self.refused.sum())}
