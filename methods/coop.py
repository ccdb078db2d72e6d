"""CoOp: every client learns a text prompt of its own and nothing is sent."""

from dataclasses import replace
from typing import Any

from benchmark.contract import Phase
from methods.text_prompt import TextPromptMethod


class CoOp(TextPromptMethod):
    """CoOp (Zhou et al., IJCV 2022) on each client's own images, the local baseline of FedPGP.

    Objective ``CE_k(p_k)``; each client goes on from its own context in the rounds in which it is selected, so that it
    takes as many steps as in the federated methods. All classes of the training label space are in the softmax, those
    that the client does not hold too. Evaluated with the client's own context. Nothing is sent.

    With Adam, and a cosine schedule over the rounds, it is the local training of ATPFL (Zhao et al., UbiComp/ISWC'23
    Companion), where what is trained locally is not stated; ``LocalCLIP`` is the other reading.
    Further arguments as ``TextPromptMethod``.

    Args:
        local_restart: start from the initial context in every round, as FedPGP's code does; then no client ever trains
            for more than one round's epochs.
    """

    shared = ()
    personal = ("context",)
    per_example = True

    def __init__(self, *arguments: Any, local_restart: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.local_restart = local_restart

    def local_phases(self) -> list[Phase]:
        """Train the context, from where it was or from the start."""
        return [replace(phase, restart=self.local_restart) for phase in super().local_phases()]
