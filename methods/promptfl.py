"""PromptFL: FedAvg of a text prompt for a frozen CLIP."""

from methods.text_prompt import TextPromptMethod


class PromptFL(TextPromptMethod):
    """PromptFL (Guo et al., IEEE TMC 2023, arXiv:2208.11625).

    Objective ``min_p sum_k (n_k / n) CE_k(p)``: every client trains the received context for E epochs, the server
    averages weighted with n_k. The one global context is evaluated on every client's test images and on classes that
    nobody trained. Message: L x w numbers each way. With one client it is CoOp. Arguments as ``TextPromptMethod``.
    """
