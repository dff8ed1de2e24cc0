"""The paper's tables and figures, and studies of our own, as data: specs, the runs they need, what comes of them."""

import experiments.peers  # noqa: F401  quantizers of another library, which specs and records name
