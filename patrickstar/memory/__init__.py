"""The chunk memory manager: a library of its own, without modules, optimizers or process groups."""

from patrickstar.memory.chunk import Chunk, MemoryReport, TierUsage
from patrickstar.memory.due import Due
from patrickstar.memory.manager import ChunkManager
from patrickstar.memory.observer import Observer, Why
from patrickstar.memory.planner import Plan, make_plan
from patrickstar.memory.policy import Candidate, Fifo, FurthestNextUse, Lru, Policy
from patrickstar.memory.sizes import format_budget, format_bytes, parse_bytes
from patrickstar.memory.spool import Spool
from patrickstar.memory.tiers import CpuTier, DiskTier, Tier
from patrickstar.memory.trace import Access, Moment, Trace, Use

__all__ = [
    "Access",
    "Candidate",
    "Chunk",
    "ChunkManager",
    "CpuTier",
    "DiskTier",
    "Due",
    "Fifo",
    "FurthestNextUse",
    "Lru",
    "MemoryReport",
    "Moment",
    "Observer",
    "Plan",
    "Policy",
    "Spool",
    "Tier",
    "TierUsage",
    "Trace",
    "Use",
    "Why",
    "format_budget",
    "format_bytes",
    "make_plan",
    "parse_bytes",
]
