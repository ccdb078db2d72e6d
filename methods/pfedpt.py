"""pFedPT: FedAvg of the model, and a prompt on the pixels that is each client's own."""

from typing import Any

from benchmark.backbones.pixel_prompts import PaddingPrompt, PixelPrompt
from methods.fedavg import FedAvg


class PFedPT(FedAvg):
    """pFedPT (Li et al., "Visual Prompt Based Personalized Federated Learning", arXiv:2303.08678, TMLR).

    Objective ``min_{w, {delta_k}} sum_k (n_k / n) CE(f_w(x + delta_k), y)``. In a round a client first trains its
    prompt delta_k while w rests, then w while delta_k rests; the server averages w weighted with n_k. Evaluated with
    the global w and the client's own prompt; a client that was not selected keeps its old one. Message: w, as FedAvg.

    It is ``FedAvg`` with a prompt by default. Readings: the prompt is 4 pixels wide (the paper; its published commands
    have 2) and has three channels (its code has one on TinyImageNet); its rate is the paper's 1.0, not the code's
    default 20, and its momentum the code's 0.5, which starts at zero in every round, as all momenta here. The network's
    rate is the paper's 0.005; the published commands leave it at the code's default 0.05.

    A run as the published code makes it has the code's CNN (``variant: pflib``), incomplete last batches dropped
    (``drop_last``, set by the data of this comparison) and the prompt's momentum kept by the client from round to
    round (``optimizer_state: client``): preset ``published_code`` of ``configs/tables/pfedpt_table1.yaml``. Preset
    ``published_command`` also takes the command's prompt of 2 pixels and rate 0.05. Further arguments as ``FedAvg``.

    Args:
        visual_prompt: trained first; by default a frame of 4 pixels on images of 32.
    """

    def __init__(self, *arguments: Any, visual_prompt: PixelPrompt | None = None, **settings: Any) -> None:
        prompt = PaddingPrompt() if visual_prompt is None else visual_prompt
        super().__init__(*arguments, visual_prompt=prompt, **settings)
