"""pFedPG: a generator on the server makes every client's prompts."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from benchmark.contract import Phase
from benchmark.ranges import Few, NonNegativeFloat
from benchmark.server import ServerRule
from methods.fedvpt import FedVPT
from methods.generator_rule import NEW_CLIENT_STEPS, GeneratorRule


class PFedPG(FedVPT):
    """pFedPG (Yang, Wang, Wang, "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
    Generation", ICCV 2023).

    Down go the generated prompts P_n, up come the adapted ones P~_n (the same count as Delta_n = P~_n - P_n); the
    generator and the descriptors stay on the server, the heads with the clients. The client's objective and training
    are FedVPT's. The paper's result is the adapted prompt with the client's head (point ``local``); point ``server`` is
    the generated one.

    A client that never trains receives the prompts of its initial descriptor. Five times it trains them with its head,
    and the server takes a step on a copy of its descriptor and sends the prompts of that; then it fits its head.

    Deviations and readings:
    * Eq. 5 as printed moves P_n away from P~_n, since Delta_n is a descent direction and not a gradient; the default is
      ``toward``, as pFedHN's code does, and ``as_printed`` is the ablation.
    * Algorithm 1 shows one mini-batch, section 4.1.3 five epochs: five epochs.
    * Eq. 5 is per client: contributions are summed (``sum``); ``mean`` divides by the number of clients.
    * Descriptors of clients that are not in a round rest, with Adam too.

    Further arguments as ``FedVPT``.

    Args:
        num_prompts: K, at least 1.
        generator: ``cross_attention`` is the paper's; ``mlp`` and ``adain`` are the ablations of its Table 4.
        server_lr: alpha, learning rate of the generator; the paper's 0.001 hardly moves it with plain SGD.
        server_optimizer: of the generator.
        server_sign: see above.
        server_reduction: see above.
        descriptor_tokens: rows of a client's descriptor d_n, 1 or K.
        wo_init: start of W_O.
        broadcast_base: send every client P_base instead of P_n (the ``P_base`` ablation of Table 4).

    Raises:
        ConfigurationError: ``descriptor_tokens`` is neither 1 nor K, or ``broadcast_base`` with ``mlp``, which has no
            base.
    """

    paper_point = "local"

    def __init__(
        self,
        *arguments: Any,
        num_prompts: Few = 10,
        generator: Literal["cross_attention", "mlp", "adain"] = "cross_attention",
        server_lr: NonNegativeFloat = 0.001,
        server_optimizer: Literal["sgd", "adam"] = "sgd",
        server_sign: Literal["toward", "as_printed"] = "toward",
        server_reduction: Literal["sum", "mean"] = "sum",
        descriptor_tokens: Few = 1,
        wo_init: Literal["xavier", "zero"] = "xavier",
        broadcast_base: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_prompts=num_prompts, **settings)
        self.broadcast_base = broadcast_base
        self._new_rule = partial(
            GeneratorRule,
            generator,
            server_lr,
            server_optimizer,
            server_sign,
            server_reduction,
            descriptor_tokens,
            wo_init,
            broadcast_base,
        )

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Train a client that never trains as ``local_phases``, once for each step on the descriptor; then its head."""
        if not new:
            return []
        rounds = replace(self.training_settings, schedule="constant").phase("prompt", "head")
        steps = 0 if self.broadcast_base else NEW_CLIENT_STEPS
        return [rounds] * steps + super().finetune_phases(new)

    def make_server(self) -> ServerRule:
        """Return the server with the generator."""
        return self._new_rule()
