"""Networks that write prompts by attention: a context of class names, and prompts of an image's patches."""

import torch
from torch import Tensor, nn

from methods.attention import attend, begin_together, gated


class ContextWriter(nn.Module):
    """Attention of queries to names, and a feed-forward network: one context for all of these names.

    Args:
        name_width: e, of the features of names.
        width: w, of a context's tokens.
        heads: of the attention, divides w.
    """

    def __init__(self, name_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_query, self.norm_key, self.norm = nn.LayerNorm(width), nn.LayerNorm(name_width), nn.LayerNorm(width)
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(name_width, width),
            nn.Linear(name_width, width),
        )
        self.out = nn.Linear(width, width)
        begin_together(self.query, self.key, self.value, self.out)
        self.inner, self.outer = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, queries: Tensor, names: Tensor, is_there: Tensor) -> Tensor:
        """Return a context, [L, w].

        Args:
            queries: Q, [L, w].
            names: features of class names, E, [C, e].
            is_there: which of them count, bool [C].
        """
        known = self.norm_key(names)
        query, key, value = self.query(self.norm_query(queries)), self.key(known), self.value(known)
        attended = self.out(attend(query, key, value, self.heads, is_there))
        return attended + gated(self.inner, self.outer, self.norm(attended))


class PromptFormer(nn.Module):
    """Attention of an image's patches to descriptions, and a feed-forward network: prompts for that image.

    Args:
        text_width: e, of the descriptions' features.
        width: v, of the image tower's tokens.
        heads: of the attention, divides v.
        num_prompts: tokens that are made, each the mean of an equal run of patches.
        rank: r of the low-rank maps A [v, r] and B [r, v] before query, key and value, ``x + x A B``; 0 for none. A
            starts from N(0, 0.02^2), B at 0.
    """

    def __init__(self, text_width: int, width: int, heads: int, num_prompts: int, rank: int = 0) -> None:
        super().__init__()
        self.heads, self.num_prompts = heads, num_prompts
        self.text_map = nn.Linear(text_width, width)
        self.norm_query, self.norm_key, self.norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        begin_together(self.query, self.key, self.value, self.out)
        self.inner, self.outer = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        if rank:
            maps = {f"{of}_a": 0.02 * torch.randn(width, rank) for of in ("query", "key", "value")}
            maps |= {f"{of}_b": torch.zeros(rank, width) for of in ("query", "key", "value")}
            self.low_rank = nn.ParameterDict(maps)
        self.rank = rank

    def changed(self, of: str, x: Tensor) -> Tensor:
        """Return what goes into ``query``, ``key`` or ``value``, ``x + x A B``; [..., v] of [..., v]."""
        return x + x @ self.low_rank[f"{of}_a"] @ self.low_rank[f"{of}_b"] if self.rank else x

    def forward(self, patches: Tensor, descriptions: Tensor, is_there: Tensor) -> Tensor:
        """Return prompts [B, n, v].

        Args:
            patches: embeddings with positions, before the tower's first norm, [B, M, v].
            descriptions: text features, [D, e].
            is_there: which of them count, [D].
        """
        context = self.text_map(descriptions)
        query = self.query(self.changed("query", self.norm_query(patches)))
        key, value = self.key(self.changed("key", self.norm_key(context))), self.value(self.changed("value", context))
        attended = self.out(attend(query, key, value, self.heads, is_there))
        made = attended + gated(self.inner, self.outer, self.norm(attended))
        return made.unflatten(1, (self.num_prompts, -1)).mean(2)
