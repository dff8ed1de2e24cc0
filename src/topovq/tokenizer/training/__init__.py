"""Training: from a configuration to a run folder with a record, checkpoints and a model."""

from topovq.distributed import World, join_world
from topovq.missing import MissingExtra
from topovq.tokenizer.data import open_data
from topovq.tokenizer.training.base import RunResult, result_of
from topovq.tokenizer.training.checkpoint import CheckpointError
from topovq.tokenizer.training.config import TrainConfig
from topovq.tokenizer.training.evaluate import validate
from topovq.tokenizer.training.interrupt import Interrupted
from topovq.tokenizer.training.loop import train
from topovq.tokenizer.training.many import train_all
from topovq.tokenizer.training.record import read_record
from topovq.tokenizer.training.runs import evaluate, info, load_run
from topovq.tokenizer.training.watch import Diverged

__all__ = [
    "CheckpointError",
    "Diverged",
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
