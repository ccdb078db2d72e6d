"""The agreement of server and clients of a deployment: the resolved configuration and the federation's terms."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from lightning.pytorch import seed_everything

from benchmark.config.yaml_files import MOST_BYTES, as_declared
from benchmark.engine.batches.pool import Transform
from benchmark.engine.refusals.payload_checks import own_rule
from benchmark.engine.refusals.trainer_settings import check_settings
from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from benchmark.federation import Terms
from benchmark.files import parse_json
from benchmark.method import FederatedMethod
from benchmark.paths import user_path
from benchmark.predict.loaded import constructed
from benchmark.privacy.user_level import UserLevelPrivacy
from benchmark.records.classes import class_of
from benchmark.run.command import resolved
from benchmark.run.federation_file import FederationFacts
from benchmark.run.phases import quiet
from benchmark.run.reload import data_of
from benchmark.server import ServerRule
from benchmark.shipped import version
from datamodules.pixels import Decoding
from datamodules.sites import Sites, declared_alone
from datamodules.split_record import SplitRecord
from datamodules.transform import ImageTransform

#: Keys of a resolved configuration that server and clients need.
KEYS = ("seed_everything", "model", "server", "delivery", "data", "trainer")
#: Secure aggregation: no number may move further in a round; a change is one of so many levels from minus to plus that,
#: and so many clients' levels can be summed.
LARGEST_CHANGE, LEVELS, MOST_SUMMED = 8.0, 2**24, 128
#: A deployment's name, which is a folder's at the server and at each client.
NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Agreement:
    """A deployment's configuration and terms, the same for the server and all clients.

    Attributes:
        config: resolved, as ``lightning-cli fit`` would run it.
        terms: of the federation.
        class_names: by label.
        class_templates: by label, the data set's wording.
        client_names: by client.
        label_orders: see ``FederationFacts``.
        image_size: height and width of the stored images.
        decoding: how files become stored images; None where they come with the data set.
        dataset: name of the configured data set.
        setting: how it is divided over clients, in words.
        secure_aggregation: whether the server sees the sum of a round's uploads alone.
    """

    config: dict[str, Any]
    terms: Terms
    class_names: tuple[str, ...]
    class_templates: tuple[str, ...]
    client_names: tuple[str, ...]
    label_orders: int
    image_size: tuple[int, int]
    decoding: Decoding | None
    dataset: str
    setting: str
    secure_aggregation: bool

    @classmethod
    def of(cls, arguments: list[str], secure_aggregation: bool = False) -> Self:
        """Make it of the arguments of ``lightning-cli fit``; the data are read once, for the terms alone.

        Raises:
            ConfigurationError: the arguments are refused, data are missing, or live clients cannot serve the method.
        """
        return cls.with_split(arguments, secure_aggregation)[0]

    @classmethod
    def with_split(cls, arguments: list[str], secure_aggregation: bool = False) -> tuple[Self, SplitRecord]:
        """Make it as :meth:`of`, and the record of which images are whose, which stays where it was made."""
        whole = resolved(arguments)
        config = {name: whole[name] for name in KEYS if whole.get(name) is not None}
        _check(config)
        with declared_alone():
            data = data_of(config["data"] | {"seed": config["seed_everything"]})
        facts = FederationFacts.of(data)
        terms = replace(facts.terms, rounds=config["trainer"]["max_epochs"])
        if isinstance(data.source, Sites):
            terms = replace(terms, held_out_row={})  # nobody has agreed on a number of test images
        made = cls(
            config,
            terms,
            facts.class_names,
            facts.class_templates,
            facts.client_names,
            facts.label_orders,
            facts.image_size,
            facts.decoding,
            data.source.recorded_name,
            data.partition.description,
            secure_aggregation,
        )
        method, rule, _ = made.constructed()
        made.check(method, rule)
        return made, data.split_record

    def text(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def read(cls, text: object) -> Self:
        """Read what :meth:`text` returned.

        Raises:
            ConfigurationError: it is something else.
        """
        if not isinstance(text, str) or len(text) > MOST_BYTES:
            raise ConfigurationError("the app holds no agreement; make it anew with `benchmark deploy app`")
        try:
            content = parse_json(text.encode())
        except ValueError as error:
            raise ConfigurationError(f"the app's agreement is no JSON ({error}); make the app anew") from error
        return as_declared(cls, content, "the app's agreement")

    @property
    def digest(self) -> str:
        """Return a hash that tells deployments apart."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def facts(self) -> FederationFacts:
        """Return the public facts of the federation; what clients hold is not among them."""
        clients, classes = len(self.client_names), len(self.class_names)
        nothing = torch.zeros(clients, classes, dtype=torch.int64)
        held = (self.label_orders, nothing, (0,) * clients, self.image_size, self.decoding)
        return FederationFacts(self.terms, self.class_names, self.client_names, *held, self.class_templates)

    def constructed(self) -> tuple[FederatedMethod, ServerRule, Transform]:
        """Make the method with its first values, the server's rule and the images' transform, as a simulation does."""
        with quiet():
            seed_everything(self.config["seed_everything"], workers=True)
            made = constructed(self.config, self.facts, None)
            method: FederatedMethod = made.model
            rule: ServerRule = made.server or own_rule(method)
            return method, rule, (made.transform or ImageTransform()).for_method(method)

    def check(self, method: FederatedMethod, rule: ServerRule) -> None:
        """Refuse what live clients cannot serve.

        Raises:
            ConfigurationError: says what.
        """
        title, why = type(method).__name__, ""
        if self.terms.new_clients:
            why = "clients that never train (data.new_clients) do not take part in it"
        elif self.terms.testers:
            why = "what is scored once for the federation (testers of the partition) is no site's"
        elif self.config["data"].get("label_flipping") is not None:
            why = "labels are flipped on purpose (data.label_flipping), which is a simulation's"
        elif self.config["data"].get("record_privacy") is not None:
            why = "record-level privacy (data.record_privacy) has noise from the run's seed, which all know here"
        elif self.config["data"].get("ood") is not None:
            why = "foreign images (data.ood) are scored in a simulation alone"
        elif self.config["data"].get("corruptions") is not None:
            why = "corrupted images (data.corruptions) are scored in a simulation alone"
        elif any(phase.optimizer_state == "shared" for phase in method.local_phases()):
            why = "training.optimizer_state 'shared' hands one momentum from client to client"
        rule.complete(lambda: own_rule(method))
        for part in rule.modules():
            if isinstance(part, UserLevelPrivacy) and part.noise_seed != "entropy":
                why = f"{rule.title} draws its noise from the run's seed, which all know here (noise_seed: entropy)"
            elif isinstance(part, UserLevelPrivacy) and part.mechanism_of(self.terms).amplifies:
                why = f"all know here who takes part in a round, which {rule.title} counts as hidden (sampling: full)"
            elif isinstance(part, UserLevelPrivacy) and part.noise == "local":
                why = f"{rule.title} with noise: local would be added by the server here, not by the clients"
        if why:
            raise ConfigurationError(f"{title} cannot be deployed: {why}; simulate it, or choose another")
        if self.secure_aggregation and (why := self._not_summed(method, rule)):
            raise ConfigurationError(f"{title} cannot have secure aggregation: {why}; leave it out, or choose another")

    def _not_summed(self, method: FederatedMethod, rule: ServerRule) -> str:
        """Return why the sum of uploads is not enough, or nothing."""
        if rule.reads_rows:
            return f"its server's rule {rule.title} reads each upload by itself, which is hidden"
        if not rule.weighs_by_images:
            return f"its server's rule {rule.title} weighs clients alike, and sums are weighted with their images"
        if method.uploads:
            return f"clients let the server see what is their own ({method.uploads[0]}), which is hidden"
        if method.sends_of_its_own:
            return "clients make their messages themselves (message), and what the server makes of them is no mean"
        if not read_roles(method).shared:
            return "its clients send nothing"
        if not 2 <= self.terms.participants <= MOST_SUMMED:
            return f"a round has {self.terms.participants} clients, expected 2 to {MOST_SUMMED}"
        return ""


#: Options of the data that a deployment has not, and how they may stand.
SIMULATED: dict[str, tuple[Any, ...]] = {
    "keep_predictions": (None, "none"),
    "on_divergence": (None, "drop"),
    "subgroups": (None, [], ()),
}


def _check(config: dict[str, Any]) -> None:
    """Refuse settings that a deployment has not."""
    trainer, delivery = config["trainer"], config.get("delivery")
    if delivery is not None:
        raise ConfigurationError("a deployment's network is its delivery; leave --delivery out")
    if trainer.get("precision") not in (None, "32-true", "32", 32):
        raise ConfigurationError(f"a deployment computes in 32-true, got trainer.precision={trainer['precision']}")
    if not trainer.get("max_epochs") or trainer["max_epochs"] < 1:
        raise ConfigurationError(f"a deployment needs rounds: trainer.max_epochs, got {trainer.get('max_epochs')}")
    if trainer.get("callbacks"):
        raise ConfigurationError("a deployment has no Trainer and so no trainer.callbacks; leave them out")
    if trainer.get("accelerator") not in (None, "auto", "cpu") or trainer.get("devices") not in (None, "auto", 1, "1"):
        raise ConfigurationError(
            f"server and sites compute in one process on the CPU each; leave out trainer.accelerator and "
            f"trainer.devices, got {trainer.get('accelerator')} and {trainer.get('devices')}"
        )
    for name, usual in (("num_nodes", (None, 1)), ("max_time", (None,))):
        if trainer.get(name) not in usual:
            raise ConfigurationError(f"a deployment has no trainer.{name}, got {trainer[name]!r:.80}; leave it out")
    check_settings(SimpleNamespace(**trainer), fitting=True)
    for name, usual in SIMULATED.items():
        if (given := config["data"].get(name)) not in usual:
            raise ConfigurationError(f"data.{name} is a simulation's, got {given!r:.80}; leave it out of a deployment")
    source = class_of(config["data"].get("source"))
    if source is not None and issubclass(source, Sites):
        check_no_validation(config["data"])


def check_no_validation(data: Mapping[str, Any]) -> None:
    """Refuse to hold out training images at a site that has a folder of its own.

    Raises:
        ConfigurationError: these settings of the data do.
    """
    for name in ("val_fraction", "val_only"):
        if data.get(name):
            raise ConfigurationError(
                f"data.{name} would hold out training images, and a site trains on all of its folder train; leave it "
                "out"
            )


def versions() -> str:
    """Return on what results depend: of this package and of torch."""
    return f"benchmark {version()}, torch {torch.__version__}"


def state_folder(given: object) -> Path:
    """Return the folder in which a machine keeps what is its own; by default one in the user's home."""
    return user_path(given if isinstance(given, str) and given else "~/federated_runs")


def run_name(given: object) -> str:
    """Return a deployment's name.

    Raises:
        ConfigurationError: it could not be a folder's name everywhere.
    """
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise ConfigurationError(
            f"a deployment's name has up to 100 letters, digits, dots, dashes and underscores; got {given!r:.120}"
        )
    return given
