"""Where the numbers of a run go: TensorBoard, Weights & Biases, CSV files."""

from patrickstar.monitor.csv_files import CsvFiles
from patrickstar.monitor.monitor import Event, Monitor, Writer
from patrickstar.monitor.tensorboard import TensorBoard
from patrickstar.monitor.wandb import WeightsAndBiases

__all__ = ["CsvFiles", "Event", "Monitor", "TensorBoard", "WeightsAndBiases", "Writer"]
