"""Local LoRA: every client trains factors and a head of its own, and nothing is sent."""

from methods.fedlora import FedLoRA


class LocalLoRA(FedLoRA):
    """LoRA (Hu et al., ICLR 2022) of each client by itself, the floor of the federated ones; arguments as ``FedLoRA``.

    Each client goes on from its own state in the rounds in which it is selected, so that it takes as many steps as in
    ``FedLoRA``.
    """

    shared = ()
    personal = ("lora", "head")
    evaluate_local = False
