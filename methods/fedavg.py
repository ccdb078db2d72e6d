"""FedAvg: every client trains the whole model, the server averages."""

from methods.pixel_prompt import PixelPromptMethod


class FedAvg(PixelPromptMethod):
    """FedAvg (McMahan et al., AISTATS 2017); with a ViT it is ViT-FL (Qu et al., CVPR 2022).

    Objective ``CE(w; D_k)``, E epochs from the received w; server ``w <- sum_k n_k w_k / sum_k n_k``. The one global
    model is evaluated on every client's test images, without fine-tuning. Arguments as ``PixelPromptMethod``.
    """

    shared: tuple[str, ...] = ("backbone", "head")
