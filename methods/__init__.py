"""The methods, one a file: what a client does with a mini-batch, and the server where it needs its own."""

from methods.atpfl import ATPFL
from methods.coop import CoOp
from methods.fedavg import FedAvg
from methods.fedavgft import FedAvgFT
from methods.fedbabu import FedBABU
from methods.fedcocoop import FedCoCoOp
from methods.fedkgcoop import FedKgCoOp
from methods.fedmaple import FedMaPLe
from methods.fedmtl import FedMTL
from methods.fedotp import FedOTP
from methods.fedper import FedPer
from methods.fedpgp import FedPGP
from methods.fedpr import FedPR
from methods.fedprox import FedProx
from methods.fedrep import FedRep
from methods.fedrod import FedRoD
from methods.fedvpt import FedVPT
from methods.fedvptdeep import FedVPTDeep
from methods.headtune import HeadTune
from methods.local import Local
from methods.localclip import LocalCLIP
from methods.moon import MOON
from methods.perfedavg import PerFedAvg
from methods.pfedbayespt import PFedBayesPT
from methods.pfedmoap import PFedMoAP
from methods.pfedpg import PFedPG
from methods.pfedprompt import PFedPrompt
from methods.pfedpt import PFedPT
from methods.promptamp import PromptAMP
from methods.promptfl import PromptFL
from methods.promptflft import PromptFLFT
from methods.promptper import PromptPer
from methods.promptprox import PromptProx
from methods.sgpt import SGPT
from methods.singlesetvpt import SingleSetVPT
from methods.tpfl import TPFL
from methods.zeroshotclip import ZeroShotCLIP

__all__ = [
    "ATPFL",
    "MOON",
    "SGPT",
    "TPFL",
    "CoOp",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedCoCoOp",
    "FedKgCoOp",
    "FedMTL",
    "FedMaPLe",
    "FedOTP",
    "FedPGP",
    "FedPR",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedVPT",
    "FedVPTDeep",
    "HeadTune",
    "Local",
    "LocalCLIP",
    "PFedBayesPT",
    "PFedMoAP",
    "PFedPG",
    "PFedPT",
    "PFedPrompt",
    "PerFedAvg",
    "PromptAMP",
    "PromptFL",
    "PromptFLFT",
    "PromptPer",
    "PromptProx",
    "SingleSetVPT",
    "ZeroShotCLIP",
]
