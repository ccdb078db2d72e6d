"""The form of a checkpoint: of what kind and in which range each part is, and which parts must agree."""

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

import torch
from packaging.version import InvalidVersion, Version
from pydantic import ConfigDict, Field, InstanceOf, Json, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from benchmark.contract import Phase
from benchmark.errors import ConfigurationError
from benchmark.records.record import POINTS, Amount, Count, Name
from benchmark.server import ServerRule

#: Versions of Lightning before this one wrote no checkpoint of this form.
FIRST_LIGHTNING = Version("2.0")

Tensor = InstanceOf[torch.Tensor]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")]


class _Seconds(TypedDict):
    total: Amount
    training: Amount
    evaluation: Amount


_Key = tuple[Count, Literal[POINTS], Name, Name]  # type: ignore[valid-type]


class _Recorder(TypedDict):
    reports: dict[Name, Tensor]
    seconds: _Seconds
    config: str
    code: dict[str, str]
    evaluations: NotRequired[Count]
    sha256: NotRequired[Hash]
    keys: NotRequired[str]
    values: NotRequired[Tensor]
    pooled: NotRequired[Json[list[tuple[_Key, float]]]]


class _Traffic(TypedDict):
    rounds: list[Annotated[list[Count], Field(min_length=5, max_length=5)]]
    ends: NotRequired[dict[Count, Annotated[list[Count], Field(min_length=2, max_length=2)]]]  # not in older ones


class _Server(TypedDict):
    finished_rounds: Count
    inside_round: bool
    traffic: _Traffic
    dropped: dict[Count, Count]
    rule: dict[str, Any]
    delivery: NotRequired[dict[str, Any]]  # this and the next two are not in older ones
    facts: NotRequired[dict[Name, dict[Count, float]]]
    trained: NotRequired[list[Count] | None]


class _Data(TypedDict):
    manifest: Hash
    images: NotRequired[str | None]
    width: Annotated[int, Field(ge=1)] | None
    seed: Count


@with_config(ConfigDict(extra="allow"))
class _Callbacks(TypedDict):
    Recorder: _Recorder
    server: _Server


class _Optimizer(TypedDict):
    state: dict[Any, Any]
    param_groups: list[dict[str, Any]]


@with_config(ConfigDict(extra="allow"))
class _Checkpoint(TypedDict):
    epoch: Count
    global_step: Count
    callbacks: _Callbacks
    FederatedDataModule: _Data
    optimizer_states: list[_Optimizer]


@functools.cache
def _forms() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    return TypeAdapter(_Checkpoint), TypeAdapter(list[_Key])


def check_form(content: dict[str, Any], size: int) -> None:
    """Refuse values of other kinds or ranges than a run keeps.

    Args:
        content: of the checkpoint.
        size: bytes of its file.

    Raises:
        ValueError: the first that is wrong, in one line.
    """
    for name, tensor in _tensors(content, ""):
        dense = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
        if not dense or tensor.numel() * tensor.element_size() > size:
            raise ValueError(f"{name} is no plain tensor whose numbers are in the file")
    whole, keys = _forms()
    try:
        whole.validate_python(content, strict=True)
        recorder = content["callbacks"]["Recorder"]
        if "keys" in recorder:
            named = keys.validate_json(recorder["keys"], strict=True)
            if "values" not in recorder or recorder["values"].shape[:1] != (len(named),):
                raise ValueError("callbacks.Recorder.values do not fit its keys")
        elif not {"evaluations", "sha256"} <= recorder.keys():
            raise ValueError("callbacks.Recorder names no evaluations")
        version = Version(content["pytorch-lightning_version"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'callbacks.Recorder.keys'}: {first['msg']}") from error
    except InvalidVersion as error:
        raise ValueError(f"pytorch-lightning_version: {error}") from error
    if version < FIRST_LIGHTNING:
        raise ValueError(f"pytorch-lightning_version: {version} is before {FIRST_LIGHTNING}")


def disagreement(content: dict[str, Any]) -> str | None:
    """Say what of the parts of a checkpoint, saved at the end of a round, does not agree; None if all does.

    Args:
        content: as :func:`check_form` lets it pass.

    Raises:
        KeyError, TypeError: the state of the Trainer's loops has another form.
    """
    server, recorder = content["callbacks"]["server"], content["callbacks"]["Recorder"]
    rounds, fit = server["finished_rounds"], content["loops"]["fit_loop"]
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    by_hand = fit["epoch_loop.manual_optimization.optim_step_progress"]["total"]
    by_itself = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    epoch, batch = epochs["current"], batches["current"]
    before = [batches["total"][name] - number for name, number in batch.items()]
    counts = [number for _, number in _numbers(content["loops"], "loops")]
    agreeing = {
        "epoch": content["epoch"] == epoch["completed"],
        "global_step": content["global_step"] == by_hand["completed"] + by_itself["completed"],
        "loops.fit_loop.epoch_progress": (
            epoch["ready"] == epoch["started"] == epoch["processed"] == rounds
            and rounds - 1 <= epoch["completed"] <= rounds
        ),
        "loops.fit_loop.epoch_loop.batch_progress": len({*batch.values()}) == len({*before}) == 1 and before[0] >= 0,
        "loops": min(counts) >= 0,
        "callbacks.Recorder.evaluations": recorder.get("evaluations", 0) <= rounds + 1,
        "callbacks.server.dropped": max(server["dropped"].values(), default=0) <= rounds,
    }
    return next((name for name, agrees in agreeing.items() if not agrees), None)


def check_counts(content: dict[str, Any], clients: int, clients_at_once: Any, phases: Sequence[Phase]) -> None:
    """Refuse a checkpoint of other clients or optimizers than the run has, or of a width that it cannot have had.

    Args:
        content: as :func:`check_form` lets it pass.
        clients: of the run.
        clients_at_once: as the checkpoint's configuration has it.
        phases: of local training.

    Raises:
        ConfigurationError: as it says.
    """
    width = content["FederatedDataModule"]["width"]
    recorder, server = content["callbacks"]["Recorder"], content["callbacks"]["server"]
    agreeing = {
        "width": width is None or (width == clients_at_once if isinstance(clients_at_once, int) else width <= clients),
        "dropped": max(server["dropped"], default=0) < clients,
        "trained": max(server.get("trained") or (), default=0) < clients,
        "optimizer_states": [
            ["momentum" in group for group in each["param_groups"]] for each in content["optimizer_states"]
        ]
        == [[phase.optimizer == "sgd"] * len(phase.groups) for phase in phases],
        "reports": all(tuple(values.shape) == (clients,) for values in recorder["reports"].values()),
    }
    if wrong := next((name for name, agrees in agreeing.items() if not agrees), None):
        raise ConfigurationError(
            f"the checkpoint can't be continued: its {wrong} cannot be of this run's {clients} clients; take an "
            "unchanged copy, or start without --ckpt_path"
        )


def check_longer(before: int, now: int, phases: Sequence[Phase], rule: ServerRule) -> None:
    """Refuse another number of rounds where what was made of the first ones depends on it.

    Args:
        before: the rounds that the checkpoint's run was to have.
        now: those of the run that goes on.
        phases: of local training.
        rule: the server's.

    Raises:
        ConfigurationError: a learning rate, or the server, follows the number of rounds.
    """
    following = [f"learning rate follows a {each.schedule} over" for each in phases if each.schedule != "constant"]
    following += [
        f"server {type(each).__name__} weighs each by its place in" for each in rule.rules if each.follows_rounds
    ]
    if following:
        raise ConfigurationError(
            f"the checkpoint is of a run of {before} rounds, whose {following[0]} all of them: give "
            f"trainer.max_epochs={before}, or start a run of {now} without --ckpt_path"
        )


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in plain values, by its dotted name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, entry in entries:
        yield from _tensors(entry, f"{name}.{key}".lstrip("."))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Every number in the loops' state.

    Raises:
        TypeError: something else is there.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(entry, f"{name}.{key}")
    elif isinstance(value, int):
        yield name, int(value)
    elif value is not None:
        raise TypeError(name)
