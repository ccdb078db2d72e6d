"""Quantised updates, and updates of which the largest entries alone are sent."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.delivery import Delivery, Effect
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values
from benchmark.ranges import AboveZero
from benchmark.seeds import torch_generator

#: Bytes of a scale, of a value and of an entry's place.
SCALE = VALUE = PLACE = 4


class Compressed(Delivery):
    """Base of what makes updates smaller: end less received, of the tensors that the server has sent.

    What a client uploads of its own goes as it is.

    Args:
        inner: what a message goes through before; no compression.
    """

    def __init__(self, inner: Delivery | None = None) -> None:
        super().__init__(inner)
        if any(isinstance(each, Compressed) for each in self.modules() if each is not self):
            raise ConfigurationError(f"{type(self).__name__}: its inner delivery compresses already; take one of them")

    @property
    def each_by_itself(self) -> bool:
        """Return True."""
        return True

    @property
    def effects(self) -> frozenset[Effect]:
        """Return that less is sent."""
        return frozenset({"compressed"})

    def upload_size(self, values: Values, received: frozenset[str]) -> tuple[int, int]:
        """Return bytes and numbers of one client's upload as it is sent."""
        own = [value for name, value in values.items() if name not in received]
        size, numbers = self.size([value for name, value in values.items() if name in received])
        return (
            size + sum(value.numel() * value.element_size() for value in own),
            numbers + sum(value.numel() for value in own),
        )

    def size(self, updates: list[Tensor]) -> tuple[int, int]:
        """Return bytes and numbers of compressed updates of these shapes."""
        raise NotImplementedError(f"{type(self).__name__}.size")

    def compress(self, round: Round, client: int, update: Tensor, sizes: list[int]) -> Tensor:
        """Return what arrives of one client's update [d], of tensors of these sizes."""
        raise NotImplementedError(f"{type(self).__name__}.compress")

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Replace updates by what arrives of them."""
        sent = super().arrive(round, sent)
        names = sorted(sent.received)
        if not sent.clients or not names:
            return sent
        of_server = sent.only(names)
        rows = of_server.matrix(names)
        sizes = [sent.values[name][0].numel() for name in names]
        made = torch.stack(
            [self.compress(round, client, row, sizes) for client, row in zip(sent.clients, rows, strict=True)]
        )
        columns = dict(zip(names, made.split(sizes, dim=1), strict=True))
        values = dict(sent.values)
        for name, before in sent.received.items():
            values[name] = before + columns[name].view_as(values[name]).to(values[name])
        return sent.with_values(values)


class Quantized(Compressed):
    """Updates of few bits a number (QSGD, Alistarh et al., NeurIPS 2017, with a tensor's largest entry as its scale).

    A tensor ``u`` arrives as ``m q / s`` with ``m = max |u|``, ``s = 2^(bits - 1) - 1`` and whole numbers q in [-s, s],
    to which ``s u / m`` is rounded at random, so that u is the mean. Scales are sent in four bytes each.

    Args:
        bits: of a number.
        inner: what a message goes through before.
    """

    def __init__(self, bits: Literal[8, 4] = 8, inner: Delivery | None = None) -> None:
        super().__init__(inner)
        self.bits = bits

    def size(self, updates: list[Tensor]) -> tuple[int, int]:
        """Return bytes and numbers: packed bits, and a scale for each tensor."""
        bytes_of = [math.ceil(update.numel() * self.bits / 8) + SCALE for update in updates]
        return sum(bytes_of), sum(update.numel() + 1 for update in updates)

    def compress(self, round: Round, client: int, update: Tensor, sizes: list[int]) -> Tensor:
        """Round every tensor to its levels."""
        levels = 2 ** (self.bits - 1) - 1
        generator = torch_generator(self.terms.seed, "quantized", round.number, client)
        drawn = torch.rand(len(update), generator=generator, dtype=torch.float32).to(update.device)
        parts = []
        for part, at_random in zip(update.split(sizes), drawn.split(sizes), strict=True):
            scale = part.abs().max() if len(part) else part.sum()
            exact = part / torch.where(scale > 0, scale, 1.0) * levels
            parts.append((exact + at_random).floor().clamp(-levels, levels) * (scale / levels))
        return torch.cat(parts)


class TopK(Compressed):
    """The largest entries of an update, and what was left out comes with the next ones (Stich et al., NeurIPS 2018).

    Of ``u + e``, all tensors together, the k entries of the largest absolute values arrive; the rest is the client's
    new e. Each entry is sent with its place. A client whose upload is lost on the way keeps its e.

    Args:
        share: k over the number of entries.
        error_feedback: whether e is kept; else it is 0.
        inner: what a message goes through before.
    """

    def __init__(self, share: AboveZero = 0.1, error_feedback: bool = True, inner: Delivery | None = None) -> None:
        super().__init__(inner)
        self.share, self.error_feedback = share, error_feedback

    def start(self, terms: Terms) -> None:
        """Begin with nothing left to send."""
        super().start(terms)
        self._left: dict[int, Tensor] = {}
        #: of the present round's clients, what they had left before; None of one that had nothing
        self._before: dict[int, Tensor | None] = {}

    @property
    def effects(self) -> frozenset[Effect]:
        """Return that less is sent, and whether what is left out comes later."""
        return super().effects | ({"carried over"} if self.error_feedback else set())

    def size(self, updates: list[Tensor]) -> tuple[int, int]:
        """Return bytes and numbers: values and places of k entries."""
        kept = self._kept(sum(update.numel() for update in updates))
        return kept * (VALUE + PLACE), 2 * kept

    def _kept(self, entries: int) -> int:
        exact = round(self.share * entries, 6)  # 0.07 of 100 is a little more than 7 in floats
        return min(entries, max(1, math.ceil(exact)))

    def compress(self, round: Round, client: int, update: Tensor, sizes: list[int]) -> Tensor:
        """Keep the largest entries, and the rest for later."""
        whole = update + self._left[client].to(update) if client in self._left else update
        made = torch.zeros_like(whole)
        places = whole.abs().argsort(descending=True, stable=True)[: self._kept(len(whole))]
        made[places] = whole[places]
        if self.error_feedback:
            self._before[client] = self._left.get(client)
            self._left[client] = (whole - made).cpu()
        return made

    def close(self, round: Round, void: bool, reverted: frozenset[int]) -> None:
        """Give clients that go back what they had left to send before the round."""
        super().close(round, void, reverted)
        for client in reverted & self._before.keys():
            before = self._before[client]
            if before is None:
                del self._left[client]
            else:
                self._left[client] = before
        self._before = {}

    def report(self, round: Round) -> Facts:
        """Report the norm of what clients still have to send, on average."""
        if not self._left:
            return super().report(round)
        left = torch.stack([rest.norm() for rest in self._left.values()]).mean()
        return super().report(round) | {"left_to_send": float(left)}

    def get_extra_state(self) -> dict[str, Any]:
        """Return what clients still have to send."""
        return {"left": dict(self._left)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take what ``get_extra_state`` gave."""
        self._left = dict(state["left"])
