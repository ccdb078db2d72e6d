"""The methods, one a file: what a client does with a mini-batch, and the server where it needs its own."""

from methods.atpfl import ATPFL
from methods.coop import CoOp
from methods.ditto import Ditto
from methods.dpfpl import DPFPL
from methods.fedavg import FedAvg
from methods.fedavgft import FedAvgFT
from methods.fedbabu import FedBABU
from methods.fedclip import FedCLIP
from methods.fedcocoop import FedCoCoOp
from methods.federatedridge import FederatedRidge
from methods.fedkgcoop import FedKgCoOp
from methods.fedlora import FedLoRA
from methods.fedloraclip import FedLoRACLIP
from methods.fedmaple import FedMaPLe
from methods.fedmgp import FedMGP
from methods.fedmtl import FedMTL
from methods.fedmvp import FedMVP
from methods.fedotp import FedOTP
from methods.fedpart import FedPart
from methods.fedpartclip import FedPartCLIP
from methods.fedper import FedPer
from methods.fedpgp import FedPGP
from methods.fedpha import FedPHA
from methods.fedplot import FedPLOT
from methods.fedpr import FedPR
from methods.fedprograd import FedProGrad
from methods.fedpromptsrc import FedPromptSRC
from methods.fedprox import FedProx
from methods.fedrep import FedRep
from methods.fedrod import FedRoD
from methods.fedsalora import FedSALoRA
from methods.fedsdg import FedSDG
from methods.fedtpg import FedTPG
from methods.fedvpt import FedVPT
from methods.fedvptdeep import FedVPTDeep
from methods.ffalora import FFALoRA
from methods.flora import FLoRA
from methods.focoop import FOCoOp
from methods.headtune import HeadTune
from methods.hilora import HiLoRA
from methods.local import Local
from methods.localclip import LocalCLIP
from methods.locallora import LocalLoRA
from methods.lorafair import LoRAFAIR
from methods.moon import MOON
from methods.nearestclassmean import NearestClassMean
from methods.pepfedpt import PEPFedPT
from methods.perfedavg import PerFedAvg
from methods.pf2lora import PF2LoRA
from methods.pf2lorapruned import PF2LoRAPruned
from methods.pfedbayespt import PFedBayesPT
from methods.pfedmma import PFedMMA
from methods.pfedmoap import PFedMoAP
from methods.pfedpg import PFedPG
from methods.pfedprompt import PFedPrompt
from methods.pfedpt import PFedPT
from methods.plan import PLAN
from methods.promptamp import PromptAMP
from methods.promptfl import PromptFL
from methods.promptflft import PromptFLFT
from methods.promptfolio import PromptFolio
from methods.promptper import PromptPer
from methods.promptprox import PromptProx
from methods.sgpt import SGPT
from methods.singlesetvpt import SingleSetVPT
from methods.tpfl import TPFL
from methods.trip import TRIP
from methods.zeroshotclip import ZeroShotCLIP

__all__ = [
    "ATPFL",
    "DPFPL",
    "MOON",
    "PLAN",
    "SGPT",
    "TPFL",
    "TRIP",
    "CoOp",
    "Ditto",
    "FFALoRA",
    "FLoRA",
    "FOCoOp",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedCLIP",
    "FedCoCoOp",
    "FedKgCoOp",
    "FedLoRA",
    "FedLoRACLIP",
    "FedMGP",
    "FedMTL",
    "FedMVP",
    "FedMaPLe",
    "FedOTP",
    "FedPGP",
    "FedPHA",
    "FedPLOT",
    "FedPR",
    "FedPart",
    "FedPartCLIP",
    "FedPer",
    "FedProGrad",
    "FedPromptSRC",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSDG",
    "FedTPG",
    "FedVPT",
    "FedVPTDeep",
    "FederatedRidge",
    "HeadTune",
    "HiLoRA",
    "LoRAFAIR",
    "Local",
    "LocalCLIP",
    "LocalLoRA",
    "NearestClassMean",
    "PEPFedPT",
    "PF2LoRA",
    "PF2LoRAPruned",
    "PFedBayesPT",
    "PFedMMA",
    "PFedMoAP",
    "PFedPG",
    "PFedPT",
    "PFedPrompt",
    "PerFedAvg",
    "PromptAMP",
    "PromptFL",
    "PromptFLFT",
    "PromptFolio",
    "PromptPer",
    "PromptProx",
    "SingleSetVPT",
    "ZeroShotCLIP",
]
