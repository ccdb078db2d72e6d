"""SingleSet-VPT: every client tunes prompt and head of its own and nothing is sent."""

from methods.fedvpt import FedVPT


class SingleSetVPT(FedVPT):
    """SingleSet-VPT, the baseline without federation of pFedPG (Yang et al., ICCV 2023): VPT on a client's own images.

    ``FedVPT`` with a personal prompt: each client goes on from its own state in the rounds in which it is selected, so
    that it takes as many steps as in FedVPT. ``num_prompts: 0`` is a linear probe. Arguments as ``FedVPT``.
    """

    shared = ()
    personal = ("prompt", "head")
    evaluate_local = False
