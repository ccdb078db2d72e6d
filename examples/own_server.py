"""A server's rule of one's own: the mean of the uploads that lie nearest to their median, against a hostile client.

Run it from anywhere: ``python examples/own_server.py``. It takes seconds and leaves no file.
"""

from fedprompt import fit
from fedprompt.benchmark.backbones.prompted_clip import PromptedCLIP
from fedprompt.benchmark.contract import LocalTraining
from fedprompt.benchmark.delivery import Delivery
from fedprompt.benchmark.federation import Round, Uploads, Values
from fedprompt.benchmark.robust import Byzantine
from fedprompt.benchmark.server import ServerRule
from fedprompt.datamodules import DigitDomains, DomainPerClient
from fedprompt.datamodules.federated import FederatedDataModule
from fedprompt.methods import PromptFL
from lightning import seed_everything


class NearTheMedian(ServerRule):
    """The mean of three quarters of the uploads, those with the smallest distance to the median of all."""

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return the new values of the shared parameters; ``uploads.values`` are [S, ...] by name, S clients."""
        moved = uploads.matrix(shared)  # how far each client has moved what it received, [S, P]
        away = (moved - moved.median(0).values).norm(dim=1)
        kept = away.argsort()[: max(1, 3 * len(away) // 4)]
        return super().aggregate(round, shared, uploads.of(sorted(kept.tolist())))


def accuracy(rule: ServerRule, delivery: Delivery | None, rounds: int) -> float:
    """Train a text prompt on digits in six styles, one style a client; return the mean accuracy over clients."""
    seed_everything(0)
    data = FederatedDataModule(DigitDomains(), DomainPerClient())
    training = LocalTraining(lr=0.0003, epochs=1, momentum=0.9)
    method = PromptFL(data.num_clients, data.class_names, PromptedCLIP(), num_context=4, training=training)
    run = fit(method, data, rounds=rounds, server=rule, delivery=delivery)
    return float(run.record.summary["server"]["test"]["accuracy"]["last"]["average"])


def main(rounds: int = 2) -> dict[str, float]:
    """Compare FedAvg's mean, where nobody is hostile, with the rule above, where one of six sends huge numbers."""
    hostile = Byzantine("huge", fraction=0.2)
    return {"mean": accuracy(ServerRule(), None, rounds), "hostile": accuracy(NearTheMedian(), hostile, rounds)}


if __name__ == "__main__":
    found = main()
    print(f"nobody hostile, mean: {found['mean']:.1%}; one hostile, near the median: {found['hostile']:.1%}")
