"""What runs on a Ray cluster, of three nodes here: one of them is lost on the way, and nothing else is."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import scipy.sparse
import torch
from PIL import Image

pytest.importorskip("ray", reason="ray is not installed: pip install 'topovq[ray]'")
if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
    pytest.skip("the processes of a node are found in Linux's /proc", allow_module_level=True)

from ray_cluster import Nodes, three_nodes

from topovq.cli import main
from topovq.cluster import check_reachable, join_ray
from topovq.distributed import World
from topovq.loading import load
from topovq.som import Rows, SelfOrganizingMap
from topovq.tokenizer import tokens
from topovq.tokenizer.models import VQVAE
from topovq.tokenizer.ray_tokens import decode_on_ray, encode_on_ray
from topovq.tokenizer.tokens import decode, encode
from topovq.tokenizer.training.record import read_record

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(240)]
SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 16, "code_dim": 8}
SHARDS, EACH, BAD = 5, 12, (3, 4)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Connected once: Ray has other processes for each connection, which must import everything again."""
    with three_nodes() as nodes, join_ray(nodes.address):
        yield nodes


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, five tar files of images that take a while to decode, one of which is broken, and their tokens as
    torchrun writes them."""
    folder = tmp_path_factory.mktemp("work")
    torch.manual_seed(0)
    VQVAE(**SMALL).save_pretrained(folder / "run")
    (folder / "shards").mkdir()
    generator = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOPOVQ_CACHE", str(folder / "cache"))
        for shard in range(SHARDS):
            with tarfile.open(folder / "shards" / f"s{shard}.tar", "w") as tar:
                for number in range(EACH):
                    data = b"\x89PNG\r\n\x1a\n and nothing else" if (shard, number) == BAD else picture(generator)
                    member = tarfile.TarInfo(f"{number:04d}.png")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        for rank in range(SHARDS):
            patch.setattr(tokens, "join_world", lambda device: contextlib.nullcontext(World(rank, SHARDS, CPU)))  # noqa: B023
            encode(folder / "run", folder / "shards", folder / "torchrun" / "t.parquet", batch_size=4, workers=0)
        yield folder


CPU = torch.device("cpu")


def picture(generator: np.random.Generator) -> bytes:
    small_HW3 = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small_HW3.repeat(120, 0).repeat(120, 1)).save(file, "PNG")
    return file.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, hidden ones as well."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_node_is_lost_while_tokenizing(nodes: Nodes, work: Path, tmp_path: Path) -> None:
    def writes(process: int) -> bool:
        return any(tmp_path.glob(f".t-*-{process}.tmp"))

    kept = tmp_path / "t-00001-of-00005.parquet"  # of a run that was cut off
    shutil.copy(work / "torchrun" / kept.name, kept)
    before = kept.stat()
    lost: list[bool] = []
    killer = threading.Thread(target=lambda: lost.append(nodes.lose(writes)))
    killer.start()
    options = {"address": nodes.address, "device": "cpu", "batch_size": 4}
    done = encode_on_ray(work / "run", work / "shards", tmp_path / "t.parquet", **options)
    killer.join()
    assert lost == [True]
    assert contents(tmp_path) == contents(work / "torchrun")
    assert kept.stat() == before
    assert (done.images, done.kept) == (SHARDS * EACH - 1, 1)
    assert done.skipped == {"s3/0004.png": "not an image of a known format"}


def test_sigterm_leaves_no_half_written_file(nodes: Nodes, work: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "topovq", "encode", work / "run", work / "shards", "-o", tmp_path / "t.parquet"]
    command += ["--engine", "ray", "--address", nodes.address, "--device", "cpu", "--batch-size", "4"]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None and not any(tmp_path.glob(".*.tmp")):
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert not any(tmp_path.glob(".*"))


def test_images_of_which_none_can_be_read_leave_no_folder(nodes: Nodes, work: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"no image of .*bad can be read \(1 tried\); the first is a\.png"):
        encode_on_ray(work / "run", tmp_path / "bad", tmp_path / "new" / "t.parquet", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_what_an_actor_left_of_images_goes(
    nodes: Nodes, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_ended(*given: object) -> Iterator[dict[str, int]]:
        (tmp_path / "out" / "s0").mkdir(parents=True)
        with subprocess.Popen([sys.executable, "-c", LEAVES, tmp_path / "out" / "s0" / "a.png"]):
            pass
        assert any(tmp_path.rglob(".*.tmp"))
        yield {"images": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr("topovq.tokenizer.ray_tokens._run", is_ended)
    with pytest.raises(KeyboardInterrupt):
        decode_on_ray(work / "run", work / "torchrun" / "t.parquet", tmp_path / "out", device="cpu")
    assert not any(tmp_path.rglob(".*"))


LEAVES = """if True:
    import os, sys
    from pathlib import Path
    from topovq.storage import atomic_file
    with atomic_file(Path(sys.argv[1])) as file:
        file.write_bytes(b"half")
        os._exit(1)
"""


def test_images_come_back_from_their_tokens_on_ray(
    nodes: Nodes, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, made = str(work / "run"), str(work / "torchrun" / "t.parquet")
    main(["decode", run, made, "-o", str(tmp_path / "ray"), "--engine", "ray", "--actors", "2", "--device", "cpu"])
    assert capsys.readouterr().out.split()[:3] == [str(SHARDS * EACH - 1), "images", "decoded"]
    assert decode(run, made, tmp_path / "here", device="cpu") == SHARDS * EACH - 1
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    with pytest.raises(FileExistsError, match=r"0000\.png is there already"):
        decode_on_ray(run, made, tmp_path / "ray", device="cpu")


def test_a_node_is_lost_in_a_fit(nodes: Nodes, work: Path) -> None:
    """The codes are those of one machine, bit for bit; so are the places of the rows."""
    table = table_of(work)
    options = {"shape": (12, 12), "max_iter": 3, "standardize": True}
    here = SelfOrganizingMap(**options).fit(Rows(table, columns=["a", "b", "c", "d"], weight="w"))

    def asks(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::_ask")
        except FileNotFoundError:
            return False

    nodes.complete()
    lost: list[bool] = []
    killer = threading.Thread(target=lambda: lost.append(nodes.lose(asks)))
    killer.start()
    there = SelfOrganizingMap(**options, engine="ray").fit(Rows(table, columns=["a", "b", "c", "d"], weight="w"))
    killer.join()
    assert lost == [True]
    assert np.array_equal(there.codes_, here.codes_)
    assert there.quantization_errors_.tolist() == here.quantization_errors_.tolist()
    assert there.topographic_error_ == here.topographic_error_
    assert np.array_equal(there.hits_, here.hits_)
    x_ND = np.stack([parquet.read_table(table)[name].to_numpy() for name in "abcd"], 1)
    assert np.array_equal(there.predict(x_ND), here.predict(x_ND))
    some, weight_N = Rows(table, start=65_536, stop=150_000), np.linspace(0, 2, 150_000 - 65_536)
    assert there.score(some, sample_weight=weight_N) == here.score(some, sample_weight=weight_N)
    with pytest.raises(ValueError, match="has no column 'z'"):
        SelfOrganizingMap(**options, engine="ray").fit(Rows(table, columns=["z"]))
    with pytest.raises(ValueError, match="takes no sparse matrix"):
        SelfOrganizingMap(**options, engine="ray").fit(scipy.sparse.eye(9, format="csr"))
    with pytest.raises(ValueError, match="but the Ray cluster has no GPU; use cpu or auto"):
        SelfOrganizingMap(**options, engine="ray", device="cuda").fit(x_ND)
    with pytest.raises(ValueError, match="engine='ray' is for rule='batch', but rule='online'"):
        SelfOrganizingMap(rule="online", engine="ray").fit(x_ND)
    with pytest.raises(ValueError, match="engine='rai' is unknown; choose one of 'local', 'ray'"):
        SelfOrganizingMap(engine="rai").fit(x_ND)


def test_map_and_place_on_ray(nodes: Nodes, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = table_of(work)
    for engine, tables in (("local", [folder]), ("ray", sorted(folder.iterdir()))):
        out = str(tmp_path / engine)
        how = ["--engine", engine, "--device", "cpu"]
        main(["map", *map(str, tables), "-o", out, "--columns", "a", "b", "--grid", "6x5", "--passes", "2", *how])
        main(["place", out, *map(str, tables), "-o", f"{out}.parquet", *how])
    capsys.readouterr()
    maps = [load(tmp_path / engine) for engine in ("local", "ray")]
    assert np.array_equal(maps[0].codes_, maps[1].codes_)
    assert [som.engine for som in maps] == ["local", "local"]
    assert parquet.read_table(tmp_path / "ray.parquet").equals(parquet.read_table(tmp_path / "local.parquet"))


def table_of(work: Path) -> Path:
    """200,000 rows, some of them with missing values, in a folder of two files."""
    folder = work / "table"
    if not folder.exists():
        generator = np.random.default_rng(0)
        folder.mkdir()
        for name in ("1.parquet", "2.parquet"):
            x_ND = generator.normal(size=(100_000, 4)).astype(np.float32)
            x_ND[::11, 1] = np.nan
            columns = dict(zip("abcd", x_ND.T)) | {"w": generator.random(100_000), "city": ["Trento"] * 100_000}
            parquet.write_table(pyarrow.table(columns), folder / name, row_group_size=30_000)
    return folder


def test_the_example_trains_on_ray(nodes: Nodes, tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "train_on_ray.py"
    environment = os.environ | {"RAY_ADDRESS": nodes.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, example, tmp_path / "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, middle, last = map(float, re.search(r"losses ([\d.]+), ([\d.]+), ([\d.]+)", done.stdout).groups())
    assert last < middle < first
    config = read_record(tmp_path / "run" / "record.jsonl")[0]
    assert config["world_size"] == 2


def test_what_ray_cannot_do_is_said(nodes: Nodes, work: Path, tmp_path: Path) -> None:
    here, options = (work / "run", work / "shards"), {"address": nodes.address, "device": "cpu"}
    with pytest.raises(ValueError, match=r"actors=9 of 1 CPU each do not fit the Ray cluster: it has . CPUs, 0 GPUs"):
        encode_on_ray(*here, tmp_path / "t.parquet", actors=9, **options)
    with pytest.raises(ValueError, match="but the Ray cluster has no GPU; use cpu or auto"):
        encode_on_ray(*here, tmp_path / "t.parquet", address=nodes.address, device="cuda")
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        encode_on_ray(*here, tmp_path / "t.parquet", batch_size=0, **options)
    (tmp_path / "t-00000-of-00002.parquet").touch()
    with pytest.raises(FileExistsError, match=r"t-00000-of-00002\.parquet is there already, and none of the 5 files"):
        encode_on_ray(*here, tmp_path / "t.parquet", **options)
    torch.manual_seed(1)
    VQVAE(**SMALL).save_pretrained(tmp_path / "other")
    with pytest.raises(FileExistsError, match=r"t-00000-of-00005\.parquet is there already; --force"):
        encode_on_ray(tmp_path / "other", work / "shards", work / "torchrun" / "t.parquet", **options)
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["t-00000-of-00002.parquet"]


def test_an_address_without_ray_is_refused_in_one_sentence(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["encode", str(work / "run"), str(work / "shards"), "-o", str(tmp_path / "t.parquet"), "--engine", "ray"]
    with socket.create_server(("127.0.0.1", 0)) as door:
        closed = f"127.0.0.1:{door.getsockname()[1]}"
    with pytest.raises(SystemExit) as ended:
        main([*command, "--address", closed])
    assert ended.value.code == 2
    assert f"there is no Ray cluster at address='{closed}': Connection refused" in " ".join(
        capsys.readouterr().err.split()
    )
    with socket.create_server(("127.0.0.1", 0)) as door:
        other = f"127.0.0.1:{door.getsockname()[1]}"
        answer = threading.Thread(target=lambda: door.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"))
        answer.start()
        with pytest.raises(ValueError, match="what listens there is something else"):
            check_reachable(other)
        answer.join()
    for wrong in ("127.0.0.1", "here:port", "host:99999"):
        with pytest.raises(
            ValueError, match=rf"address='{wrong}' is not of the form HOST:PORT, such as 10\.0\.0\.1:6379"
        ):
            check_reachable(wrong)
    with pytest.raises(SystemExit):
        main([*command[:-2], "--actors", "2"])
    assert "--actors is for --engine ray, but the engine is local" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_address_beside_the_cluster_at_hand_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("topovq.cluster.check_reachable", lambda address: None)
    told = f"connected to Ray at {nodes.address} already, and not at address='h:1'"
    with pytest.raises(ValueError, match=told), join_ray("h:1"):
        pass
    with join_ray(nodes.address):
        assert ray.is_initialized()
    assert ray.is_initialized(), "what was connected before stays so"


def test_a_cluster_that_asks_for_its_token_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself says that it failed to connect, and why in its log."""
    import ray

    def refuse(*address: str, **options: object) -> None:
        cause = "Last connection error: InvalidAuthToken: Authentication token is missing or incorrect."
        raise ConnectionError("Failed to connect to Ray cluster at h:1") from RuntimeError(cause)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("topovq.cluster.check_reachable", lambda address: None)
    with pytest.raises(ValueError, match="'h:1' asks for its token: set RAY_AUTH_MODE=token"), join_ray("h:1"):
        pass


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ImportError, match=r"ray is not installed; install it with: pip install 'topovq\[ray\]'"),
        join_ray(),
    ):
        pass
