"""Backbones: prompted timm ViTs, the small networks that are trained from scratch, and prompt tokens."""
