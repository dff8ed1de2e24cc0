"""Other libraries' codebooks and quantizers, one file per library; `library.py` says what such a file gives."""

from topovq.interop.hf_diffusers import DiffusersReplacement
from topovq.interop.kohonen_vae import from_kohonen_vae
from topovq.interop.lucidrains import VectorQuantizeReplacement, from_vector_quantize_pytorch
from topovq.interop.replace import export_quantizers, replace_quantizers
from topovq.interop.rosinality import from_rosinality

__all__ = [
    "DiffusersReplacement",
    "VectorQuantizeReplacement",
    "export_quantizers",
    "from_kohonen_vae",
    "from_rosinality",
    "from_vector_quantize_pytorch",
    "replace_quantizers",
]
