"""Partitions of images over clients: one protocol a file.

The functions are pure: labels and a generator in, one index array per client out. The classes carry their arguments
from a config and apply the functions to a pool of images. What the published code does beyond its paper is said at each
one. flwr-datasets has partitioners of the plain forms; the published ones differ from them in what is drawn, in what
order and with which smallest client, and the runs compared here must have exactly those.
"""

from datamodules.partition.at_most_classes import AtMostClasses
from datamodules.partition.dirichlet_merged import DirichletMerged
from datamodules.partition.dirichlet_pfllib import DirichletPFLlib
from datamodules.partition.dirichlet_shared import DirichletShared
from datamodules.partition.disjoint_classes import DisjointClasses
from datamodules.partition.domain_per_client import DomainPerClient
from datamodules.partition.iid import IID
from datamodules.partition.partition import Partition
from datamodules.partition.pathological_pfllib import IIDPFLlib, PathologicalPFLlib
from datamodules.partition.pathological_random import PathologicalRandom
from datamodules.partition.quantity_skew import QuantitySkew
from datamodules.partition.splits import ClientSplits, Indices, LabelSpace, check_splits

__all__ = [
    "IID",
    "AtMostClasses",
    "ClientSplits",
    "DirichletMerged",
    "DirichletPFLlib",
    "DirichletShared",
    "DisjointClasses",
    "DomainPerClient",
    "IIDPFLlib",
    "Indices",
    "LabelSpace",
    "Partition",
    "PathologicalPFLlib",
    "PathologicalRandom",
    "QuantitySkew",
    "check_splits",
]
