"""Faults measured in other vector quantizers, none of which may be found here: one test each, numbered as they were.

The libraries: vector-quantize-pytorch (1-13), the Kohonen-VAE authors' code (14), encodec (15).
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from topovq import Grid, KohonenVQ


def shifted(n: int, dim: int, seed: int, shift: float = 5.0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + shift


def largest_tensor(run) -> int:
    """Elements of the largest tensor that any operation saw as an input, those inside custom operations included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    kineto = profile.profiler.kineto_results  # profile.events() puts them in order, which takes seconds
    shapes = [shape for event in kineto.events() for shape in event.shapes() if shape]
    return max(torch.Size(shape).numel() for shape in shapes)


# 1. Unused codes drain to the origin within 100 steps, and most of the codebook is lost.


@pytest.mark.parametrize(("dim", "size", "steps"), [(32, 512, 100), (8, 64, 1500)])
def test_fault_01_default_codes_do_not_drain_to_the_origin(dim, size, steps):
    torch.manual_seed(0)
    vq = KohonenVQ(dim, size)
    for step in range(steps):
        vq(shifted(1024, dim, step))
        if step + 1 in (100, steps):
            # The data are around 5 in every dimension: so must the codes be, all of them.
            assert vq.codebook.mean(1).min() > 4
    used = vq.eval()(shifted(16_384, dim, -1)).indices.unique().numel()
    assert used > 0.8 * size


def test_fault_01_unused_codes_do_not_move_without_update_empty():
    torch.manual_seed(0)
    vq = KohonenVQ(8, 64, neighborhood="none", update_empty=False)
    before = vq.codebook.clone()
    chosen = torch.zeros(64, dtype=torch.bool)
    for step in range(200):
        chosen[vq(shifted(256, 8, step)).indices] = True
    assert 0 < chosen.sum() < 64
    assert torch.equal(vq.codebook[~chosen], before[~chosen])
    assert not torch.isclose(vq.codebook[chosen], before[chosen]).all(1).any()


# 2. The scale of the initial codes depends on how many there are.


def test_fault_02_initial_scale_does_not_depend_on_codebook_size():
    torch.manual_seed(0)
    for size in (16, 4096, 65_536):
        assert KohonenVQ(64, size).codebook.std() == pytest.approx(1, abs=0.05)


# 3. A mask with projections, heads or channels first crashes; a mask that is all true changes the loss.

LAYOUTS = {
    "projection": {"codebook_dim": 3},
    "heads": {"codebook_dim": 4, "heads": 2},
    "separate heads, projected": {"codebook_dim": 3, "heads": 2, "separate_codebook_per_head": True},
    "channels first": {"channel_last": False},
    "images": {"accept_image_fmap": True, "codebook_dim": 3},
    "volumes": {"accept_3d_fmap": True, "heads": 2, "codebook_dim": 4},
}


def layer_and_input(options: dict) -> tuple[KohonenVQ, Tensor]:
    torch.manual_seed(0)
    vq = KohonenVQ(8, 16, **options)
    places = (2, 3, 2) if vq.accept_3d_fmap else (4, 3) if vq.accept_image_fmap else (12,)
    return vq, torch.randn(2, *places, 8) if vq._keeps_channels_last else torch.randn(2, 8, *places)


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fault_03_masks_work_in_every_layout(options):
    vq, x = layer_and_input(options)
    vq.eval()
    plain = vq(x)
    tokens = plain.indices if vq.heads == 1 else plain.indices[..., 0]
    every = vq(x, mask=torch.ones(tokens.shape, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(every, plain))

    mask = torch.rand(tokens.shape) > 0.5
    some = vq(x, mask=mask)
    assert torch.equal(some.indices[mask], plain.indices[mask])
    assert (some.indices[~mask] == -1).all()
    vectors = some.quantized if vq._keeps_channels_last else some.quantized.movedim(1, -1)
    assert (vectors[~mask] == 0).all()
    # The loss is the one of the vectors that are left.
    inputs = x if vq._keeps_channels_last else x.movedim(1, -1)
    alone = KohonenVQ(8, 16, **{**options, "channel_last": True, "accept_image_fmap": False, "accept_3d_fmap": False})
    alone.load_state_dict(vq.state_dict())
    torch.testing.assert_close(some.loss, alone.eval()(inputs[mask]).loss)
    # So is the update.
    vq.train()(x, mask=mask)
    alone.train()(inputs[mask])
    torch.testing.assert_close(vq.codebook, alone.codebook)


# 4. Indices do not decode back to the output with a projection or heads; index -1 decodes to the last code.


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fault_04_indices_decode_to_the_output(options):
    vq, x = layer_and_input(options)
    vq.eval()
    quantized, indices, _ = vq(x)
    assert torch.equal(vq.get_output_from_indices(indices), quantized)
    places = x.shape[1:-1] if vq._keeps_channels_last else x.shape[2:]
    assert indices.shape == (2, *places, *([vq.heads] if vq.heads > 1 else []))


def test_fault_04_masked_indices_decode_to_zeros():
    vq, x = layer_and_input({"codebook_dim": 3})
    mask = torch.arange(12).expand(2, 12) < 7
    quantized, indices, _ = vq.eval()(x, mask=mask)
    decoded = vq.get_output_from_indices(indices)
    assert torch.equal(decoded, quantized)
    assert (decoded[~mask] == 0).all()
    assert (vq.get_codes_from_indices(torch.tensor([-1])) == 0).all()


# 5. The codebook setter leaves the sums stale, and the next update undoes it.


@pytest.mark.parametrize("count_init", [0.0, 1.0])
def test_fault_05_assigned_codes_survive_the_next_update(count_init):
    vq = KohonenVQ(2, 4, neighborhood="none", decay=0.75, count_init=count_init)
    for step in range(10):
        vq(shifted(32, 2, step))
    codes = torch.tensor([[0.0, 10.0], [10.0, 0.0], [10.0, 10.0], [20.0, 20.0]])
    vq.codebook = codes
    vq(torch.tensor([[12.0, 14.0]]))
    # The third code is chosen: m = 0.75 * (10, 10) + 0.25 * (12, 14) and N = 1. The others keep their places.
    expected = codes.clone()
    expected[2] = torch.tensor([10.5, 11.0])
    torch.testing.assert_close(vq.codebook, expected, rtol=1e-4, atol=1e-4)


# 6. K-means initialization runs in eval mode, or although the codebook is frozen.


def test_fault_06_kmeans_runs_neither_in_eval_mode_nor_when_frozen():
    vq = KohonenVQ(8, 16, kmeans_init=True)
    before = {name: value.clone() for name, value in vq.state_dict().items()}

    def unchanged():
        return all(torch.equal(value, before[name]) for name, value in vq.state_dict().items())

    vq.eval()(shifted(100, 8, 0))
    assert unchanged()
    vq.train()(shifted(100, 8, 0), freeze_codebook=True)
    assert unchanged()
    vq(shifted(100, 8, 0))
    assert vq.codebook.mean() > 4
    frozen = KohonenVQ(8, 16, kmeans_init=True, freeze_codebook=True)
    codes = frozen.codebook.clone()
    frozen(shifted(100, 8, 0))
    assert torch.equal(frozen.codebook, codes)


# 7. .bfloat16() casts the running statistics, and counts stop moving.


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_fault_07_statistics_stay_float32(half):
    torch.manual_seed(0)
    vq = KohonenVQ(8, 16, codebook_dim=4, decay=0.999, neighborhood="none").to(half)
    exact = KohonenVQ(8, 16, codebook_dim=4, decay=0.999, neighborhood="none")
    exact.load_state_dict(vq.state_dict())
    book = vq.codebook_of(0)
    for step in range(20):
        counts = book.counts.clone()
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(step))
        quantized = vq(x.to(half)).quantized
        assert quantized.dtype == half
        assert (book.counts != counts).any()
        exact(x)
    assert (book.codes.dtype, book.sums.dtype, book.counts.dtype) == (torch.float32,) * 3
    assert book.step.dtype == torch.int64
    assert book.step == 20
    # Counts move by a thousandth of the difference in each step: bfloat16, with 8 bits, would lose all of it.
    torch.testing.assert_close(book.counts, exact.codebook_of(0).counts, rtol=0.05, atol=0)


@pytest.mark.parametrize("neighborhood", ["none", "hard", "gaussian", "exponential"])
def test_fault_07_autocast_leaves_the_update_alone(neighborhood):
    torch.manual_seed(0)
    plain = KohonenVQ(8, 16, neighborhood=neighborhood)
    cast = KohonenVQ(8, 16, neighborhood=neighborhood)
    cast.load_state_dict(plain.state_dict())
    x = torch.randn(256, 8)
    plain(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast(x)
    assert torch.equal(cast.codebook, plain.codebook)


# 8. The host waits for the device in each forward; torch.export fails; the graph breaks several times.

SETTINGS = {
    "default": {},
    "projected heads": {"codebook_dim": 4, "heads": 4},
    "hard": {"neighborhood": "hard"},
    "gaussian": {"neighborhood": "gaussian"},
    "hexagonal": {"neighborhood": "hard", "topology": "hexagonal"},
    "revival": {"threshold_ema_dead_code": 0.1},
    "k-means": {"kmeans_init": True},
    "cosine, rotation": {"use_cosine_sim": True, "rotation_trick": True},
    "keep empty": {"neighborhood": "none", "update_empty": False},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_fault_08_nothing_asks_the_device(options):
    # Fake tensors have no values: whatever needs one on the host raises.
    with FakeTensorMode():
        vq = KohonenVQ(8, 64, **options)
        x = torch.randn(2, 10, 8, requires_grad=True)
        mask = torch.rand(2, 10) > 0.5
        for _ in range(2):
            quantized, _, loss = vq(x, mask=mask)
            (quantized.sum() + loss).backward()
        with vq.accumulate():
            vq(x)
        figures = (vq.perplexity, vq.usage, vq.skipped, vq.step)
        vq.eval()(x)
    assert all(figure.shape == () for figure in figures)
    with torch.device("meta"):  # decoding looks at tokens only where they are on the CPU
        vq = KohonenVQ(8, 64, **options)
        tokens = torch.zeros(5, dtype=torch.int64) if vq.heads == 1 else torch.zeros(5, vq.heads, dtype=torch.int64)
        assert vq.get_output_from_indices(tokens).shape == (5, 8)


@pytest.mark.parametrize("training", [True, False])
def test_fault_08_compiles_whole(training):
    torch.manual_seed(0)
    plain = KohonenVQ(8, 64, codebook_dim=4).train(training)
    compiled_vq = KohonenVQ(8, 64, codebook_dim=4).train(training)
    compiled_vq.load_state_dict(plain.state_dict())
    compiled = torch.compile(compiled_vq, fullgraph=True, backend="aot_eager")
    addresses = [buffer.data_ptr() for buffer in compiled_vq.buffers()]
    for _ in range(3):
        x = torch.randn(4, 10, 8)
        a, b = plain(x), compiled(x)
        torch.testing.assert_close(b.quantized, a.quantized)
        assert torch.equal(b.indices, a.indices)
        torch.testing.assert_close(b.loss, a.loss)
    torch.testing.assert_close(compiled_vq.codebook, plain.codebook)
    assert [buffer.data_ptr() for buffer in compiled_vq.buffers()] == addresses


def test_fault_08_exports():
    vq = KohonenVQ(8, 64, codebook_dim=4, accept_image_fmap=True).eval()
    x = torch.randn(2, 8, 5, 5)
    program = torch.export.export(vq, (x,))
    assert all(torch.equal(a, b) for a, b in zip(program.module()(x), vq(x)))


# 9. Whether there is a process group is remembered from import; a module built before it never synchronizes.
# 10. Reviving codes hangs when one rank has no unmasked token.

DIM, SIZE, STEPS, WORLD = 4, 16, 5, 2


def distributed_vq(revival: bool) -> KohonenVQ:
    torch.manual_seed(0)
    return KohonenVQ(DIM, SIZE, kmeans_init=revival, threshold_ema_dead_code=0.5 if revival else 0.0)


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    modules = {"late": distributed_vq(False), "masked": distributed_vq(False), "revival": distributed_vq(True)}
    KohonenVQ(DIM, SIZE)(torch.randn(3, DIM))  # used before there is a group, too
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(rank)
    for step in range(STEPS):
        half = shifted(64, DIM, step).chunk(WORLD)[rank]
        modules["late"](half)
        mask = torch.full((32,), rank == 0)
        modules["masked"](half, mask=mask)
        modules["revival"](half, mask=mask)
    torch.save({name: vq.state_dict() for name, vq in modules.items()}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group and abort the interpreter's own way out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The states that two real processes end with."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def assert_same_on_both_ranks(two_ranks, name):
    first, second = (states[name] for states in two_ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.xdist_group("faults of ranks")
def test_fault_09_a_module_older_than_the_process_group_synchronizes(two_ranks):
    assert_same_on_both_ranks(two_ranks, "late")
    whole = distributed_vq(False)
    for step in range(STEPS):
        whole(shifted(64, DIM, step))
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(two_ranks[0]["late"][key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.xdist_group("faults of ranks")
def test_fault_10_a_rank_without_tokens_neither_hangs_nor_counts(two_ranks):
    assert_same_on_both_ranks(two_ranks, "masked")
    alone = distributed_vq(False)
    for step in range(STEPS):
        alone(shifted(64, DIM, step).chunk(WORLD)[0])
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(two_ranks[0]["masked"][key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.xdist_group("faults of ranks")
def test_fault_10_reviving_and_starting_codes_without_tokens_on_a_rank(two_ranks):
    assert_same_on_both_ranks(two_ranks, "revival")
    codes = two_ranks[0]["revival"]["codebooks.0.codes"]
    assert codes.isfinite().all()
    assert codes.mean(1).min() > 2  # all came from the one rank's data, none from the other's padding
    assert two_ranks[0]["revival"]["codebooks.0.step"] == STEPS


# 11. Activation checkpointing or gradient accumulation applies the update twice.


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"codebook_dim": 4, "rotation_trick": True}, {"kmeans_init": True}], ids=str)
def test_fault_11_checkpointing_updates_once(reentrant, options):
    torch.manual_seed(0)
    plain, again = KohonenVQ(8, 16, **options), KohonenVQ(8, 16, **options)
    again.load_state_dict(plain.state_dict())
    results = []
    for vq in (plain, again):
        torch.manual_seed(1)
        x = torch.randn(64, 8, requires_grad=True)
        weight = torch.randn(8, requires_grad=True)

        def block(x, vq=vq, weight=weight):
            quantized, _, loss = vq(x * weight)
            return (quantized * weight).square().mean() + loss

        for _ in range(2):
            (block(x) if vq is plain else checkpoint(block, x, use_reentrant=reentrant)).backward()
        results.append((x.grad, weight.grad))
    assert again.step == 2
    for key, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("revival", [0.0, 0.2])
def test_fault_11_accumulated_batches_are_one_update(revival):
    torch.manual_seed(0)
    whole, parts = (KohonenVQ(8, 16, threshold_ema_dead_code=revival) for _ in range(2))
    whole(shifted(96, 8, 0))  # or both would start from another first batch
    parts.load_state_dict(whole.state_dict())
    for step in range(1, 4):
        batch = shifted(96, 8, step)
        torch.manual_seed(step)
        whole(batch)
        first, second, last = batch.chunk(3)
        before = parts.codebook.clone()
        with parts.accumulate():
            parts(first)
            parts(second)
        assert torch.equal(parts.codebook, before)
        assert parts.step == step
        torch.manual_seed(step)
        parts(last)
        assert parts.step == step + 1
        if not revival:
            torch.testing.assert_close(parts.codebook, whole.codebook)
            torch.testing.assert_close(parts.codebook_of(0).counts, whole.codebook_of(0).counts)
    torch.testing.assert_close(parts.codebook_of(0).hits, whole.codebook_of(0).hits)


# 12. The threshold under which a code is dead is an absolute count: it depends on batch and world size.


@pytest.mark.parametrize("repeats", [1, 16])
def test_fault_12_dead_means_relative_to_the_mean_count(repeats):
    vq = KohonenVQ(1, 4, neighborhood="none", threshold_ema_dead_code=0.25, decay=0.5)
    vq.codebook = torch.tensor([[0.0], [10.0], [100.0], [30.0]])
    book = vq.codebook_of(0)
    book.counts.copy_(repeats * torch.tensor([8.0, 8.0, 2.0, 4.0]))
    book.sums.copy_(book.codes * book.counts[:, None])
    vq(torch.tensor([0.0] * 8 + [10.0] * 8 + [30.0] * 4)[:, None].repeat(repeats, 1))
    # Counts are now (8, 8, 1, 4) times the size of the batch; under a quarter of their mean, 5.25, is only the third.
    torch.testing.assert_close(vq.codebook[[0, 1, 3], 0], torch.tensor([0.0, 10.0, 30.0]))
    assert vq.codebook[2, 0] <= 30


# 13. N x K distances and one-hots exist in memory, several times over.


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_fault_13_no_tensor_of_vectors_times_codes(metric):
    n, size = 32_768, 4096
    vq = KohonenVQ(4, size, metric=metric)
    x = torch.randn(n, 4, requires_grad=True)

    def run():
        quantized, _, loss = vq(x)
        (quantized.sum() + loss).backward()

    assert largest_tensor(run) <= n * size // 32


# 14. A prime K becomes a K x 1 "2-D" grid; a tuple as grid raises; BCHW input is flattened wrongly; a K x K matrix.


def test_fault_14_a_prime_number_of_codes_is_no_line():
    assert KohonenVQ(8, 509).grid == Grid((21, 25), size=509)
    assert KohonenVQ(8, 509, grid=509).grid.shape == (509,)  # a line is a choice, not an accident


def test_fault_14_a_grid_may_be_a_tuple():
    for grid in ((4, 8), [4, 8], Grid((4, 8))):
        assert KohonenVQ(8, 32, grid=grid).grid.shape == (4, 8)


def test_fault_14_feature_maps_are_not_flattened_wrongly():
    vq = KohonenVQ(6, 16).eval()
    x_BCHW = torch.randn(2, 6, 4, 5)
    with pytest.raises(ValueError, match=r"\(2, 6, 4, 5\) must end in dim = 6; .*accept_image_fmap=True"):
        vq(x_BCHW)
    images = KohonenVQ(6, 16, accept_image_fmap=True).eval()
    images.load_state_dict(vq.state_dict())
    quantized, indices, _ = images(x_BCHW)
    for b, i, j in ((0, 0, 0), (0, 3, 1), (1, 2, 4)):
        distances = (vq.codebook - x_BCHW[b, :, i, j]).square().sum(1)
        assert indices[b, i, j] == distances.argmin()
        assert torch.equal(quantized[b, :, i, j], vq.codebook[indices[b, i, j]])


@pytest.mark.parametrize("neighborhood", ["hard", "gaussian", "exponential"])
def test_fault_14_no_matrix_of_codes_times_codes(neighborhood):
    size = 65_536
    vq = KohonenVQ(2, size, neighborhood=neighborhood)
    x = torch.randn(16, 2)
    assert largest_tensor(lambda: vq(x)) <= size * size // 256


# 15. Revived codes are overwritten in the same step; after a k-means start sums and counts are on different scales.


def test_fault_15_revived_codes_stay_where_they_were_put():
    torch.manual_seed(0)
    vq = KohonenVQ(2, 4, neighborhood="none", threshold_ema_dead_code=0.5)
    vq.codebook = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0], [50.0, 50.0]])
    book = vq.codebook_of(0)
    book.counts.copy_(torch.tensor([10.0, 0.1, 10.0, 10.0]))
    book.sums.copy_(vq.codebook * book.counts[:, None])
    batch = torch.tensor([[3.0, 4.0], [4.0, 3.0]])
    vq(batch)
    # The mean count is (0.99 * 30.1 + 0.01 * 2) / 4; the revived code gets it, with a sum to match.
    revived = vq.codebook[1].clone()
    assert any(torch.equal(revived, x) for x in batch)
    assert book.counts[1] == pytest.approx(7.45475, rel=1e-4)
    torch.testing.assert_close(book.sums[1], revived * book.counts[1])
    # At the next step it is chosen for its vector and for the other, which it follows by 1% of the counts.
    vq(batch)
    torch.testing.assert_close(vq.codebook[1], revived, rtol=0, atol=0.01)


def test_fault_15_kmeans_start_has_sums_and_counts_that_agree():
    torch.manual_seed(0)
    vq = KohonenVQ(4, 16, kmeans_init=True, neighborhood="none")
    batch = shifted(512, 4, 0)
    vq(batch)
    book = vq.codebook_of(0)
    torch.testing.assert_close(book.sums / book.counts[:, None], vq.codebook, rtol=1e-3, atol=1e-3)
    after_start = vq.codebook.clone()
    vq(batch)  # codes that fit the batch hardly move when they see it again
    assert (vq.codebook - after_start).norm(dim=1).max() < 0.1
