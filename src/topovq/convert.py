"""The door to `topovq.interop`: codebooks and quantizers of other libraries, into and out of topovq."""

from topovq.interop import (
    DiffusersReplacement,
    VectorQuantizeReplacement,
    export_quantizers,
    from_kohonen_vae,
    from_rosinality,
    from_vector_quantize_pytorch,
    replace_quantizers,
)

__all__ = [
    "DiffusersReplacement",
    "VectorQuantizeReplacement",
    "export_quantizers",
    "from_kohonen_vae",
    "from_rosinality",
    "from_vector_quantize_pytorch",
    "replace_quantizers",
]
