"""What a run tells, through `logging` under the name "patrickstar".

Like DeepSpeed's, its lines are of level INFO and not shown unless somebody asks for them:
`logging.getLogger("patrickstar").setLevel("INFO")` with a handler, or `logging.basicConfig`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

logger = logging.getLogger("patrickstar")


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the ranks named; on all of them with None or -1."""
    rank = own_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
