"""What a machine can do: measured here and kept, read from a file, or one of those shipped.

Knows rates and sizes, and nothing of models: `patrickstar.planning` turns both into a step's time.
"""

from patrickstar.machine.facts import Accelerator, Disk, Machine, Network, Processor
from patrickstar.machine.files import machine_from, shipped_names
from patrickstar.machine.kept import cache_folder, machine_here
from patrickstar.machine.measure import measure

__all__ = [
    "Accelerator",
    "Disk",
    "Machine",
    "Network",
    "Processor",
    "cache_folder",
    "machine_from",
    "machine_here",
    "measure",
    "shipped_names",
]
