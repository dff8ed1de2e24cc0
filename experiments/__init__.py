"""The paper's tables and figures, and studies of our own, as data: specs, the runs they need, what comes of them.

specs, runs, tables             what is run, the records that are left, what is made of them
figures/, pages                 how figures are drawn, and what the pages in docs/ show
paper/, prior/, clients/, scale, studies    one study each, but for the last: several small ones
peers                           quantizers of others
"""
