"""The methods, one a file: what a client does with a mini-batch, and the server where it needs its own."""

from methods.fedavg import FedAvg
from methods.fedprox import FedProx
from methods.fedvpt import FedVPT, FedVPTDeep
from methods.local import Local
from methods.pfedpg import PFedPG

__all__ = ["FedAvg", "FedProx", "FedVPT", "FedVPTDeep", "Local", "PFedPG"]
