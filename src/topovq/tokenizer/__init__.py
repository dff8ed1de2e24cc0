"""Images to tokens: models, data, training, token files."""
