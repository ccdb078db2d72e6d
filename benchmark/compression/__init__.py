"""Compressed uploads, as deliveries: what arrives is what can be made of fewer bytes, and those are counted."""

from benchmark.compression.compressed import Quantized, TopK

__all__ = ["Quantized", "TopK"]
