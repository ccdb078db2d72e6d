"""Local: every client trains its own model and nothing is sent."""

from methods.fedavg import FedAvg


class Local(FedAvg):
    """Local training, the baseline without federation (SingleSet-Full of pFedPG where the backbone is a ViT).

    Each client continues from its own state in the rounds in which it is selected, so that it takes as many steps as in
    the federated methods; a client that is never selected keeps the initial model. Arguments as ``FedAvg``.
    """

    paper_names = ("SingleSet-Full", "Local", "Local training")
    shared = ()
    personal = ("backbone", "head")
