"""The paper's tables and figures, and studies of our own. The files stand here in the order of an experiment's walk.

specs               what is to be run, as data, and the options of `python -m experiments`
runs                which of the runs are missing; those of the trainer as one sweep
records             what runs wrote about themselves, and how one is found again
tables, figures/    what is made of records: what all tables share, and everything that draws
pages               what docs/ shows of it

paper/, scale/, clients/, prior/    a study each: its own cells, runs (`run`) and table (`table`)
peers                               quantizers of others
"""
