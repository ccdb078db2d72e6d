"""FedRep: first the client's own head, then the shared body."""

from dataclasses import replace
from typing import Any

from benchmark.contract import LocalTraining, Phase
from benchmark.errors import ConfigurationError
from methods.classifier import new_client_training
from methods.fedavg import FedAvg


class FedRep(FedAvg):
    """FedRep (Collins et al., ICML 2021).

    A round has two phases: the body rests while the head is trained, then the head rests while the body is trained. The
    server averages the body weighted with n_k. Evaluated with the global body and the client's own head, which a client
    that never trains fits first. A prompt on the pixels is trained in the first phase, together with the head and at
    its own rate.

    Readings: pFedPT gives the head's rate, 0.01; its code trains both for 5 epochs. With a prompt that code leaves the
    head out of both phases, which is taken for a slip. FedRep's own last round, in which every client refits its head,
    is left out, since neither pFedPT nor pFedPG mentions it. Further arguments as ``FedAvg``, with ``training`` of the
    body.

    Args:
        head_training: of the head, first; a prompt on the pixels shares its phase and so its epochs.

    Raises:
        ConfigurationError: prompt and head differ in more than lr, momentum and weight decay.
    """

    shared = ("backbone",)
    personal = ("head",)
    per_example = True

    def __init__(self, *arguments: Any, head_training: LocalTraining = LocalTraining(lr=0.01), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.head_training = head_training
        if self.visual_prompt is None:
            return
        of_prompt = self.visual_prompt.training_settings
        if replace(of_prompt.phase(), groups=()) != head_training.phase_of():
            raise ConfigurationError(
                f"FedRep trains prompt and head in one phase, got {of_prompt} for the prompt and {head_training} for "
                "the head; they may differ in lr, momentum and weight_decay alone"
            )

    def local_phases(self) -> list[Phase]:
        """Train the head, with the prompt if there is one; then the body."""
        own = [self.head_training.group("head")]
        if self.visual_prompt is not None:
            own = [self.visual_prompt.training_settings.group("visual_prompt"), *own]
        return [self.head_training.phase_of(*own), self.training_settings.phase("backbone")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains."""
        return [new_client_training(self.head_training).phase("head")] if new else []
