"""Data sets, partitions over clients, and the datamodule that serves them.

``datamodules.federated.FederatedDataModule`` is not imported here, as Lightning is slow to import.
"""

from benchmark.records.hashes import manifest_hash
from datamodules.caltech101 import Caltech101
from datamodules.camelyon17 import Camelyon17
from datamodules.cifar import CIFAR10, CIFAR100
from datamodules.dermoscopic import DermoscopicFL
from datamodules.digits import DigitDomains
from datamodules.domainnet import DomainNet10
from datamodules.dtd import DTD
from datamodules.eurosat import EuroSAT
from datamodules.fed_isic import FedISIC2019
from datamodules.fgvc_aircraft import FGVCAircraft
from datamodules.flowers102 import Flowers102
from datamodules.food101 import Food101
from datamodules.hugging_face import HuggingFaceImages
from datamodules.imagenet import ImageNet
from datamodules.imagenet_variants import ImageNetA, ImageNetR, ImageNetSketch, ImageNetV2
from datamodules.letters import Letters
from datamodules.manifest import FromManifest, make_manifest, read_manifest, write_manifest
from datamodules.medmnist import MedMNIST
from datamodules.office_caltech import OfficeCaltech10
from datamodules.office_home import OfficeHome
from datamodules.ood_stream import OODStream
from datamodules.own_images import DomainFolders, ImageFolders, ImageIndex
from datamodules.oxford_pets import OxfordPets
from datamodules.pacs import PACS
from datamodules.partition import (
    IID,
    AtMostClasses,
    ClientSplits,
    DirichletMerged,
    DirichletPFLlib,
    DirichletShared,
    DisjointClasses,
    DomainPerClient,
    IIDPFLlib,
    Partition,
    PathologicalPFLlib,
    PathologicalRandom,
    QuantitySkew,
    check_splits,
)
from datamodules.partition_data_sets import ClassesOfDataSets
from datamodules.partition_domains import DomainsPerClient, LeaveOneDomainOut, SkewedDomains
from datamodules.partition_few_shot import BaseToNovel, BaseToNovelDomains, DirichletFewShot, NonOverlapping
from datamodules.several_data_sets import SeveralDataSets
from datamodules.sites import Sites
from datamodules.source import ImagePool, ImageSource
from datamodules.stanford_cars import StanfordCars
from datamodules.sun397 import SUN397
from datamodules.tiny_imagenet import TinyImageNet
from datamodules.transform import ImageTransform
from datamodules.ucf101 import UCF101
from datamodules.vlcs import VLCS

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DTD",
    "IID",
    "PACS",
    "SUN397",
    "UCF101",
    "VLCS",
    "AtMostClasses",
    "BaseToNovel",
    "BaseToNovelDomains",
    "Caltech101",
    "Camelyon17",
    "ClassesOfDataSets",
    "ClientSplits",
    "DermoscopicFL",
    "DigitDomains",
    "DirichletFewShot",
    "DirichletMerged",
    "DirichletPFLlib",
    "DirichletShared",
    "DisjointClasses",
    "DomainFolders",
    "DomainNet10",
    "DomainPerClient",
    "DomainsPerClient",
    "EuroSAT",
    "FGVCAircraft",
    "FedISIC2019",
    "Flowers102",
    "Food101",
    "FromManifest",
    "HuggingFaceImages",
    "IIDPFLlib",
    "ImageFolders",
    "ImageIndex",
    "ImageNet",
    "ImageNetA",
    "ImageNetR",
    "ImageNetSketch",
    "ImageNetV2",
    "ImagePool",
    "ImageSource",
    "ImageTransform",
    "LeaveOneDomainOut",
    "Letters",
    "MedMNIST",
    "NonOverlapping",
    "OODStream",
    "OfficeCaltech10",
    "OfficeHome",
    "OxfordPets",
    "Partition",
    "PathologicalPFLlib",
    "PathologicalRandom",
    "QuantitySkew",
    "SeveralDataSets",
    "Sites",
    "SkewedDomains",
    "StanfordCars",
    "TinyImageNet",
    "check_splits",
    "make_manifest",
    "manifest_hash",
    "read_manifest",
    "write_manifest",
]
