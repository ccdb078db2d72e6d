"""FFA-LoRA: FedAvg-LoRA whose A rests at its initial value, so that the mean of B is the mean of the products."""

from methods.fedlora import FedLoRA


class FFALoRA(FedLoRA):
    """FFA-LoRA (Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024) on a ViT.

    A is the same for all clients and never trained: ``mean_k(B_k) A = mean_k(B_k A)``. Half of FedAvg-LoRA's message.
    Arguments as ``FedLoRA``.
    """

    shared = ("lora.b",)
