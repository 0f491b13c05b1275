"""How closely the compressed cache's predictions follow the full cache's, token by token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CHUNK = 128  # tokens whose full-vocabulary log-softmax is held at once


def kl_nats(
    full: Float[Tensor, "token vocab"], pool: Float[Tensor, "token vocab"]
) -> Float[Tensor, " token"]:
    """KL(full || pool) = sum_v p_v (log p_v - log q_v) of each token: nats, in fp32."""
    divergences = []
    for p_logits, q_logits in zip(torch.split(full, CHUNK), torch.split(pool, CHUNK), strict=True):
        log_p = p_logits.float().log_softmax(-1)
        log_q = q_logits.float().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(divergences).clamp_min(0)  # rounding may leave -1e-8


def top1_agreement(
    full: Float[Tensor, "token vocab"], pool: Float[Tensor, "token vocab"]
) -> Bool[Tensor, " token"]:
    """Where both caches make the same token the most likely one."""
    return full.argmax(-1) == pool.argmax(-1)
