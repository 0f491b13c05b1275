"""How far a compressed tensor is from the original."""

from jaxtyping import Float
from torch import Tensor


def nmse(x: Float[Tensor, "*batch dim"], x_hat: Float[Tensor, "*batch dim"]) -> float:
    """Mean over vectors of ||x - x_hat||^2 / ||x||^2, in fp32 (no unit; 0 is exact).

    Zero vectors have no relative error and are left out; of zero vectors alone the answer is 0.
    """
    error = (x.float() - x_hat.float()).square().sum(-1)
    energy = x.float().square().sum(-1)
    present = energy > 0
    return (error[present] / energy[present]).mean().item() if present.any() else 0.0
