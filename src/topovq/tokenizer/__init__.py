"""Images to tokens: models, data, training, token files."""

from topovq.missing import needs

with needs("train"):  # said at the door, not by whichever module happens to come first
    import filelock  # noqa: F401
    import PIL  # noqa: F401
    import rich  # noqa: F401
