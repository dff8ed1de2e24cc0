"""Which runs a table is drawn from where nothing is to be run: the paper's residual blocks, if records hold them whole.

A table has runs of one kind of blocks, and its title names it. Where some seeds of the paper's blocks are still
missing, it has as many as every cell has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from experiments.runs import Records
from experiments.specs import BLOCKS, QUICK, SCALE, Options, cells

LEAST_SEEDS = {"cifar10": 3}  # of every cell, that make a table of the paper's blocks; of other data sets one


def settled(table: str, options: Options, records: Records) -> Options:
    """The options with `blocks` filled in, and with the number of seeds that there are where none was asked for."""
    if options.blocks is not None or not options.render_only or table == SCALE or options.dataset == QUICK:
        return options
    for blocks in BLOCKS:
        asked = replace(options, blocks=blocks)
        found, wanted = seeds_there(table, asked, records), asked.seeds_of(table)
        least = wanted if options.seeds is not None else LEAST_SEEDS.get(options.dataset, 1)
        if found >= least:
            return replace(asked, seeds=min(found, wanted))
    return replace(options, blocks="paper")  # whose runs are what is missing


def seeds_there(table: str, options: Options, records: Records) -> int:
    """The first so many seeds are there of every cell without which the table is not whole."""
    return min(number for number, pending in _numbers(table, options, records) if not pending)


def most_seeds(table: str, options: Options, records: Records) -> int:
    """As many seeds has the cell that has most of them."""
    return max(number for number, _ in _numbers(table, options, records))


def _numbers(table: str, options: Options, records: Records) -> Iterator[tuple[int, bool]]:
    """How many of the first seeds of a cell are there, and whether the table is whole without it."""
    for cell in cells(table, options.dataset, options.codebooks, options.blocks):
        of_seed = (cell.config(seed, options.steps, batch_size=options.batch_size) for seed in count())
        yield next(seed for seed, config in enumerate(of_seed) if records.finished(config) is None), cell.pending
