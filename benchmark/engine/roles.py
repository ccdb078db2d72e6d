"""The part that every parameter of a method plays, read from what the method declares."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from torch import nn

from benchmark.contract import ClientMethod, Group, Input, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.ranges import check_fields
from benchmark.server import ServerRule


@dataclass(frozen=True)
class Roles:
    """Names of parameters by role, in the order of the module.

    Attributes:
        shared: sent, trained, sent back.
        personal: trained, kept by their client.
        uploaded: of ``personal``, what the server sees as well.
        reported: names that ``client_loss`` reports and whose sums are sent.
        remembered: what ``client.previous`` holds.
        slots: all that is ever trained: shared and personal ones, and what only the fitting of a copy trains.
        has_frozen: whether there is anything else.
    """

    shared: tuple[str, ...]
    personal: tuple[str, ...]
    uploaded: tuple[str, ...]
    reported: tuple[str, ...]
    remembered: tuple[str, ...]
    slots: tuple[str, ...]
    has_frozen: bool

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that local training may change."""
        return self.shared + self.personal


def names_under(module: nn.Module, prefixes: Iterable[str]) -> tuple[str, ...]:
    """List the parameters at or below one of these prefixes."""
    return below(prefixes, (name for name, _ in module.named_parameters()))


def below(prefixes: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """List those of the names of parameters that are at or below one of these prefixes."""
    prefixes = tuple(prefixes)
    return tuple(name for name in names if any(name == p or name.startswith(p + ".") for p in prefixes))


def read_roles(method: ClientMethod) -> Roles:
    """Read a method's roles and check them against its parameters and phases.

    Raises:
        ConfigurationError: a role or a phase names no parameter, two roles or two groups of a phase hold one, a frozen
            one is trained, or ``inputs`` names something else than there is.
    """
    title = type(method).__name__
    check_words(f"{title}.inputs", method.inputs, get_args(Input))
    shared, personal = _role(method, "shared"), _role(method, "personal")
    if both := sorted({name for name in shared + personal if (shared + personal).count(name) > 1}):
        raise ConfigurationError(f"{title}: in two of the roles shared and personal: {both}")
    uploaded = names_under(method, method.uploads)
    reported = tuple(prefix for prefix in method.uploads if not names_under(method, [prefix]))
    if foreign := sorted(set(uploaded) - set(personal)):
        raise ConfigurationError(
            f"{title}: uploads names {foreign[0]!r}, which is not personal; shared parameters are uploaded anyway"
        )
    finetuned: dict[str, None] = {}
    phases = phases_of(method)
    for phase in (*phases[Stage.TRAIN], *phases[Stage.FINETUNE], *phases[Stage.ADAPT]):
        _check_phase(title, phase)
        held: set[str] = set()
        for group in phase.groups:
            for prefix in group.parameters:
                if not names_under(method, [prefix]):
                    raise ConfigurationError(f"{title} trains {prefix!r}, which has no parameter")
            names = names_under(method, group.parameters)
            if twice := [name for name in names if name in held]:
                raise ConfigurationError(f"{title}: two groups of a phase train {twice[0]!r}; name it in one of them")
            held |= {*names}
            rest = [name for name in names if name not in shared + personal]
            if rest and phase in phases[Stage.TRAIN]:
                raise ConfigurationError(f"{title} trains frozen parameters: {sorted(rest)[:3]}")
            finetuned |= dict.fromkeys(rest)
    slots = shared + personal + tuple(finetuned)
    frozen = {name for name, _ in method.named_parameters()} - set(shared + personal)
    return Roles(shared, personal, uploaded, reported, _role(method, "remembers"), slots, bool(frozen))


def phases_of(method: ClientMethod) -> dict[Stage, list[Phase]]:
    """Ask a method for its phases.

    Raises:
        ConfigurationError: it gives something else, or a fine-tuning whose learning rate follows the rounds.
    """
    asked = {
        Stage.TRAIN: ("local_phases", method.local_phases()),
        Stage.FINETUNE: ("finetune_phases", method.finetune_phases(new=False)),
        Stage.ADAPT: ("finetune_phases", method.finetune_phases(new=True)),
    }
    for name, made in asked.values():
        if not isinstance(made, list | tuple) or not all(isinstance(phase, Phase) for phase in made):
            raise ConfigurationError(
                f"{type(method).__name__}.{name} must return a list of phases, such as "
                f"[self.training_settings.phase('head')]; it returns {made!r:.80}"
            )
    phases = {stage: list(made) for stage, (_, made) in asked.items()}
    for phase in (*phases[Stage.FINETUNE], *phases[Stage.ADAPT]):
        if phase.schedule != "constant":
            raise ConfigurationError(
                f"{type(method).__name__}.finetune_phases has a phase whose learning rate follows a {phase.schedule} "
                "over the rounds; it fits a copy for an evaluation, which is of no round: give it schedule='constant'"
            )
    return phases


def untrained(method: ClientMethod, roles: Roles) -> list[str]:
    """List the parameters with a role that no phase trains."""
    phases = [phase for of in phases_of(method).values() for phase in of]
    trained = {name for p in phases for group in p.groups for name in names_under(method, group.parameters)}
    return [name for name in roles.trained if name not in trained]


def tell_unreached(title: str, phases: Iterable[Phase], rounds: int) -> None:
    """Warn of phases that begin after the run's last round, such as the last stage of a method in stages."""
    for phase in phases:
        if phase.epochs and rounds and phase.first_round > rounds:
            names = [name for group in phase.groups for name in group.parameters]
            warnings.warn(
                f"{title} trains {names[0]} from round {phase.first_round} on, and the run has "
                f"{rounds}: that never happens; give more rounds (trainer.max_epochs), or stages of fewer rounds",
                stacklevel=1,
            )


def _role(method: ClientMethod, role: str) -> tuple[str, ...]:
    """Names of the parameters that an attribute's prefixes mean."""
    if isinstance(getattr(method, role), str):
        raise ConfigurationError(f"{type(method).__name__}.{role} is a string; write ({getattr(method, role)!r},)")
    for prefix in getattr(method, role):
        if not names_under(method, [prefix]):
            raise ConfigurationError(f"{type(method).__name__}: {role} names {prefix!r}, which has no parameter")
    return names_under(method, getattr(method, role))


def check_words(title: str, given: object, known: tuple[str, ...]) -> None:
    """Refuse words that mean nothing, which would be without effect.

    Args:
        title: of the attribute that holds them.
        given: them.
        known: those that there are.

    Raises:
        ConfigurationError: it is a string, no tuple, or holds another word.
    """
    if isinstance(given, str):
        raise ConfigurationError(f"{title} is a string; write ({given!r},)")
    unknown = [word for word in given if word not in known] if isinstance(given, Iterable) else [given]
    if unknown:
        raise ConfigurationError(f"{title} names {unknown[0]!r}; expected some of: {', '.join(known)}")


def _check_phase(title: str, phase: Phase) -> None:
    groups = phase.groups
    if not isinstance(groups, tuple | list) or not all(isinstance(group, Group) for group in groups):
        raise ConfigurationError(
            f"{title}: groups of a phase must be a tuple of Group, got {groups!r:.80}; write "
            "self.training_settings.phase('head'), or Phase((Group(('head',), lr=0.1),), epochs=1)"
        )
    for group in groups:
        if isinstance(group.parameters, str):
            raise ConfigurationError(f"{title}: Group.parameters is a string; write ({group.parameters!r},)")
        for name in ("lr", "momentum", "weight_decay"):
            if isinstance(value := getattr(group, name), str):
                raise ConfigurationError(f"{title}: Group.{name} is the text {value!r:.80}; expected a number")
    for settings in (phase, *phase.groups):
        check_fields(settings)
    momenta = [group.momentum for group in phase.groups]
    if phase.optimizer_state != "fresh" and (phase.optimizer != "sgd" or not any(momenta)):
        raise ConfigurationError(
            f"{title}: optimizer_state {phase.optimizer_state!r} keeps the momentum of SGD, but the optimizer is "
            f"{phase.optimizer} with momentum {momenta}; set training.momentum, or optimizer_state to fresh"
        )


def overrides(thing: ClientMethod | ServerRule, name: str) -> bool:
    """Return whether a method overrides a function of ``ClientMethod``, or a rule one of ``ServerRule``."""
    base = ClientMethod if isinstance(thing, ClientMethod) else ServerRule
    return getattr(type(thing), name) is not getattr(base, name)
