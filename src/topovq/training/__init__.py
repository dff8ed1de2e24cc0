"""Training: from a configuration to a run folder with a record, checkpoints and a model."""

from topovq.training.checkpoint import CheckpointError
from topovq.training.config import TrainConfig
from topovq.training.distributed import World, join_world
from topovq.training.evaluate import validate
from topovq.training.interrupt import Interrupted
from topovq.training.loop import RunResult, result_of, train
from topovq.training.many import train_all
from topovq.training.record import read_record
from topovq.training.report import MissingExtra
from topovq.training.runs import evaluate, info, load_run
from topovq.training.sources import open_data

__all__ = [
    "CheckpointError",
    "Interrupted",
    "MissingExtra",
    "RunResult",
    "TrainConfig",
    "World",
    "evaluate",
    "info",
    "join_world",
    "load_run",
    "open_data",
    "read_record",
    "result_of",
    "train",
    "train_all",
    "validate",
]
