"""The kernels of a step, compiled for a GPU that need not be there: the interpreter accepts more than the compiler.

(A variable that changes its type in a branch or a loop, above all.)
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

COMPILE = r"""
import os, re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from topovq.ops.triton import accumulate, codes, quantize, ride, search, smooth, thin, update, which

POINTERS = {"step_ptr": "*i64", "steps_ptr": "*i32", "lengths_ptr": "*fp64", "now_ptr": "*fp64", "idle_ptr": "*i32",
            "frozen_ptr": "*i1", "index_ptr": "*i64", "other_ptr": "*i64", "keep_ptr": "*i1", "valid_ptr": "*i8",
            "skipped_ptr": "*i64", "hi_ptr": "*fp16", "lo_ptr": "*fp16", "schedule_ptr": "*fp64",
            "rows_ptr": "*i32", "number_ptr": "*i32", "done_ptr": "*i32", "fold_ptr": "*fp16",
            "unusual_ptr": "*i32"}
CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")

def build(kernel, constants, options=None, **types):
    types = {**POINTERS, "decay": "fp32", "beta": "fp32", "eps": "fp32", **types}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or name in ("D", "stride_n")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if kernel.arg_names[i] not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options or {})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # What spilled from registers would lie there. Triton 3.6 leaves 8 bytes in two kernels.
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 8 and "LOCAL:0 " in usage, usage
    check_who_reads(kernel.fn.__name__, compiled.asm["ttgir"])

def check_who_reads(kernel, code):
    # What is read and written in place must be read by the threads that write it: others may come too late.
    came_from, layouts, read, written = {}, {}, set(), set()
    for line in code.splitlines():
        made = re.match(r"\s*(%\S+) = (?:tt|ttg)\.(?:splat|addptr|broadcast|expand_dims|convert_layout) (%\w+)", line)
        if made:
            came_from[made[1]] = came_from.get(made[2], made[2])
        used = re.search(r"tt\.(load|store) (%\w+).*: tensor<[^,]*, (.*)> loc", line)
        if used:
            pointer = came_from.get(used[2], used[2])
            layouts.setdefault(pointer, set()).add(used[3])
            (written if used[1] == "store" else read).add(pointer)
    assert written or " tensor<" not in code, code  # or it is not as this takes it to be
    for pointer in read & written:
        assert len(layouts[pointer]) == 1, f"{kernel}: {pointer} is read or written as {layouts[pointer]}"

for schedule, wrap in (("harmonic", False), ("linear", True), ("exponential", False)):
    for tile in (smooth.SMALL, smooth.LARGE):
        # Numbers that are 1 are compiled in: the strides and columns of a line of codes of one dimension.
        line = {"sums_columns": 1, "counts_columns": 1, "counts_place_stride": 1}
        ones = line if wrap else {"counts_column_stride": 1}
        lead = {"harmonic": "open", "linear": "ring"}.get(schedule, "whole")
        how = {"SCHEDULE": schedule, "WRAP": wrap, "LEAD": lead}
        how |= {"BLOCK_I": tile.block_i, "BLOCK_C": tile.block_c, "BLOCK_J": smooth.BLOCK_J, **ones}
        for long, to_points in ((False, False), (True, False), (True, True)):
            way = {"LONG": long, "TO_POINTS": to_points, "BUT_NARROW": schedule != "linear"}
            build(smooth._axis_kernel, {**how, **way})
for axes, hexagonal, d in ((1, False, 8), (2, False, 64), (2, True, 8), (3, False, 256)):
    lattice = {"WRAP0": axes == 3, "WRAP1": hexagonal, "WRAP2": axes == 3, "HEXAGONAL": hexagonal}
    lattice |= {name: 1 for name in ("n0", "n1")[: 3 - axes]}
    rule = {"UPDATE_EMPTY": not hexagonal, "COSINE": hexagonal}
    who = {"asked_ptr": "*i32", "heard_ptr": "*i32", "places_ptr": "*i32", "corners_ptr": "*i32"}
    how = {"BLOCK": ride.COUNTS, "BLOCK_D": min(64, d), "SLOTS": min(ride.SLOTS, 8**axes)}
    build(ride._counts_kernel, {"UPDATE_EMPTY": not hexagonal, **how}, **who)
    shape = {"DP": d, "PROGRAMS": 16, "CORNERS": 2**axes}
    for block in (512, 2048):
        shape["BLOCK_K"] = block // d
        build(ride._codes_kernel, {**rule, "REVIVE": True, "AXES": axes, **lattice, **shape}, **who)
    build(ride._revive_kernel, {"COSINE": hexagonal, "DP": d, "BLOCK_K": 4096 // d}, **who)
for kind, schedule, hexagonal in (
    ("none", "harmonic", False), ("hard", "harmonic", False), ("hard", "linear", True), ("hard", "exponential", False),
    ("gaussian", "exponential", False),
):
    lattice = {"WRAP0": False, "WRAP1": hexagonal, "WRAP2": not hexagonal, "HEXAGONAL": hexagonal, "n0": 1}
    full = {"FULL": schedule != "exponential", **lattice}
    unused = {"steps_ptr": "*fp32", "lengths_ptr": "*fp32"} if kind == "none" else {}
    build(update._counts_kernel, {"KIND": kind, "SCHEDULE": schedule, **full, "BLOCK": update.COUNTS}, **unused)
    rule = {"KIND": kind, "UPDATE_EMPTY": not hexagonal, "CARRIED": True, "COSINE": False}
    build(update._codes_kernel, {**rule, **full, "BLOCK_K": 32, "DP": 64, "PROGRAMS": 1}, **unused)
    blocks = {"BLOCK_I": smooth.DENSE_I, "BLOCK_J": smooth.DENSE_J, "BLOCK_D": 64}
    dense_kind = {"none": "exponential"}.get(kind, kind)
    build(smooth._dense_kernel, {"KIND": dense_kind, "SCHEDULE": schedule, **lattice, **blocks})
for k, d, precision in (
    (512, 64, "exact"), (512, 64, "fast"), (65_536, 64, "exact"), (8_192, 128, "exact"), (8_192, 128, "fast"),
    (8_192, 256, "exact"), (8_192, 256, "fast"), (8_192, 512, "exact"), (65_536, 64, "fast"), (16_384, 16, "fast"),
    (8_192, 512, "fast"),
):
    tiles = search.tile_sizes(k, d, precision)
    unfolded = {"FOLD": 0, "WIDTH": 0, "UNFOLDED": True, "D": d}
    shape = {**unfolded, "DP": d, "DC": tiles.chunk, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "stride_d": 1}
    how = {"HAS_KEEP": False, "OTHER": False, "VALID": True, "EXACT": precision == "exact", "EACH": tiles.each}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    whole = precision == "exact"
    # Choices by `fast` tiles may be certified, and what has no proof is searched again by those of `exact`.
    certify = precision == "fast" and not tiles.each
    other = {"CERTIFY": certify, "LISTED": not certify and not tiles.each}
    for way in ({"CERTIFY": False, "LISTED": False}, other):
        build(search._search_kernel, {**shape, **how, **way, "WHOLE": False}, options)
        build(search._search_kernel, {**shape, **how, **way, "WHOLE": whole or way["CERTIFY"]}, options, x_ptr="*bf16")
        rows = search.LISTED_WHICH if way["LISTED"] else search.WHICH
        asked = {"OTHER": False, "EXACT": whole or way["CERTIFY"], "WHOLE": False, "EUCLIDEAN": True, **way}
        asked |= {"ROWS": rows, "DP": d, "DC": min(64, d), "BLOCK_K": tiles.block_k, "stride_d": 1}
        build(which.which_kernel, asked, found_ptr="*i64", out_ptr="*i64")
    how = {"EUCLIDEAN": True, "COSINE": False, "EXACT": precision == "exact", "VALID": True, "CLEAR": True,
           "KEPT": k <= 2048, "LEARNS": precision == "exact", "COUNT": True, "SOME": 32, "stride_d": 1}
    alone = {"D": d, "PARTS": 0, "WIDTH": 0}
    build(codes._codes_kernel, {**how, **alone, "WHOLE": whole, "DP": d, "BLOCK_K": 16, "SAMPLE": 16})
    how = {"KEPT": k <= 2048, "STATS": True, "FIXED": False, "D": d, "BLOCK_N": 32, "BLOCK_D": 64, "stride_d": 1}
    how |= {"FINISH": k > 2048, "PARTS": quantize.PARTS}
    build(quantize._gather_kernel, how, row_ptr="*i16")
    how = {"GATHER": k <= 2048, "BLOCK_N": max(1, 4096 // d), "BLOCK_D": d, "grad_d": 1, "stride_d": 1}
    build(quantize._backward_kernel, how, row_ptr="*i16")
for k, d, halves in ((16_384, 8, 3), (512, 8, 2), (65_536, 16, 3), (16_384, 32, 3), (16_384, 32, 1)):
    exact, width = halves > 1, search.width_of(k, d, halves)
    tiles = search.tile_sizes(k, d, "exact" if exact else "fast", width)
    padded = max(16, d)
    shape = {"D": d, "DP": padded, "DC": padded, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "stride_d": 1}
    how = {"HAS_KEEP": False, "OTHER": False, "VALID": True, "EXACT": exact, "WHOLE": halves == 2, "EACH": tiles.each}
    how |= {"CERTIFY": False, "LISTED": False, "WIDTH": width}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    for way in ({"FOLD": halves, "UNFOLDED": False}, {"FOLD": 0, "UNFOLDED": True}):
        build(search._search_kernel, {**shape, **how, **way}, options, x_ptr="*bf16" if halves == 2 else "*fp32")
    how = {"EUCLIDEAN": True, "COSINE": False, "EXACT": exact, "VALID": True, "CLEAR": True, "KEPT": True,
           "LEARNS": True, "COUNT": False, "SOME": 32, "stride_d": 1, "WHOLE": halves == 2, "D": d}
    build(codes._codes_kernel, {**how, "PARTS": halves, "WIDTH": width, "DP": padded, "BLOCK_K": 16, "SAMPLE": 32})
half = {name + "_ptr": "*bf16" for name in ("image", "matrix", "bias", "wide", "grad")}
for kernel, tile, which in (
    (thin._widen_kernel, thin.WIDEN, {}), (thin._narrow_kernel, thin.NARROW, {}),
    (thin._thin_kernel, thin.WIDEN_BACKWARD, {"WIDEN": True, "bias_ptr": None, "matrix_ptr": None}),
    (thin._thin_kernel, thin.NARROW_BACKWARD, {"WIDEN": False}),
):
    shape = {"C": 3, "P": 16, "M": 64, "BLOCK": tile.block, "BLOCK_M": 64, **which}
    build(kernel, shape, {"num_warps": tile.warps, "num_stages": tile.stages}, **half)
build(accumulate._total_kernel, {"ERROR": True, "BLOCK": accumulate.TOTAL, "COPIES": 32, "PARTS": 4096})
"""


def test_the_kernels_of_a_step_compile_for_a_gpu_and_spill_nothing():
    process = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert process.returncode == 0, process.stderr
