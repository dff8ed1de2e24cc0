"""The paper's tables and figures, and studies of our own, as data: specs, the runs they need, what comes of them."""
