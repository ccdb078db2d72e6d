"""``federation.json``: what a run's clients are asked with when the training data are not at hand."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.federation import Federation, Holdings, Terms
from benchmark.files import parse_json, read_regular, reason, write_bytes
from benchmark.records.hashes import canonical
from datamodules.pixels import Decoding

if TYPE_CHECKING:
    from datamodules.federated import FederatedDataModule

NAME = "federation.json"
FORMAT = 1
MOST_BYTES = 2**28
LARGEST_SIDE = 2**13


@dataclass(frozen=True)
class FederationFacts:
    """Public facts of a federation, what each client holds in numbers, and how files become its images.

    Attributes:
        terms: of the federation.
        class_names: of the data set, by label.
        client_names: by client.
        label_orders: G, see :func:`datamodules.label_orders.reordered`.
        class_counts: int64 [N, C], training images of each class.
        train_sizes: by client.
        image_size: height and width of the stored images.
        decoding: how files become stored images; None where the data set has its images in no files of their own.
        class_templates: the data set's wording for each class; none in files of older versions.
    """

    terms: Terms
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]
    label_orders: int
    class_counts: Tensor
    train_sizes: tuple[int, ...]
    image_size: tuple[int, int]
    decoding: Decoding | None
    class_templates: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: "FederatedDataModule") -> Self:
        """Collect the facts of data that are set up."""
        federation = data.federation
        holdings, clients = federation.holdings, range(data.num_clients)
        height, width = data.pool.images.shape[-2:]
        return cls(
            federation.terms,
            tuple(data.class_names),
            tuple(data.client_names),
            data.label_orders,
            holdings.class_counts,
            tuple(holdings.train_sizes[client] for client in clients),
            (int(height), int(width)),
            data.source.decoding,
            tuple(data.class_templates),
        )

    def names_for(self, client: int, split: str) -> tuple[str, ...]:
        """Return the class names in the order of a client's logits on a split."""
        count = len(self.class_names)
        labels = self.terms.classes_in(self.terms.space_of(split, client))
        shift = client % self.label_orders * (count // self.label_orders)
        return tuple(self.class_names[(label - shift) % count] for label in labels)

    def with_new_client(self, name: str, class_counts: Tensor) -> "FederationFacts":
        """Return the facts with one client more, which never trains.

        Args:
            name: of the client.
            class_counts: int64 [C], images of each class that it can be fitted on.
        """
        number, size = self.terms.num_clients, int(class_counts.sum())
        largest = max(*self.train_sizes, size)
        terms = replace(
            self.terms,
            num_clients=number + 1,
            new_clients=(*self.terms.new_clients, number),
            row=min(self.terms.batch_size, largest),
            own_row=largest,
        )
        return replace(
            self,
            terms=terms,
            client_names=(*self.client_names, name),
            class_counts=torch.cat([self.class_counts, class_counts.unsqueeze(0)]),
            train_sizes=(*self.train_sizes, size),
        )

    def of_one(self, client: int, labels: Tensor) -> "FederationFacts":
        """Return the facts with what one client holds: training images of these labels, int64 [n]."""
        counts, sizes = self.class_counts.clone(), [*self.train_sizes]
        counts[client] = torch.bincount(labels, minlength=len(self.class_names))
        sizes[client] = len(labels)
        return replace(self, class_counts=counts, train_sizes=tuple(sizes))

    def federation(self, train_rows: Mapping[int, np.ndarray] = {}) -> Federation:
        """Return the federation as far as it is known without the data.

        Args:
            train_rows: of clients whose training images are at hand after all.
        """
        sizes = dict(enumerate(self.train_sizes))
        return Federation(self.terms, Holdings(train_rows, sizes, {}, self.class_counts))

    # ------------------------------------------------------------------ in a run's directory

    def write(self, run_dir: Path) -> None:
        """Write them into a run's directory."""
        plain: dict[str, Any] = {
            **asdict(self),
            "format": FORMAT,
            "class_counts": self.class_counts.tolist(),
        }
        plain["sha256"] = hashlib.sha256(canonical(plain)).hexdigest()
        write_bytes(run_dir / NAME, canonical(plain) + b"\n")

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Read what :meth:`write` left; None where there is nothing, as in runs of older versions.

        Raises:
            ConfigurationError: it cannot be read, or was changed after it was written.
        """
        path = run_dir / NAME
        try:
            plain = parse_json(read_regular(path, MOST_BYTES))
            if not isinstance(plain, dict) or plain.get("format") != FORMAT:
                raise ValueError("it is of another form")
            if plain.pop("sha256", None) != hashlib.sha256(canonical(plain)).hexdigest():
                raise ValueError("it was changed after it was written")
            terms, how = plain["terms"], plain["decoding"]
            spaces = {name: tuple(labels) for name, labels in terms["label_spaces"].items()}
            for name in ("training_clients", "new_clients"):
                terms[name] = tuple(terms[name])
            for name in ("own_spaces", "testers"):  # none in files of older versions
                terms[name] = {split: tuple(numbers) for split, numbers in terms.get(name, {}).items()}
            facts = cls(
                Terms(**terms | {"label_spaces": spaces}),
                tuple(plain["class_names"]),
                tuple(plain["client_names"]),
                plain["label_orders"],
                torch.tensor(plain["class_counts"], dtype=torch.int64),
                tuple(plain["train_sizes"]),
                (plain["image_size"][0], plain["image_size"][1]),
                None if how is None else Decoding(**how),
                tuple(plain.get("class_templates", ())),
            )
            facts._check()
            return facts
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} can't be used ({reason(error)}); take an unchanged copy, or remove it and name the folder of "
                "the run's data with --data_dir"
            ) from error

    def _check(self) -> None:
        """Refuse parts that are not of one federation.

        Raises:
            ValueError: they are not.
        """
        clients, classes, terms = len(self.client_names), len(self.class_names), self.terms
        testers = {client for of in terms.testers.values() for client in of}
        ids = sorted((*terms.training_clients, *terms.new_clients, *testers))
        spaces = {f"{split}/{number}" for split, of in terms.own_spaces.items() for number in of if number >= 0}
        labels = [label for space in terms.label_spaces.values() for label in space]
        if (
            (terms.num_clients, terms.num_classes) != (clients, classes)
            or self.class_counts.shape != (clients, classes)
            or self.class_counts.sum(1).tolist() != list(self.train_sizes)
            or ids != list(range(clients))
            or not set(labels) <= set(range(classes))
            or any(len(of) != clients for of in terms.own_spaces.values())
            or not spaces <= terms.label_spaces.keys()
            or not 1 <= self.label_orders <= classes
            or len(self.class_templates) not in (0, classes)
            or not all(1 <= side <= LARGEST_SIDE for side in self.image_size)
            or (self.decoding is not None and self.image_size != (self.decoding.size, self.decoding.size))
        ):
            raise ValueError("its parts are not of one federation")
