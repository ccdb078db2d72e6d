"""The methods, one a file: what a client does with a mini-batch, and the server where it needs its own."""

from methods.fedavg import FedAvg
from methods.fedbabu import FedBABU
from methods.fedmtl import FedMTL
from methods.fedper import FedPer
from methods.fedpr import FedPR
from methods.fedprox import FedProx
from methods.fedrep import FedRep
from methods.fedrod import FedRoD
from methods.fedvpt import FedVPT, FedVPTDeep
from methods.headtune import HeadTune
from methods.local import Local
from methods.moon import MOON
from methods.perfedavg import PerFedAvg
from methods.pfedpg import PFedPG
from methods.pfedpt import PFedPT
from methods.sgpt import SGPT
from methods.singlesetvpt import SingleSetVPT

__all__ = [
    "MOON",
    "SGPT",
    "FedAvg",
    "FedBABU",
    "FedMTL",
    "FedPR",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedVPT",
    "FedVPTDeep",
    "HeadTune",
    "Local",
    "PFedPG",
    "PFedPT",
    "PerFedAvg",
    "SingleSetVPT",
]
