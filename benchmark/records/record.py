"""The form of ``record.json``: which fields a finished run's record has, and of what kind and range each is."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import CoreSchema
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from benchmark.metrics import HUGE, LONGEST_NAME, STATISTICS, know_metric

POINTS = ("server", "local")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, le=HUGE, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-HUGE, le=HUGE, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class _Form:
    """Says how a field is checked, where its Python type says less; asked when the first record is read."""

    kind: Callable[[], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema: CoreSchema = handler.generate_schema(self.kind())
        return schema


class Git(TypedDict, total=False):
    """Revision of the package's checkout, and whether it had changes."""

    revision: str | None
    dirty: bool | None


class Hardware(TypedDict, total=False):
    """Of the machine that ran; the threads are missing in older records."""

    cpu: str
    cores: Count | None
    threads: Count | None
    gpus: list[str]


@with_config(ConfigDict(extra="allow"))
class Environment(TypedDict, total=False):
    """The place and time of a run; the date is missing in older records."""

    git: Git
    python: str
    versions: dict[str, str]
    platform: str
    hardware: Hardware
    date: str


def _summaries() -> Any:
    """Return the form of the summary: by point, split and metric the statistics of a run's rounds."""
    fields: dict[str, Any] = {"pooled_round": Count, "round": Count, "rounds": Count}
    for name in STATISTICS:
        fields[name] = Finite | None
    # In the order in which the file has them: a table's CSV follows it.
    statistics: Any = TypedDict("_Statistics", dict(sorted(fields.items())), total=False)  # type: ignore[misc]
    with_config(ConfigDict(extra="forbid"))(statistics)
    named: dict[str, Any] = {"clients": Count, "last": statistics, "last10": statistics}
    named |= {"best_on_test": NotRequired[statistics], "round0": NotRequired[statistics]}
    summary: Any = TypedDict("_Summary", dict(sorted(named.items())))  # type: ignore[misc]
    with_config(ConfigDict(extra="forbid"))(summary)
    by_split = dict[Name, Annotated[dict[str, summary], Field(min_length=1)]]  # what splits there are, data say
    by_point = dict[Literal[POINTS], Annotated[by_split, Field(min_length=1)]]  # type: ignore[valid-type]
    return Annotated[by_point, Field(min_length=1)]


@with_config(ConfigDict(extra="forbid"))
class _Communication(TypedDict):
    up_bytes: Amount
    down_bytes: Amount
    up_floats: Amount
    down_floats: Amount
    end_bytes: NotRequired[Amount]
    end_floats: NotRequired[Amount]


@with_config(ConfigDict(extra="forbid"))
class _Seconds(TypedDict):
    total: Amount
    training: Amount
    evaluation: Amount


@with_config(ConfigDict(extra="forbid"))
class Tuning(TypedDict):
    """The choice of a run's values, by `benchmark tune` for example.

    Attributes:
        trials: runs among which they were chosen.
        chosen_on: the split whose scores chose.
        study: hash of what was tuned and of its search space.
    """

    trials: Annotated[int, Field(ge=1)]
    chosen_on: Name
    study: Name


@with_config(ConfigDict(extra="forbid"))
class _OwnMetric(TypedDict):
    class_path: Name
    lower_is_better: bool


@with_config(ConfigDict(extra="forbid"))
class Privacy(TypedDict):
    """The privacy that a run guarantees, and its limits.

    Attributes:
        unit: what neighbouring federations differ in: one ``user`` with all data, or one ``record`` of a user.
        trusted_server: whether the server may see updates without noise.
        relation: of neighbours: it is there or not, or is another one.
        sampling: who takes part: ``full`` (a public schedule), ``poisson`` or ``fixed``; of records, which images of a
            client a step has: ``poisson``, or by ``epochs``.
        clients: N.
        participants: m of a round, on average; of records, clients that have trained.
        probability: q of Poisson sampling; of records, the largest of any client.
        releases: how many were composed; of records, most steps of any client.
        noise_multiplier: z, standard deviation of the noise over the clipping norm.
        clip: the norm, before the first round.
        delta: of (epsilon, delta).
        epsilon: what the releases have cost; None where nothing bounds it; of records, the largest of any client.
        target_epsilon: for which z was made.
        accountant: what has accounted.
        dp_accounting: version of the library.
        covered: what the guarantee is about.
        not_covered: what it is not about.
        simulation: whether noise has a key, so that who knows the seed can take it away.
        epsilons: of records, that of each client; None of one that never trains.
    """

    unit: Literal["user", "record"]
    trusted_server: bool
    relation: Literal["add_or_remove", "replace_one"]
    sampling: Literal["full", "poisson", "fixed", "epochs"]
    clients: Count
    participants: Count
    probability: Amount | None
    releases: Count
    noise_multiplier: Amount
    clip: Amount
    delta: Amount
    epsilon: Amount | None
    target_epsilon: Amount | None
    accountant: Name
    dp_accounting: Name
    covered: list[Name]
    not_covered: list[Name]
    simulation: bool
    epsilons: NotRequired[list[Amount | None]]


@with_config(ConfigDict(extra="forbid"))
class SecureAggregation(TypedDict):
    """Say how finely uploads were summed that the server did not see by themselves.

    Attributes:
        largest_change: c, the furthest that a number may have moved in a round.
        levels: L, into which -c to c is divided; a change is rounded, at random, to one of its two neighbours.
    """

    largest_change: Amount
    levels: Count


@with_config(ConfigDict(extra="forbid"))
class Deployed(TypedDict):
    """Facts of a run between real machines that a simulation does not have.

    Attributes:
        down_bytes: of all tensors sent to clients, with their names, those of evaluations too.
        up_bytes: of all uploads that were taken, likewise.
        refused: lines about clients whose messages were refused.
        secure_aggregation: a :class:`SecureAggregation`; not there where the server saw each upload.
    """

    down_bytes: Count
    up_bytes: Count
    refused: list[str]
    secure_aggregation: NotRequired[SecureAggregation]


class _File(TypedDict):
    sha256: str
    bytes: Count


_Files = TypedDict(
    "_Files",
    {
        "config.yaml": _File,
        "manifest.json": _File,
        "metrics.parquet": _File,
        "predictions.parquet": NotRequired[_File],
        "classes.parquet": NotRequired[_File],
        "subgroups.parquet": NotRequired[_File],
    },
)
with_config(ConfigDict(extra="forbid"))(_Files)


@dataclass(frozen=True)
class RunRecord:
    """One finished run.

    Attributes:
        method: name of the method's class.
        dataset: name of the data set.
        setting: what the clients are, such as ``"one domain per client"``.
        seed: the run's seed.
        client_names: one per client, in the order of the client index of ``metrics.parquet``.
        test_sizes: test images per client, same order.
        manifest_hash: hash of the partition, as the partition's manifest defines it.
        device: ``"cpu"`` or the name of the accelerator that trained.
        environment: from :func:`benchmark.records.environment.environment`.
        rounds: rounds asked for.
        rounds_trained: rounds done.
        communication: ``up_bytes``, ``down_bytes``, ``up_floats``, ``down_floats``: mean over rounds and
            participating clients; ``end_bytes`` and ``end_floats`` of them at the end of a round, where there are any.
        seconds: ``total``, ``training``, ``evaluation``: wall-clock.
        peak_memory_bytes: of the accelerator, or of the process on a CPU; None where unknown.
        config_hash: from :func:`benchmark.records.hashes.config_hash`, of ``config.yaml``; this and the next two are
            filled by :func:`benchmark.records.record_file.write_record`.
        summary: from :func:`benchmark.records.summary.summarize`.
        files: per file of :data:`benchmark.records.record_file.FILES`, and of those of
            :data:`benchmark.records.record_file.OPTIONAL_FILES` that the run has, its ``sha256`` and ``bytes``.
        server: dotted path of the class of the server, with those of the rules that it wraps in brackets; this and what
            follows is None in older records.
        default_server: dotted path of the server that the method brings itself.
        code: from :func:`benchmark.records.source_code.code_of`: the source of what the configuration names.
        images_sha256: hash of the images, as the partition's manifest has it.
        tuning: a :class:`Tuning`; None where no search chose the run's values.
        corrected: what was corrected in the record, and why, long after the run; None where nothing was.
        delivery: names of the classes that lay between clients and server; None where everything arrived.
        facts: per name that the server's rule or the delivery reported as one number of the federation, its value by
            round; ``void`` is 1 in rounds from which nothing was made.
        privacy: a :class:`Privacy`; None where nothing is promised.
        own_metrics: per name of a metric of the user's own its ``class_path`` and whether lower is better; not in the
            file where there are none.
        deployed: a :class:`Deployed` of a run between real machines; not in the file of a simulation.
        trained: per client whether it has trained in a round and kept what came of it; None of one that never can, as
            a tester. None as a whole, and not in the file, where it is not known: older records, deployed runs.
    """

    method: Name
    dataset: Name
    setting: str
    seed: Count
    client_names: tuple[str, ...]
    test_sizes: tuple[Count, ...]
    manifest_hash: str
    device: str
    environment: Environment
    rounds: Count
    rounds_trained: Count
    communication: Annotated[dict[str, float], _Form(lambda: _Communication)]
    seconds: Annotated[dict[str, float], _Form(lambda: _Seconds)]
    peak_memory_bytes: Count | None
    config_hash: str = ""
    summary: Annotated[dict[str, Any], _Form(_summaries)] = field(default_factory=dict)
    files: Annotated[dict[str, Any], _Form(lambda: _Files)] = field(default_factory=dict)
    server: str | None = None
    default_server: str | None = None
    code: dict[str, str] | None = None
    images_sha256: str | None = None
    tuning: Annotated[dict[str, Any] | None, _Form(lambda: Tuning | None)] = None
    corrected: str | None = None
    delivery: str | None = None
    facts: dict[str, dict[str, float]] | None = None
    privacy: Annotated[dict[str, Any] | None, _Form(lambda: Privacy | None)] = None
    own_metrics: Annotated[
        dict[str, dict[str, Any]] | None,
        _Form(lambda: dict[Annotated[str, Field(pattern="^[a-z0-9_]+$", max_length=LONGEST_NAME)], _OwnMetric] | None),
    ] = None
    deployed: Annotated[dict[str, Any] | None, _Form(lambda: Deployed | None)] = None
    trained: tuple[bool | None, ...] | None = None

    @property
    def other_server(self) -> str | None:
        """Dotted path of the server as ``server`` has it, where it is not the one that the method brings itself."""
        return self.server if self.server != self.default_server else None


@dataclass(frozen=True)
class _Payload(RunRecord):
    """The contents of ``record.json``, but for its own hash."""

    schema: Literal[1] = 1


@functools.cache
def _reader(statistics: tuple[str, ...]) -> TypeAdapter[_Payload]:
    """Return what reads records whose summaries have these statistics."""
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(_Payload))


def parse_record(content: bytes) -> RunRecord:
    """A record from JSON, every field checked; metrics of the user's own are known by name from then on.

    Raises:
        ValueError: a field is missing, unknown, of the wrong type or out of range; one line that names it.
        ConfigurationError: a metric of the user's own has the name of another one.
    """
    try:
        record = _reader(tuple(STATISTICS)).validate_json(content, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        wrong = {".".join(map(str, entry["loc"])): entry["msg"] for entry in found}
        first = "; ".join(f"{name} ({said})" for name, said in sorted(wrong.items())[:3])
        raise ValueError(f"missing, unknown or of the wrong type: {first}") from error
    if not record.summary or not record.files:
        raise ValueError("missing, unknown or of the wrong type: summary, files")
    if len(record.client_names) != len(record.test_sizes):
        names, sizes = len(record.client_names), len(record.test_sizes)
        raise ValueError(f"test_sizes ({sizes} of them) and client_names ({names}) do not fit each other")
    if record.trained is not None and len(record.trained) != len(record.client_names):
        names, known = len(record.client_names), len(record.trained)
        raise ValueError(f"trained ({known} of them) and client_names ({names}) do not fit each other")
    for name, facts in (record.own_metrics or {}).items():
        know_metric(name, facts["lower_is_better"])
    return RunRecord(**{name: getattr(record, name) for name in RunRecord.__dataclass_fields__})
