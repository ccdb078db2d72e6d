"""FedSA-LoRA: A is shared, B and the head stay with their client."""

from methods.fedlora import FedLoRA


class FedSALoRA(FedLoRA):
    """FedSA-LoRA (Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025).

    A carries what clients have in common, B what is a client's own: both are trained together, and A alone is sent and
    averaged with the weights n_k. Evaluated with the new A and the client's own B. In the first step B is 0, so that
    the gradient of A is 0. On a ViT; arguments as ``FedLoRA``.
    """

    shared = ("lora.a",)
    personal = ("lora.b", "head")
