"""Groups of prompts with keys, among which images select (SGPT): the selection, and the server's averages."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule

GROUP_PROMPTS = "group_prompts.tokens"
GROUP_KEYS = "group_keys"
FREQUENCY = "group_frequency"
SELECTIONS = "group_selections"


def orthonormal_keys(num_groups: int, width: int) -> Tensor:
    """Draw Xavier-uniform keys for this seed and make them orthonormal by Gram-Schmidt: [G, d]."""
    with keyed_initialization("group keys"):
        keys = nn.init.xavier_uniform_(torch.empty(num_groups, width))
    # Gram-Schmidt is the QR decomposition whose R has a positive diagonal.
    q, r = torch.linalg.qr(keys.T)
    return (q * r.diagonal().sign()).T.contiguous()


def key_similarity(query: Tensor, keys: Tensor) -> Tensor:
    """``cos(q, k_g)``, [B, G], of queries [B, d] and keys [G, d]."""
    return F.cosine_similarity(query.unsqueeze(1), keys, dim=-1)


def nearest_group(similarity: Tensor) -> Tensor:
    """Select each image's group at test time, ``argmin_g s_g`` with ``s_g = 1 - cos(q, k_g)``: [B]."""
    return similarity.argmax(1)


def training_group(similarity: Tensor, frequency: Tensor) -> Tensor:
    """Select each image's group in training, ``argmin_g s_g (freq_g + 5e-4)``: [B].

    Args:
        similarity: cos(q, k_g), [B, G].
        frequency: each group's share of the selections so far, [G]; all zero where there were none, and then the
            nearest group is selected.
    """
    return ((1 - similarity) * (frequency + 5e-4)).argmin(1)


def one_hot(groups: Tensor, num_groups: int) -> Tensor:
    """Write groups [B] as rows of zeros and one 1, float [B, G]."""
    return (groups.unsqueeze(1) == torch.arange(num_groups, device=groups.device)).float()


def majority(chosen: Tensor, mask: Tensor) -> Tensor:
    """Give all images the group that most of the mini-batch selected, the first of several: [B, G].

    Args:
        chosen: one-hot rows, [B, G].
        mask: rows that hold an image, [B].
    """
    votes = (chosen * mask.unsqueeze(1)).sum(0)
    return one_hot(votes.argmax().expand(len(chosen)), chosen.shape[1])


def merge_keys(keys: Tensor, selections: Tensor, rare: float = 50) -> Tensor:
    """Average each group's key over the clients, weighted with how often each of them selected the group: [G, d].

    Args:
        keys: the clients' keys, [S, G, d].
        selections: how often each client selected each group in this round, [S, G].
        rare: groups selected at most so often, by all clients together, take the plain mean.
    """
    total = selections.sum(0)
    share = torch.where(total > rare, selections / total.clamp(min=1), 1 / len(keys))
    # Around the first client's keys: identical keys give these back bit for bit.
    first = keys[0]
    return first + (share.unsqueeze(2).to(keys) * (keys - first)).sum(0)


class GroupRule(ServerRule):
    """SGPT's server: group prompts and keys have momentum; it counts the selections of all clients and rounds.

    Shared prompts (and the head, where it is global) are averaged with n_k. Group prompts become
    ``m_p old + (1 - m_p) avg``, keys ``m old + (1 - m) merged`` with ``merge_keys``.

    Args:
        prompt_momentum: m_p.
        key_momentum: m.
    """

    selections: Tensor

    def __init__(self, prompt_momentum: float, key_momentum: float) -> None:
        super().__init__()
        self.prompt_momentum = prompt_momentum
        self.key_momentum = key_momentum

    def start(self, initial: Values, terms: Terms) -> None:
        """Count no selections yet."""
        super().start(initial, terms)
        self.register_buffer("selections", torch.zeros(len(initial[GROUP_KEYS]), dtype=torch.float64))

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send prompts and keys, and each group's share of the selections so far (zeros before any)."""
        frequency = (self.selections / self.selections.sum().clamp(min=1)).to(shared[GROUP_KEYS].dtype)
        return Broadcast(shared | {FREQUENCY: frequency})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average, merge the keys, apply momentum, count."""
        new = super().aggregate(round, shared, uploads)
        # Without local epochs nothing is reported.
        none = torch.zeros(len(uploads.clients), len(self.selections))
        selections = uploads.values.get(SELECTIONS, none).double()
        new[GROUP_KEYS] = merge_keys(uploads.values[GROUP_KEYS], selections)
        for name, momentum in ((GROUP_PROMPTS, self.prompt_momentum), (GROUP_KEYS, self.key_momentum)):
            # Exactly the old value at 1 and the new one at 0.
            new[name] = torch.lerp(new[name], shared[name], momentum)
        self.selections += selections.sum(0).cpu()
        return new
