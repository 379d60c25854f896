"""Token embedding: a gather, exact by nature; its backward adds the rows of a repeated token in ascending order."""

import torch.nn.functional as F
from torch import Tensor


def embedding(token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Look up one row per token.

    Args:
        token_ids_T: [T] int64 or int32, each in [0, V).
        weight_VD: [V, D].

    Returns:
        [T, D] in the weight's dtype.
    """
    return F.embedding(token_ids_T, weight_VD)
