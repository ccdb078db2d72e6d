"""Mistakes in what a method's, a rule's or a part's function returns: each ends in one line that says what it is."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from federation import EACH_ROUND, build, fit
from torch import Tensor, nn

from benchmark.backbones.changes import Changes, Places, parts_of
from benchmark.backbones.parts import Tower, TowerPart
from benchmark.contract import Group, LocalTraining, Phase
from benchmark.engine.refusals.payload_checks import selected
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms
from benchmark.server import ServerRule, WrappedRule
from methods.fedvpt import FedVPT


class BringsAClass(FedVPT):
    def make_server(self) -> Any:
        return ServerRule


class BringsNothing(FedVPT):
    def make_server(self) -> Any:
        ServerRule()


class GroupsOfWords(FedVPT):
    def local_phases(self) -> Any:
        return [Phase(("prompt", "head"), 1)]  # type: ignore[arg-type]


class RateInWords(FedVPT):
    def local_phases(self) -> Any:
        return [Phase((Group(("prompt",), lr="0.1"),), 1)]  # type: ignore[arg-type]


class GroupOfAWord(FedVPT):
    def local_phases(self) -> Any:
        return [Phase((Group("prompt", lr=0.1),), 1)]  # type: ignore[arg-type]


class TrainsTwice(FedVPT):
    def local_phases(self) -> Any:
        return [Phase((Group(("prompt",), 0.1), Group(("head", "prompt"), 0.2)), 1)]


class MisspellsAnInput(FedVPT):
    inputs: Any = ("images", "feature")


class InputInAWord(FedVPT):
    inputs: Any = "images"


class FeaturesByThemselves(FedVPT):
    inputs = ("images", "features")

    def frozen_features(self, x: Tensor) -> Any:
        return x.mean((2, 3))


class FeaturesWithoutRows(FedVPT):
    inputs = ("images", "features")

    def frozen_features(self, x: Tensor) -> Any:
        return {"mean": x.mean()}


class Beside(TowerPart, nn.Module):
    projections: Any = ("proj", "fc3")


class BesideAWord(Beside):
    projections = "proj"


class BesideANorm(TowerPart, nn.Module):
    norms: Any = ("norm3",)


class HasAPart(FedVPT):
    kind: type[nn.Module] = Beside

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.part = self.kind()


class HasAWord(HasAPart):
    kind = BesideAWord


class HasANorm(HasAPart):
    kind = BesideANorm


class SelectsNothing(ServerRule):
    def select(self, number: int) -> Any:
        super().select(number)


class SelectsFractions(ServerRule):
    def select(self, number: int) -> Any:
        return [0.0, 1.0]


class ReportsNothing(ServerRule):
    def report(self, round: Round) -> Any:
        return None


class ReportsAText(ServerRule):
    def report(self, round: Round) -> Any:
        return {"mine": "much"}


class ReportsTooMuch(ServerRule):
    def report(self, round: Round) -> Any:
        return {"mine": 10**400}


MISTAKES = [
    (
        BringsAClass,
        r"BringsAClass.make_server .* must return an object .*; it returns the class ServerRule: write Serv",
    ),
    (BringsNothing, r"BringsNothing.make_server .* must return an object of ServerRule .*; it returns None"),
    (GroupsOfWords, r"GroupsOfWords: groups of a phase must be a tuple of Group, got \('prompt', 'head'\); write self"),
    (RateInWords, r"RateInWords: Group.lr is the text '0.1'; expected a number"),
    (GroupOfAWord, r"GroupOfAWord: Group.parameters is a string; write \('prompt',\)"),
    (TrainsTwice, r"TrainsTwice: two groups of a phase train 'prompt.tokens'; name it in one of them"),
    (MisspellsAnInput, r"MisspellsAnInput.inputs names 'feature'; expected some of: images, features, own_images"),
    (InputInAWord, r"InputInAWord.inputs is a string; write \('images',\)"),
    (FeaturesByThemselves, r"FeaturesByThemselves.frozen_features must return a dict of tensors; it returns Tensor"),
    (FeaturesWithoutRows, r"frozen_features gives 'mean' of shape \(\) for \d+ images; expected a row for each"),
    (HasAPart, r"Beside.projections names 'fc3'; expected some of: qkv, proj, fc1, fc2"),
    (HasAWord, r"BesideAWord.projections is a string; write \('proj',\)"),
    (HasANorm, r"BesideANorm.norms names 'norm3'; expected some of: norm1, norm2, final"),
    (SelectsNothing, r"SelectsNothing.select must return a list of clients' numbers, .*; it returns None in round 1"),
    (SelectsFractions, r"SelectsFractions.select must return a list of .*; it returns \[0.0, 1.0\] in round 1"),
    (ReportsNothing, r"ReportsNothing.report must return a dict of numbers, \{\} where .*; it returns None"),
    (ReportsAText, r"ReportsAText.report gives 'mine' = much; expected a finite number \(round 1\)"),
    (ReportsTooMuch, r"ReportsTooMuch.report gives 'mine' = 10+; expected a finite number"),
]


@pytest.mark.parametrize(("kind", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_function_must_not_return_is_named_in_one_line(kind: type, said: str) -> None:
    line = refused(kind)
    assert "\n" not in line
    assert re.search(said, line), line


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (ServerRule, "Server takes an object of ServerRule or of a class of it; it was given the class ServerRule"),
        ("Median", "Server takes an object of ServerRule or of a class of it; it was given 'Median'"),
    ],
)
def test_a_server_takes_a_rule(rule: Any, said: str) -> None:
    method, data = build("FedVPT")
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        fit(method, data, 1, [Server(rule)], settings=EACH_ROUND)


def test_a_rule_around_the_methods_own_names_a_method_without_one() -> None:
    with pytest.raises(ConfigurationError, match=r"BringsNothing\.make_server .* it returns None"):
        train(BringsNothing, [Server(WrappedRule())])


@pytest.mark.parametrize("made", [torch.tensor([1, 0]), torch.tensor([1, 0]).numpy()])
def test_a_rule_may_select_by_a_tensor(made: Any) -> None:
    class Selects(ServerRule):
        def select(self, number: int) -> Any:
            return made

    rule = Selects()
    rule.terms = cast(Terms, SimpleNamespace(training_clients=(0, 1)))
    assert selected(rule, 1) == [0, 1]


class Linear(TowerPart):
    projections = ("proj",)

    def linear(self, *_: Any) -> Any:
        return None

    def prompts(self, layer: int) -> Tensor:
        return torch.zeros(8)


def test_what_a_part_must_not_return_is_named() -> None:
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ConfigurationError, match=r"Linear\.linear must return a tensor .*; it returns NoneType"):
        Changes([Linear()], 0).linear("proj", x, x)
    with pytest.raises(ConfigurationError, match=r"Linear\.prompts must return tokens \[K, d\] .* shape \(8,\)"):
        Places([Linear()], 1).fill(0, x)
    with pytest.raises(ConfigurationError, match=r"a tower takes objects of TowerPart, or prompts .*; got 'prompt'"):
        parts_of(["prompt"], Tower("vit", 8, 2, 16))  # type: ignore[list-item]


def train(kind: type, callbacks: list[Any]) -> None:
    template, data = build("FedVPT")
    method = template
    if not issubclass(kind, ServerRule):
        method = kind(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    fit(method, data, 1, callbacks, settings=EACH_ROUND)


def refused(kind: type) -> str:
    """Return the line with which a run with a method or a rule is refused."""
    with pytest.raises(ConfigurationError) as error:
        train(kind, [Server(kind())] if issubclass(kind, ServerRule) else [])
    return str(error.value)
