"""User-level privacy around a server's rule: what is clipped, noised, refused and recorded, and that runs repeat."""

import math
import re
from pathlib import Path
from typing import Any

import fedprompt
import pytest
import torch
from federation import StopAfterTwo, Witness, build, fit, learned, terms
from over_ranks import WholeStore, over_ranks

import methods
from benchmark.compression import Quantized, TopK
from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import Dropouts, InjectedFaults, Validation, VirtualClock
from benchmark.federation import Round, Uploads, Values
from benchmark.privacy import UserLevelPrivacy
from benchmark.ranks.strategy import RanksStrategy
from benchmark.robust import Byzantine
from benchmark.server import ServerRule, WrappedRule
from methods.servers import FedAvgM

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")
NO_NOISE = pytest.mark.filterwarnings("ignore:UserLevelPrivacy. noise_multiplier is 0")
#: A norm that no update reaches.
FAR = 1e9


def started(rule: UserLevelPrivacy, shared: Values, clients: int, participants: int | None = None) -> UserLevelPrivacy:
    rule.complete(ServerRule)
    rule.start(shared, terms(clients, participants))
    return rule


def uploads(shared: Values, updates: dict[int, Values], weights: list[float] | None = None) -> Uploads:
    """Uploads of clients that have moved the shared values by these updates."""
    count = len(updates)
    return Uploads(
        tuple(updates),
        {
            n: torch.stack([v + update[n] for update in updates.values()]) if count else v[None][:0]
            for n, v in shared.items()
        },
        torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        {n: v.expand(count, *v.shape) for n, v in shared.items()},
        torch.ones(count, dtype=torch.int64),
    )


def delta(
    rule: UserLevelPrivacy, shared: Values, sent: Uploads, number: int = 1, of: tuple[int, ...] = (0, 1, 2)
) -> Values:
    """Return how far a round moves the shared values."""
    made = rule.aggregate(Round(number, of, 0), shared, sent)
    return {name: made[name] - value for name, value in shared.items()}


ORIGIN = {"a": torch.zeros(2)}
HAND = {0: {"a": torch.tensor([3.0, 4.0])}, 1: {"a": torch.tensor([0.3, 0.4])}, 2: {"a": torch.tensor([0.0, -2.0])}}


@NO_NOISE
def test_updates_are_clipped_and_averaged_by_hand() -> None:
    rule = started(UserLevelPrivacy(clip=1.0, noise_multiplier=0.0), ORIGIN, 3)
    of_all = delta(rule, ORIGIN, uploads(ORIGIN, HAND, [5.0, 1.0, 9.0]))
    torch.testing.assert_close(of_all["a"], torch.tensor([0.3, 0.2 / 3]))
    without = {client: update for client, update in HAND.items() if client != 1}
    torch.testing.assert_close(delta(rule, ORIGIN, uploads(ORIGIN, without))["a"], torch.tensor([0.2, -0.2 / 3]))
    assert rule.report(Round(2, (), 0))["clipped_share"] == 1.0


@NO_NOISE
@pytest.mark.parametrize(("scope", "expected"), [("joint", (0.6, 0.8)), ("per_tensor", (0.5**0.5, 0.5**0.5))])
def test_tensors_are_clipped_together_or_each_to_its_part(scope: Any, expected: tuple[float, float]) -> None:
    shared = {"a": torch.zeros(1), "b": torch.zeros(1, 1)}
    rule = started(UserLevelPrivacy(noise_multiplier=0.0, scope=scope), shared, 1)
    moved = delta(rule, shared, uploads(shared, {0: {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}}), of=(0,))
    assert (moved["a"].item(), moved["b"].item()) == pytest.approx(expected)


@NO_NOISE
def test_a_broken_upload_counts_as_none_and_the_denominator_stays() -> None:
    rule = started(UserLevelPrivacy(noise_multiplier=0.0), ORIGIN, 3)
    for broken in (math.nan, math.inf):
        moved = delta(rule, ORIGIN, uploads(ORIGIN, HAND | {1: {"a": torch.tensor([broken, 0.0])}}))
        torch.testing.assert_close(moved["a"], torch.tensor([0.2, -0.2 / 3]))
    assert torch.equal(delta(rule, ORIGIN, uploads(ORIGIN, {}), of=())["a"], torch.zeros(2))


@NO_NOISE
def test_one_client_moves_the_result_by_at_most_its_norm() -> None:
    torch.manual_seed(0)
    rule = started(UserLevelPrivacy(clip=0.5, noise_multiplier=0.0), {"a": torch.zeros(50)}, 3)
    shared = {"a": torch.randn(50)}
    several = {client: {"a": torch.randn(50) * 10} for client in range(3)}
    before = delta(rule, shared, uploads(shared, several))["a"]
    for other in (torch.randn(50) * 100, -several[1]["a"], torch.zeros(50)):
        after = delta(rule, shared, uploads(shared, several | {1: {"a": other}}))["a"]
        assert (after - before).norm() <= 2 * 0.5 / 3 * (1 + 1e-5)
    gone = delta(rule, shared, uploads(shared, {0: several[0], 2: several[2]}))["a"]
    assert (gone - before).norm() <= 0.5 / 3 * (1 + 1e-5)


def test_noise_is_as_large_as_it_should_be_and_has_a_key() -> None:
    shared = {"a": torch.zeros(8192, dtype=torch.float64)}
    rule = started(UserLevelPrivacy(clip=2.0, noise_multiplier=1.5), shared, 10, 10)
    sent = uploads(shared, {client: {"a": torch.zeros(8192, dtype=torch.float64)} for client in range(10)})
    drawn = [delta(rule, shared, sent, number, tuple(range(10)))["a"] for number in range(1, 101)]
    assert torch.stack(drawn).std().item() == pytest.approx(1.5 * 2.0 / 10, rel=0.01)
    assert torch.stack(drawn).mean(0).std().item() == pytest.approx(1.5 * 2.0 / 10 / 10, rel=0.03)
    again = delta(rule, shared, uploads(shared, {}), 7, ())["a"]  # nobody sends: noise all the same
    assert torch.equal(again, drawn[6])


def test_noise_of_the_operating_system_has_no_key() -> None:
    rule = started(UserLevelPrivacy(noise_multiplier=1.0, noise_seed="entropy"), ORIGIN, 3)
    first, second = (delta(rule, ORIGIN, uploads(ORIGIN, HAND))["a"] for _ in range(2))
    assert not torch.equal(first, second)
    assert rule.guarantee()["simulation"] is False


def test_local_noise_is_on_each_upload_and_the_inner_rule_sees_the_clients() -> None:
    inner = Witness()
    rule = started(UserLevelPrivacy(inner, noise_multiplier=1.0, noise="local"), ORIGIN, 3)
    rule.aggregate(Round(1, (0, 1, 2), 0), ORIGIN, uploads(ORIGIN, HAND, [5.0, 1.0, 9.0]))
    seen = inner.seen[0]
    assert seen.clients == (0, 1, 2)
    assert seen.weights.tolist() == [1, 1, 1]
    assert len({tuple(row) for row in (seen.values["a"] - torch.tensor([0.6, 0.8])).tolist()}) == 3
    assert rule.guarantee()["trusted_server"] is False


@pytest.mark.filterwarnings("ignore:.*is void.*", "ignore:.*is refused.*")
@pytest.mark.parametrize(
    "delivery", [VirtualClock("drop", 1e-6), Validation(inner=InjectedFaults("nan", clients=list(range(11))))]
)
def test_what_is_sent_with_local_noise_is_spent_also_where_it_is_lost(delivery: Delivery) -> None:
    rule = UserLevelPrivacy(noise_multiplier=1.0, noise="local")
    method, data = build("FedVPT", "--data.clients_per_round=11")
    before = {name: value.clone() for name, value in method.named_parameters()}
    fit(method, data, 2, [Server(rule, delivery)], evaluate=False)
    assert rule.releases == 2
    assert rule.epsilon == rule.mechanism.epsilon(1.0, 2)
    assert method.server.facts["void"] == {1: 1.0, 2: 1.0}
    assert all(torch.equal(value, before[name]) for name, value in method.simulation.shared().items())


def test_a_round_in_which_nothing_arrives_clips_nothing() -> None:
    rule = started(UserLevelPrivacy(noise_multiplier=1.0, noise="local"), ORIGIN, 3)
    rule.aggregate(Round(1, (0, 1, 2), 0), ORIGIN, uploads(ORIGIN, HAND))
    assert rule.report(Round(1, (), 0))["clipped_share"] == pytest.approx(2 / 3)
    assert rule.aggregate(Round(2, (0, 1, 2), 0), ORIGIN, uploads(ORIGIN, {})) == {}
    assert rule.report(Round(2, (), 0))["clipped_share"] == 0


@NO_NOISE
def test_a_shared_number_is_clipped_as_a_tensor_is() -> None:
    shared = {"a": torch.tensor(1.0)}
    rule = started(UserLevelPrivacy(clip=1.0, noise_multiplier=0.0), shared, 2)
    sent = uploads(shared, {0: {"a": torch.tensor(3.0)}, 1: {"a": torch.tensor(0.5)}})
    assert delta(rule, shared, sent, of=(0, 1))["a"].item() == pytest.approx(0.75)


@pytest.mark.parametrize("delivery", [TopK(0.1), Quantized(8), Validation(inner=TopK(0.1))])
def test_noised_uploads_are_not_compressed(delivery: Delivery) -> None:
    method, data = build("FedVPT")
    rule = UserLevelPrivacy(noise_multiplier=1.0, noise="local")
    with pytest.raises(ConfigurationError, match=r"compresses updates before UserLevelPrivacy noises each of them"):
        fit(method, data, 1, [Server(rule, delivery)], evaluate=False)


def test_an_adaptive_norm_moves_towards_the_quantile() -> None:
    shared = {"a": torch.zeros(1)}
    rule = started(UserLevelPrivacy(clip=10.0, noise_multiplier=1.0, clip_quantile=0.5), shared, 200, 100)
    assert rule.std_of_bits == 5
    assert rule.z_of_updates == pytest.approx(1.005038, rel=1e-6)
    sent = uploads(shared, {client: {"a": torch.tensor([client / 100])} for client in range(100)})
    for number in range(1, 80):
        rule.aggregate(Round(number, tuple(range(100)), 0), shared, sent)
    assert float(rule.norm) == pytest.approx(0.5, rel=0.25)  # the median of 0, 0.01, ... 0.99
    small = UserLevelPrivacy(noise_multiplier=0.5, clip_quantile=0.5)
    assert started(small, shared, 10, 10)._shared_out(0.5)[0] == pytest.approx(0.577350, rel=1e-5)
    with pytest.raises(ConfigurationError, match="an adaptive norm alone costs more than noise_multiplier 1 allows"):
        started(UserLevelPrivacy(noise_multiplier=1.0, clip_quantile=0.5), shared, 10, 10)


def test_clients_are_sampled_each_by_itself() -> None:
    rule = started(UserLevelPrivacy(noise_multiplier=1.0), ORIGIN, 200, 20)
    assert rule.mechanism.sampling == "poisson"
    counts = [len(rule.select(number)) for number in range(1, 301)]
    assert sum(counts) / 300 == pytest.approx(20, abs=1)
    assert len(set(counts)) > 5
    assert rule.select(3) == rule.select(3)
    assert started(UserLevelPrivacy(noise_multiplier=1.0), ORIGIN, 20, 5).mechanism.sampling == "full"


def test_rounds_of_a_schedule_cost_what_the_client_in_the_most_of_them_pays() -> None:
    rule = started(UserLevelPrivacy(noise_multiplier=1.0, sampling="full"), ORIGIN, 6, 3)
    for number in range(1, 5):
        clients = tuple(rule.select(number))
        rule.aggregate(Round(number, clients, 0), ORIGIN, uploads(ORIGIN, {}))
    most = int(rule.participations.max())
    assert 2 <= most <= 4
    assert rule.releases == most
    assert rule.epsilon == rule.mechanism.epsilon(1.0, most)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "either noise_multiplier, or target_epsilon"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "either noise_multiplier, or target_epsilon"),
        ({"noise_multiplier": 1.0, "noise": "local", "sampling": "poisson"}, "sampling poisson hides nobody"),
        ({"noise_multiplier": 1.0, "noise": "local", "clip_quantile": 0.5}, "leave clip_quantile out"),
    ],
)
def test_settings_that_cannot_be_private_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        UserLevelPrivacy(**given)


#: Methods whose server looks at single clients' uploads, so that noise on the sum hides nobody.
BY_CLIENT = {"FOCoOp", "FedMTL", "FedSDG", "LoRAFAIR", "PFedMoAP", "PFedPG", "PromptAMP"}
#: Methods of which counts of images travel.
COUNTING = {"SGPT"}
#: Methods of which nothing travels.
ALONE = {"CoOp", "Local", "LocalCLIP", "LocalLoRA", "SingleSetVPT", "ZeroShotCLIP"}
#: Methods that make their messages themselves.
OWN_MESSAGES = {
    *("FLoRA", "FedMGP", "FederatedRidge", "HiLoRA", "NearestClassMean", "PEPFedPT", "PF2LoRAPruned", "PLAN")
}


@pytest.mark.parametrize("conf", sorted(methods.__all__))
def test_every_method_is_accepted_or_refused_with_the_reason(conf: str) -> None:
    method, _ = build(conf)
    said = {}
    for noise in ("central", "local"):
        rule = UserLevelPrivacy(noise_multiplier=1.0, noise=noise)  # type: ignore[arg-type]
        rule.complete(method.make_server)
        said[noise] = rule.accept(method)
    if not (method.shared or method.uploads or method.sends_of_its_own):
        assert conf in ALONE
        assert said["central"] == said["local"] == "nothing leaves its clients, so that there is nothing to protect"
    elif conf in OWN_MESSAGES:
        assert said["central"] == said["local"] == f"{conf}.message sends what is no update, so that no norm bounds it"
    elif conf in COUNTING:
        assert "counts of their images" in str(said["central"])
        assert "counts of their images" in str(said["local"])
    elif conf in BY_CLIENT:
        assert "looks at single clients' uploads" in str(said["central"])
        assert said["local"] is None
    else:
        assert said == {"central": None, "local": None}


@pytest.mark.parametrize(
    ("kind", "confs"),
    [("tensors that the server uses", BY_CLIENT), ("a message of", OWN_MESSAGES), ("nothing", ALONE | {"HeadTune"})],
)
def test_the_page_names_the_methods_of_each_kind(kind: str, confs: set[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/privacy.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {kind}"))
    assert {word for word in re.findall(r"\w+", row) if word in methods.__all__} == confs


class WhateverElse(Delivery):
    """Says nothing of what it does."""


class Curious(WrappedRule):
    """Looks at what the rule inside hides."""


@pytest.mark.parametrize(
    ("rule", "delivery", "said"),
    [
        (Curious(UserLevelPrivacy(noise_multiplier=1.0)), None, "Curious stands around UserLevelPrivacy and sees"),
        *(
            (UserLevelPrivacy(noise_multiplier=1.0), coupled, f"what {type(coupled).__name__} makes of an upload may")
            for coupled in (
                VirtualClock("buffer", 1.0),
                Validation(min_valid=2),
                Validation(max_ratio=3.0),
                Byzantine("zero"),
                WhateverElse(),
            )
        ),
    ],
)
def test_nothing_looks_around_the_noise(rule: ServerRule, delivery: Any, said: str) -> None:
    method, data = build("FedVPT")
    with pytest.raises(ConfigurationError, match=said):
        fit(method, data, 1, [Server(rule, delivery)], evaluate=False)
    alone = Dropouts(0.1, inner=Validation(max_norm=3.0, inner=VirtualClock("drop", 1.0)))
    fit(method, data, 1, [Server(WrappedRule(UserLevelPrivacy(noise_multiplier=1.0)), alone)], evaluate=False)


def run(conf: str, rule: ServerRule | None, rounds: int = 2, *overrides: str, **given: Any) -> Any:
    method, data = build(conf, *overrides)
    fit(method, data, rounds, [Server(method.make_server() if rule is None else rule)], evaluate=False, **given)
    return method


class Equal(ServerRule):
    """FedAvg's server with equal weights."""

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        return {name: uploads.values[name].mean(0) for name in shared}


@NO_NOISE
@pytest.mark.parametrize("conf", ["FedAvg", "PFedPT"])
def test_without_noise_and_norm_it_is_the_plain_mean(conf: str) -> None:
    everybody = ("--data.partition=federation.Few", "--data.clients_per_round=6")
    plain = learned(run(conf, Equal(), 2, *everybody))
    private = learned(run(conf, UserLevelPrivacy(clip=FAR, noise_multiplier=0.0), 2, *everybody))
    for name, value in plain.items():
        if not name.startswith("server."):
            torch.testing.assert_close(private[name], value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_what_is_personal_is_as_without_it_in_the_first_round() -> None:
    plain = learned(run("FedPer", None, 1))
    private = learned(run("FedPer", UserLevelPrivacy(noise_multiplier=1.0, sampling="full"), 1))
    personal = [name for name in plain if name.startswith("store.head")]
    assert personal
    assert all(torch.equal(plain[name], private[name]) for name in personal)
    shared = [name for name in plain if name in dict(build("FedPer")[0].named_parameters())]
    assert not all(torch.equal(plain[name], private[name]) for name in shared)


#: Six small clients, of which five train in a round.
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=5")


@pytest.mark.parametrize(
    ("conf", "given"),
    [
        ("FedVPT", {"sampling": "poisson", "clip_quantile": 0.5, "noise_multiplier": 0.4}),
        ("PFedPG", {"noise": "local", "noise_multiplier": 0.1}),
        ("PromptAMP", {"noise": "local", "noise_multiplier": 0.1}),
        ("FedAvg", {"target_epsilon": 8.0, "inner": "FedAvgM"}),
    ],
)
def test_a_resume_and_the_width_change_no_bit(conf: str, given: dict[str, Any], tmp_path: Path) -> None:
    def rule() -> UserLevelPrivacy:
        inner = FedAvgM() if given.get("inner") else None
        return UserLevelPrivacy(**given | {"inner": inner})

    whole = learned(run(conf, rule(), 3, *FEW, "--data.clients_at_once=1"))
    stopped, data = build(conf, *FEW, "--data.clients_at_once=1")
    fit(stopped, data, 3, [Server(rule()), StopAfterTwo()], save_to=tmp_path, evaluate=False)
    assert stopped.server.finished_rounds == 2
    resumed = run(
        conf, rule(), 3, *FEW, "--data.clients_at_once=1", ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt")
    )
    for name, value in learned(resumed).items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(whole[name])), name
    wide = run(conf, rule(), 3, *FEW, "--data.clients_at_once=3")
    for name, value in learned(wide).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_noise_without_a_key_is_refused_over_ranks_before_training() -> None:
    def work(strategy: RanksStrategy) -> None:
        method, data = build("FedVPT")
        rule = UserLevelPrivacy(noise_multiplier=1.0, noise_seed="entropy", sampling="full")
        fit(method, data, 1, [Server(rule)], settings={"devices": 2, "strategy": strategy}, evaluate=False)

    for error in over_ranks(2, work):
        assert isinstance(error, ConfigurationError)
        assert str(error).startswith(
            "UserLevelPrivacy: noise_seed entropy gives each of 2 processes another noise; set"
        )


@pytest.mark.parametrize(
    ("other", "options", "said"),
    [
        ({"sampling": "poisson"}, (), "sampling full, this run has poisson"),
        ({}, ("--data.clients_per_round=1",), "participants 4, this run has 1"),
        ({"clip": 9.0}, (), "clip 1, this run has 9"),
        ({"noise": "local"}, (), "noise central, this run has local"),
        ({"clip_quantile": 0.5, "noise_multiplier": 0.1}, (), "its rounds had noise_multiplier 1, this run has 0.1"),
        ({"scope": "per_tensor"}, (), "scope joint, this run has per_tensor"),
        ({"relation": "replace_one"}, (), "relation add_or_remove, this run has replace_one"),
    ],
)
def test_a_resume_accounts_for_all_rounds_alike(
    other: dict[str, Any], options: tuple[str, ...], said: str, two_rounds: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        going_on(two_rounds, other, *options)


def test_a_resume_may_have_another_delta(two_rounds: str) -> None:
    (releases, epsilon), (of_other, lower) = going_on(two_rounds, {}), going_on(two_rounds, {"delta": 1e-3})
    assert releases == of_other
    assert lower < epsilon


def test_states_of_older_versions_hold_the_norm_alone() -> None:
    state = started(UserLevelPrivacy(noise_multiplier=1.0), ORIGIN, 3).state_dict()
    del state["_extra_state"]["settings"]
    started(UserLevelPrivacy(noise_multiplier=1.0, noise="local"), ORIGIN, 3).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="had clip 1, this run has 9: all rounds are accounted for together"):
        started(UserLevelPrivacy(clip=9.0, noise_multiplier=1.0), ORIGIN, 3).load_state_dict(state)


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoint of two rounds of a schedule."""
    at = tmp_path_factory.mktemp("two rounds")
    method, data = build("FedVPT", "--data.clients_per_round=4")
    rule = UserLevelPrivacy(noise_multiplier=1.0, sampling="full")
    fit(method, data, 3, [Server(rule), StopAfterTwo()], save_to=at, evaluate=False)
    assert method.server.finished_rounds == 2
    return str(at / "checkpoints" / "last.ckpt")


def going_on(path: str, given: dict[str, Any], *options: str) -> tuple[int, float]:
    """Go on to a third round; return releases and epsilon."""
    method, data = build("FedVPT", "--data.clients_per_round=4", *options)
    sampling = {} if given.get("noise") else {"sampling": "full"}
    rule = UserLevelPrivacy(**{"noise_multiplier": 1.0, **sampling, **given})
    fit(method, data, 3, [Server(rule)], path, evaluate=False)
    return rule.releases, rule.epsilon


def test_the_number_of_ranks_changes_no_bit() -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        store = WholeStore()
        method, data = build("FedVPT", "--data.clients_at_once=1")
        rule = UserLevelPrivacy(noise_multiplier=0.1, sampling="poisson")
        settings = {"devices": count, "strategy": strategy}
        fit(method, data, 2, [Server(rule), store], settings=settings, evaluate=False)
        return learned(method) | store.rows

    results = {1: work(RanksStrategy(), count=1), 2: over_ranks(2, work)[0]}
    for name, value in results[1].items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(results[2][name])), name


def test_the_record_says_what_is_promised_and_what_not() -> None:
    method, data = build("FedVPT")
    rule = UserLevelPrivacy(noise_multiplier=2.0, sampling="full", delta=1e-3)
    run = fedprompt.fit(method, data, rounds=3, server=rule, accelerator="cpu", enable_progress_bar=False)
    record = run.record
    assert record.server == "benchmark.privacy.user_level.UserLevelPrivacy(benchmark.server.ServerRule)"
    assert record.privacy is not None
    assert record.privacy["epsilon"] == rule.mechanism.epsilon(2.0, rule.releases)
    assert record.privacy["releases"] == int(rule.participations.max())
    assert record.facts is not None
    assert [*record.facts["epsilon"]] == ["1", "2", "3"]
    costs = [*record.facts["epsilon"].values()]
    assert costs == sorted(costs)
    assert costs[-1] == record.privacy["epsilon"]
    assert any("personal tensors" in said for said in record.privacy["not_covered"])
    assert any("knows the seed" in said for said in record.privacy["not_covered"])


def test_a_target_is_met_by_the_planned_rounds_and_no_more_are_made(tmp_path: Path) -> None:
    rule = UserLevelPrivacy(target_epsilon=8.0, sampling="full", delta=1e-3)
    method = run("FedAvg", rule, 2, save_to=tmp_path / "kept")
    assert 0.99 * 8 < rule.mechanism.epsilon(rule.z, rule._releases(2)) <= 8
    assert rule.epsilon <= 8
    more, data = build("FedAvg")
    other = UserLevelPrivacy(target_epsilon=8.0, sampling="full", delta=1e-3)
    path = str(tmp_path / "kept" / "checkpoints" / "last.ckpt")
    with pytest.raises(ConfigurationError, match="goes on with the number of rounds that it was made for"):
        fit(more, data, 5, [Server(other)], path, evaluate=False)
    assert method.server.finished_rounds == 2


def test_no_noise_is_told(recwarn: pytest.WarningsRecorder) -> None:
    started(UserLevelPrivacy(noise_multiplier=0.0), ORIGIN, 3)
    assert any("nothing is private" in str(warning.message) for warning in recwarn)
    rule = started(UserLevelPrivacy(noise_multiplier=0.0), ORIGIN, 3)
    assert "epsilon" not in rule.report(Round(1, (), 0))
    assert rule.guarantee()["epsilon"] is None
