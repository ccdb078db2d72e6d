"""Data sets, partitions over clients, and the datamodule that serves them.

``datamodules.base.FederatedDataModule`` is not imported here, as Lightning is slow to import.
"""

from datamodules.cifar import CIFAR10, CIFAR100
from datamodules.digits import DigitDomains
from datamodules.manifest import FromManifest, make_manifest, manifest_hash, read_manifest, write_manifest
from datamodules.office_caltech import OfficeCaltech10
from datamodules.partition import (
    IID,
    AtMostClasses,
    ClientSplits,
    DirichletMerged,
    DirichletShared,
    DisjointClasses,
    DomainPerClient,
    IIDPFLlib,
    Partition,
    PathologicalPFLlib,
    PathologicalRandom,
    check_splits,
)
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "AtMostClasses",
    "ClientSplits",
    "DigitDomains",
    "DirichletMerged",
    "DirichletShared",
    "DisjointClasses",
    "DomainPerClient",
    "FromManifest",
    "IIDPFLlib",
    "ImagePool",
    "ImageSource",
    "ImageTransform",
    "OfficeCaltech10",
    "Partition",
    "PathologicalPFLlib",
    "PathologicalRandom",
    "check_splits",
    "make_manifest",
    "manifest_hash",
    "read_manifest",
    "write_manifest",
]
