"""Files of torch.export and AOTInductor hold evaluation as plain operations: they run where topovq is not installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from autoencoder import Closest, ImageEncoder
from torch import nn
from torch.export import Dim
from warm import python

from topovq import GradientVQ, KohonenVQ, ResidualVQ, SoftKohonenVQ

QUANTIZERS = {
    "map": lambda: KohonenVQ(8, 64, accept_image_fmap=True),
    "cosine": lambda: KohonenVQ(8, 64, accept_image_fmap=True, use_cosine_sim=True),
    "dot": lambda: KohonenVQ(8, 64, accept_image_fmap=True, metric="dot"),
    "heads": lambda: KohonenVQ(
        8, 64, accept_image_fmap=True, heads=2, codebook_dim=3, separate_codebook_per_head=True, rotation_trick=True
    ),
    "heads share": lambda: KohonenVQ(8, 50, accept_image_fmap=True, heads=2, codebook_dim=4),
    "two blocks": lambda: KohonenVQ(8, 4100, accept_image_fmap=True),
    "gradient": lambda: GradientVQ(8, 64, accept_image_fmap=True, neighborhood="hard"),
    "soft": lambda: SoftKohonenVQ(8, 64, accept_image_fmap=True),
    "residual": lambda: ResidualVQ(8, 64, num_quantizers=3, accept_image_fmap=True),
    "beams": lambda: ResidualVQ(8, 64, num_quantizers=3, beam_size=3, codebook_dim=4, accept_image_fmap=True),
    "closest": lambda: Closest(KohonenVQ(8, 64, accept_image_fmap=True, rotation_trick=True)),
    "closest of two blocks": lambda: Closest(KohonenVQ(8, 4100, accept_image_fmap=True, metric="dot")),
}
ANY_IMAGES = {"image": {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}
ANY_ROWS = {"x": {0: Dim.DYNAMIC}}

WITHOUT_TOPOVQ = """
import sys
sys.modules["topovq"] = None  # an import raises
import torch
folder = sys.argv[1]
for file in sys.argv[2:]:
    exported = file.startswith("exported")
    run = torch.export.load(folder + file).module() if exported else torch._inductor.aoti_load_package(folder + file)
    image, *expected = torch.load(folder + file + ".expected")
    quantized, indices, loss = run(image)
    assert torch.equal(indices, expected[1])
    assert torch.equal(quantized, expected[0])
    assert torch.allclose(loss, expected[2])
    print(file)
"""

RUNNER = """
#include <ATen/ops/arange.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>

int main(int, char** arguments) {
  torch::inductor::AOTIModelPackageLoader encoder(arguments[1]);
  std::vector<at::Tensor> image = {at::arange(2 * 3 * 8 * 12).to(at::kFloat).sin().reshape({2, 3, 8, 12})};
  at::Tensor indices = encoder.run(image)[1].flatten().contiguous();
  std::printf("[");
  for (int64_t i = 0; i < indices.numel(); i++) std::printf(i ? ",%ld" : "%ld", indices.data_ptr<int64_t>()[i]);
  std::printf("]");
}
"""


def own_operations(program: torch.export.ExportedProgram) -> set[str]:
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return {str(node.target) for graph in graphs for node in graph.nodes if "topovq" in str(node.target)}


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_evaluation_is_plain_operations_for_images_of_any_size(name, strict):
    torch.manual_seed(0)
    encoder = ImageEncoder(QUANTIZERS[name]()).eval()
    program = torch.export.export(encoder, (torch.randn(2, 3, 16, 16),), dynamic_shapes=ANY_IMAGES, strict=strict)
    assert own_operations(program) == set()
    image = torch.randn(3, 3, 24, 40)
    quantized, indices, loss = program.module()(image)
    expected = encoder(image)
    assert torch.equal(indices, expected[1])
    assert torch.equal(quantized, expected[0])
    assert torch.allclose(loss, expected[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype):
    torch.manual_seed(0)
    vq = KohonenVQ(16, 50, codebook_dim=8).to(dtype).eval()
    x = torch.randn(300, 16, dtype=dtype)
    exported = torch.export.export(vq, (x,), dynamic_shapes=ANY_ROWS).module()(x)
    for one, two in zip(exported, vq(x)):
        assert one.dtype == two.dtype
        assert torch.allclose(one, two)
    assert torch.equal(exported[1], vq(x).indices)


def test_autocast_does_not_reach_the_search():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), KohonenVQ(16, 500, neighborhood="none")).eval()
    x = torch.randn(300, 16)
    with torch.autocast("cpu", torch.bfloat16):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.DYNAMIC},))
        assert own_operations(program) == set()
        assert torch.equal(program.module()(x)[1], model(x).indices)


def test_the_lowest_index_wins_a_tie_and_a_broken_vector_gets_a_valid_one():
    vq = KohonenVQ(3, 5, neighborhood="none").eval()
    vq.codebook = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [9, 9, 9]]).float()
    x = torch.tensor([[0.1, 0, 0], [0.9, 0, 0], [torch.nan, 0, 0], [torch.inf, 0, 0], [8, 9, 9], [0.5, 0, 0]])
    _, indices, loss = torch.export.export(vq, (x,), dynamic_shapes=ANY_ROWS).module()(x)
    assert indices[[0, 1, 4, 5]].tolist() == [0, 1, 4, 0]
    assert 0 <= indices.min() <= indices.max() < 5
    assert torch.allclose(loss, torch.tensor((0.01 + 0.01 + 1 + 0.25) / (4 * 3)))  # of the four that are finite


@pytest.mark.parametrize("size", [5, 50, 4100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_closest_codes_of_all_kinds_of_vectors(size, dtype):
    torch.manual_seed(0)
    closest = Closest(KohonenVQ(16, size, neighborhood="none")).to(dtype).eval()
    x = torch.randn(300, 16, dtype=dtype) + 3
    x[1, 2], x[7, 0] = torch.nan, torch.inf
    _, indices, _ = torch.export.export(closest, (x,), dynamic_shapes=ANY_ROWS).module()(x)
    assert torch.equal(indices, closest(x)[1])
    assert (indices.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    "given",
    [{"mask": torch.arange(40).view(4, 10) % 3 > 0}, {"lens": torch.tensor([1, 10, 3, 4])}],
    ids=["mask", "lens"],
)
def test_masks(given):
    torch.manual_seed(0)
    vq = KohonenVQ(16, 50, heads=2, codebook_dim=5).eval()
    x = torch.randn(4, 10, 16)
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    shapes |= {name: dict.fromkeys(range(value.ndim), Dim.DYNAMIC) for name, value in given.items()}
    program = torch.export.export(vq, (x,), given, dynamic_shapes=shapes)
    assert own_operations(program) == set()
    for one, two in zip(program.module()(x, **given), vq(x, **given)):
        assert torch.allclose(one, two)


def test_tokens_decode():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vq = ResidualVQ(8, 64, num_quantizers=2, accept_image_fmap=True)

        def forward(self, tokens):
            return self.vq.get_output_from_indices(tokens)

    torch.manual_seed(0)
    decoder = Decoder().eval()
    tokens = torch.randint(-1, 64, (2, 5, 4, 2))
    program = torch.export.export(decoder, (tokens,), dynamic_shapes={"tokens": dict.fromkeys(range(3), Dim.DYNAMIC)})
    assert own_operations(program) == set()
    more = torch.randint(-1, 64, (3, 7, 2, 2))
    assert torch.equal(program.module()(more), decoder(more))


def export_encoder(quantizer, path, compiled=False):
    """Write an encoder to `path`, and an image with what it makes of it beside it; the encoder."""
    torch.manual_seed(0)
    encoder = ImageEncoder(quantizer).eval()
    program = torch.export.export(encoder, (torch.randn(2, 3, 16, 16),), dynamic_shapes=ANY_IMAGES)
    if compiled:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        torch.export.save(program, path)
    image = torch.randn(3, 3, 24, 40)
    torch.save((image, *(each.detach() for each in encoder(image))), f"{path}.expected")
    return encoder


def run_without_topovq(folder, *files):
    done = python("-c", WITHOUT_TOPOVQ, f"{folder}/", *files)
    assert done.stdout.split() == list(files), done.stderr[-3000:]


def test_exported_files_run_where_topovq_cannot_be_imported(tmp_path):
    files = {f"exported-{name}.pt2": name for name in ("map", "beams", "closest")}
    for file, name in files.items():
        export_encoder(QUANTIZERS[name](), tmp_path / file)
    run_without_topovq(tmp_path, *files)


COMPILED = pytest.mark.xdist_group("compiled file")  # each process that makes it has g++ at work for 15 s


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with compiled.pt2, and the encoder that is in it."""
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor compiles with g++, which is not here")
    folder = tmp_path_factory.mktemp("files")
    return folder, export_encoder(QUANTIZERS["map"](), folder / "compiled.pt2", compiled=True)


@COMPILED
def test_a_compiled_file_runs_where_topovq_cannot_be_imported(compiled):
    folder, _ = compiled
    run_without_topovq(folder, "compiled.pt2")


@COMPILED
def test_a_program_in_cpp_runs_a_file(compiled, tmp_path):
    folder, encoder = compiled
    torch_folder = Path(torch.__file__).parent
    source = tmp_path / "runner.cpp"
    source.write_text(RUNNER)
    includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["g++", "-std=c++20", abi, *includes, str(source), "-o", str(tmp_path / "runner"), *libraries]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-3000:]
    command = [str(tmp_path / "runner"), str(folder / "compiled.pt2")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    image = torch.arange(2 * 3 * 8 * 12).float().sin().reshape(2, 3, 8, 12)
    assert json.loads(done.stdout) == encoder(image)[1].flatten().tolist(), done.stderr[-3000:]
