"""The JSON API: answers against the model itself, refusals with a sentence, and its own description (schemathesis)."""

from __future__ import annotations

import base64
import io
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
import torch
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from small_runs import make_run

from topovq.cli import main
from topovq.grid import Grid
from topovq.prior import Prior
from topovq.prior.generate import Pair
from topovq.tokenizer.training import load_run
from topovq.view import explorer
from topovq.view.explorer.app import create_app
from topovq.view.explorer.schemas import MOST_UPLOAD_BYTES
from topovq.view.explorer.sheets import MOST_STOPS, line
from topovq.view.film import Film
from topovq.view.report import study

pytestmark = pytest.mark.xdist_group("explorer")

LOOPBACK = ("127.0.0.1", "localhost", "testserver")


@pytest.fixture(scope="module")
def app(runs: list[Path], folder: Path) -> Any:
    studies = [study(run, limit=16) for run in runs]
    torch.manual_seed(0)
    pair = Pair(Prior.of(studies[0].model, dim=16, layers=1, heads=2, classes=3), studies[0].model)
    return create_app(studies, folder, LOOPBACK, films=[Film(run) for run in runs], pair=pair)


@pytest.fixture(scope="module")
def client(app: Any) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def pixels(uri: str) -> np.ndarray:
    kind, data = uri.split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def refused(answer: Any, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["detail"]
    for word in words:
        assert word in answer.json()["detail"]
    assert "Traceback" not in answer.text


def png(width: int, height: int) -> bytes:
    """A black image of any size, a few bytes long: what a decompression bomb is."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width // 8 + 1) * min(height, 1000)), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_runs_maps_and_images(client: TestClient) -> None:
    answer = client.get("/api/run").json()
    assert [run["name"] for run in answer["runs"]] == ["kohonen", "ema"]
    top, bottom = answer["runs"][0]["maps"]
    assert (top["name"], top["height"], top["width"], top["pixels"]) == ("top", 4, 4, 8)
    assert (bottom["name"], bottom["height"], bottom["width"], bottom["pixels"]) == ("bottom", 8, 8, 4)
    assert top["grid"] == {"shape": [4, 6], "topology": "hexagonal", "wrap": [False, False]}
    assert {s["name"]: s["count"] for s in answer["images"]} == {"validation": 16, "samples": 10, "folder": 3}
    view = client.get("/api/map", params={"run": 0, "map": 1}).json()
    assert len(view["hits"]) == len(view["places"]) == len(view["distances"]) == 24
    assert sum(view["hits"]) == 16 * 64
    side, columns = view["sheet"]["side"], view["sheet"]["columns"]
    assert pixels(view["sheet"]["image"]).shape == (side * -(-24 // columns), side * columns, 3)


def test_encode_shift_and_decode_are_the_models(client: TestClient, runs: list[Path]) -> None:
    model = load_run(runs[0])
    encoded = client.post("/api/encode", json={"run": 0, "set": "validation", "index": 2}).json()
    image = torch.from_numpy(pixels(encoded["original"]).copy()).permute(2, 0, 1)[None]
    tokens = model.encode(image)
    assert encoded["tokens"] == [level[0].tolist() for level in tokens]
    ours = model.decode(tokens)[0].permute(1, 2, 0).numpy()
    assert np.array_equal(pixels(encoded["reconstruction"]), ours)

    shifted = client.post("/api/shift", json={"tokens": encoded["tokens"], "offsets": [[0, 0], [1, -2]]}).json()
    quantizers: Any = model.quantizers
    moved = (tokens[0], quantizers[1].grid.shift(tokens[1], (1, -2)))
    assert shifted["tokens"] == [level[0].tolist() for level in moved]
    assert np.array_equal(pixels(shifted["image"]), model.decode(moved)[0].permute(1, 2, 0).numpy())
    again = client.post("/api/decode", json={"tokens": shifted["tokens"]}).json()
    assert again["image"] == shifted["image"]


def test_a_sent_image_is_the_same_as_the_picked_one(client: TestClient, folder: Path) -> None:
    sent = client.post("/api/encode", json={"data": base64.b64encode((folder / "0.png").read_bytes()).decode()})
    picked = client.post("/api/encode", json={"set": "folder", "index": 0})
    assert sent.json() == picked.json()
    assert pixels(sent.json()["original"])[0, 0].tolist() == [200, 30, 30]
    shown = client.get("/api/images/folder/1")
    assert shown.headers["content-type"] == "image/png"
    assert np.asarray(Image.open(io.BytesIO(shown.content)))[0, 0].tolist() == [30, 30, 200]


def test_what_is_no_image_or_too_large_is_refused(client: TestClient) -> None:
    def send(data: bytes) -> Any:
        return client.post("/api/encode", json={"data": base64.b64encode(data).decode()})

    refused(send(b"hello"), 415, "no image of a known type")
    refused(send(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), 415, "no image")
    refused(send(png(30_000, 30_000)), 413, "more than 25,000,000 pixels", "scale it down")
    refused(send(png(6_000, 5_000)), 413, "6000 x 5000 pixels", "25,000,000", "scale it down")
    refused(send(bytes(MOST_UPLOAD_BYTES + 1)), 413, "8 MiB")
    refused(client.post("/api/encode", json={"data": "!!"}), 422, "not base64")
    refused(client.post("/api/encode", content=bytes(20 * 2**20)), 413, "MiB")

    def stream() -> Any:
        for _ in range(20):
            yield bytes(2**20)

    refused(client.post("/api/encode", content=stream(), headers={"content-type": "application/json"}), 413, "MiB")
    refused(client.post("/api/encode", json={"set": "folder", "index": 2}), 415, "no image")
    cut = png(60, 60)[:-16]
    refused(send(cut), 415, "cannot be decoded")


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page/../app.py",
        "/app.py",
        "/api/images/folder/..%2fnotes.txt",
        "/api/images/..%2f..%2fetc/0",
        "/api/images/folder//etc/passwd",
        "/api/images/folder/notes.txt",
        "/api/images/folder/3",
        "/api/images/folder/-1",
        "/api/images/run/0",
    ],
)
def test_nothing_else_can_be_read(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (404, 422), answer.text
    assert "secret" not in answer.text
    assert "root:" not in answer.text
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("shift", {"run": 9, "tokens": [], "offsets": []}, 404, "there is no run 9"),
        ("decode", {"tokens": [[[0]]]}, 422, "tokens of 1 maps were sent; the model has 2"),
        ("decode", {"tokens": [[[0] * 4] * 4, [[0] * 8] * 7]}, 422, "must be 8 rows of 8; got 7 rows of 8"),
        ("decode", {"tokens": [[[0] * 4] * 4, [[24] * 8] * 8]}, 422, "token 24 of map 1 is out of range"),
        ("decode", {"tokens": [[[-1] * 4] * 4, [[0] * 8] * 8]}, 422, "got -1"),
        ("decode", {"tokens": [[[0.5] * 4] * 4, [[0] * 8] * 8]}, 422, "got 0.5"),
        ("decode", {"tokens": [[[True] * 4] * 4, [[0] * 8] * 8]}, 422, "got True"),
        ("shift", {"tokens": [[[0] * 4] * 4, [[0] * 8] * 8], "offsets": [[1]]}, 422, "offsets of 1 maps"),
        ("shift", {"tokens": [[[0] * 4] * 4, [[0] * 8] * 8], "offsets": [[1], [1, 1]]}, 422, "must have 2 entries"),
        ("shift", {"tokens": [[[0] * 4] * 4, [[0] * 8] * 8], "offsets": [[10**6, 0], [0, 0]]}, 422, "10000"),
        ("encode", {"set": "../../etc", "index": 0}, 422, "'../../etc'"),
        ("encode", {"set": "validation", "index": 10**6}, 404, "there is no image 1000000"),
        ("encode", {"data": 5}, 422, "data: input should be a valid string"),
        ("encode", None, 422, ""),
    ],
)
def test_bad_values_are_named(client: TestClient, name: str, body: Any, status: int, words: str) -> None:
    refused(client.post(f"/api/{name}", json=body), status, words)


def test_other_mistakes(client: TestClient) -> None:
    refused(client.post("/api/encode", content="{", headers={"content-type": "application/json"}), 422, "JSON")
    refused(client.post("/api/encode", content='{"set": "validation", "index": 0}'), 422, "Content-Type")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)  # what Python has; packages that other tests import raise it
    try:
        deep = client.post("/api/encode", content="[" * 1_000, headers={"content-type": "application/json"})
    finally:
        sys.setrecursionlimit(limit)
    refused(deep, 400, "cannot be read as JSON")
    refused(client.delete("/api/run"), 405, "DELETE is not offered")
    refused(client.get("/api/map", params={"map": 5}), 404, "has no map 5")
    refused(client.get("/api/path", params={"start": 0, "end": 99}), 404, "no code 99")
    refused(client.get("/api/run", headers={"host": "evil.example"}), 421, "evil.example")
    assert client.get("/api/run", headers={"host": "localhost:8765"}).status_code == 200


def test_a_failure_inside_is_said_without_its_trace(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topovq.view.explorer.app.decoded_of", lambda *_: 1 / 0)
    broken = TestClient(app, raise_server_exceptions=False)
    refused(broken.post("/api/decode", json={"tokens": [[[0] * 4] * 4, [[0] * 8] * 8]}), 500, "the terminal")


def test_too_many_requests_at_once_are_told_to_come_back(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topovq.view.explorer.app.MOST_WAITING", 0)
    refused(client.post("/api/encode", json={"set": "validation", "index": 0}), 503, "try again")


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as stopped:
        main(["explore", str(runs[0])])
    assert stopped.value.code == 2
    assert "pip install 'topovq[view]'" in capsys.readouterr().err


def test_what_is_not_painted_out_stays(client: TestClient) -> None:
    assert client.get("/api/run").json()["prior"] is True
    told = client.get("/api/prior").json()
    assert (told["classes"], told["height"], told["width"]) == (["0", "1", "2"], 8, 8)
    tokens = client.post("/api/encode", json={"set": "validation", "index": 3}).json()["tokens"]
    painted = [[row > 5 or (row, column) == (2, 1) for column in range(8)] for row in range(8)]
    asked = {"tokens": tokens, "painted": painted, "number": 3, "seed": 7, "label": 1}
    first, *others = client.post("/api/draw", json=asked).json()["images"]
    assert len(others) == 2
    top, bottom = (np.array(a) != np.array(b) for a, b in zip(first["tokens"], tokens))
    assert not bottom[~np.array(painted)].any()
    assert bottom[6:].any()
    assert not top[2:3].any()  # a token of the coarser level stays where no part of it is painted
    assert not top[0].any()
    assert first["tokens"] != others[0]["tokens"]
    assert client.post("/api/draw", json=asked).json()["images"][0] == first
    decoded = client.post("/api/decode", json={"tokens": first["tokens"]}).json()
    assert decoded == first
    assert len(client.post("/api/draw", json={"number": 2}).json()["images"]) == 2
    refused(client.post("/api/draw", json={**asked, "label": 3}), 422, "no class 3; it has 3, counted from 0")
    refused(client.post("/api/draw", json={**asked, "temperature": -1}), 422, "temperature")
    guided = client.post("/api/draw", json={**asked, "guidance": 9}).json()["images"]
    assert guided[0]["tokens"] != first["tokens"]
    refused(client.post("/api/draw", json={"guidance": 2}), 422, "guidance 2 needs a label")
    refused(client.post("/api/draw", json={**asked, "guidance": 11}), 422, "guidance")
    refused(client.post("/api/draw", json={**asked, "number": 65}), 422, "number")
    refused(client.post("/api/draw", json={**asked, "painted": [[True]]}), 422, "painted must be 8 rows of 8")
    refused(client.post("/api/draw", json={**asked, "tokens": tokens[:1]}), 422, "tokens of 1 maps were sent")


def test_paths_by_hand(client: TestClient) -> None:
    assert line(Grid((4, 4)), 0, 15) == [0, 5, 10, 15]
    assert line(Grid((3, 5)), 0, 14) == [0, 1, 7, 13, 14]  # rows 0, 1/2, 1, 3/2, 2: halves round to even ones
    assert line(Grid(9, wrap=True), 1, 7) == [1, 0, 8, 7]
    assert line(Grid(5), 3, 3) == [3]
    assert len(line(Grid(1000), 0, 999)) == MOST_STOPS
    # 0 1 2 3 / 4 5 6 7 / 8: from 8 to 7 the straight way would lead over the empty place beside 8
    assert line(Grid((3, 4), size=9), 8, 7) == [8, 5, 6, 7]
    answer = client.get("/api/path", params={"map": 1, "start": 0, "end": 5}).json()
    assert answer["codes"] == [0, 1, 2, 3, 4, 5]
    assert pixels(answer["image"]).shape == (24, 6 * 24 + 5, 4)


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    names = [path.name for path in Path(explorer.__file__).parent.joinpath("page").iterdir()]
    assert {"app.js", "film.html", "style.css"} <= set(names)
    for name in ["", *names]:
        if name == "index.html":
            continue  # it stands at /
        answer = client.get(f"/{name}")
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text
        assert "https://" not in answer.text


def test_one_level_and_a_line_of_codes(tmp_path: Path) -> None:
    options = {"grid": [11], "wrap": True}
    run = make_run(tmp_path / "line", codebook_size=11, quantizer_options=options)
    client = TestClient(create_app([study(run, limit=4)]))
    encoded = client.post("/api/encode", json={"set": "samples", "index": 0}).json()
    moved = client.post("/api/shift", json={"tokens": encoded["tokens"], "offsets": [[3]]}).json()
    assert np.array_equal(np.array(moved["tokens"]), (np.array(encoded["tokens"]) + 3) % 11)


def test_a_map_whose_last_row_is_partly_empty(tmp_path: Path) -> None:
    run = make_run(tmp_path / "eleven", codebook_size=11, quantizer_options={"kmeans_init": True})
    client = TestClient(create_app([study(run, limit=4)]))
    view = client.get("/api/map").json()
    assert (view["map"]["codes"], view["map"]["grid"]["shape"]) == (11, [3, 4])
    assert len(view["places"]) == len(view["hits"]) == len(view["distances"]) == 11
    assert view["places"][-1] == [2, 2]
    encoded = client.post("/api/encode", json={"set": "samples", "index": 0}).json()
    moved = client.post("/api/shift", json={"tokens": encoded["tokens"], "offsets": [[9, 9]]}).json()
    last_row = np.array(encoded["tokens"]) >= 8
    assert np.array_equal(np.array(moved["tokens"]), np.where(last_row, 10, 7))
    assert client.get("/api/path", params={"start": 10, "end": 7}).json()["codes"] == [10, 7]


def test_ten_clients_are_all_served_and_memory_stays_flat(server: tuple[str, int]) -> None:
    address, pid = server
    served = [0] * 10
    least_when_first_done: list[int] = []

    def resident() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    def use(number: int, times: int) -> None:
        with httpx.Client(base_url=address, timeout=120) as client:
            encoded = client.post("/api/encode", json={"set": "validation", "index": number})
            for step in range(times):
                offsets = [[step % 3 - 1, number % 3 - 1]] * 2
                answer = client.post("/api/shift", json={"tokens": encoded.json()["tokens"], "offsets": offsets})
                assert answer.status_code == 200, answer.text
                served[number] += 1
        least_when_first_done.append(min(served))

    def all_at_once(times: int) -> None:
        served[:] = [0] * 10
        least_when_first_done.clear()
        threads = [threading.Thread(target=use, args=(number, times)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_at_once(10)
    before = resident()
    all_at_once(100)
    assert served == [100] * 10
    assert least_when_first_done[0] >= 25, "one client was done before another had had a quarter of its answers"
    assert resident() - before < 32 * 2**20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "there is no run at missing"),
        (["a", "b", "c"], "3 runs were given"),
        (["RUN", "--images", "nowhere"], "--images nowhere is not a folder"),
        (["RUN", "--port", "99999"], "cannot listen at 127.0.0.1:99999"),
    ],
)
def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str], runs: list[Path], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explore", *(str(runs[0]) if word == "RUN" else word for word in arguments)])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_every_request_is_documented(client: TestClient) -> None:
    documented = (Path(__file__).parents[3] / "docs" / "reference" / "view.md").read_text()
    for path, methods in client.get("/api/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in documented


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_api_keeps_to_its_own_description(app: Any, mode: GenerationMode) -> None:
    """Valid and invalid requests made up from the OpenAPI document: answers have the statuses and shapes it names."""
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and operation.path in ("/api/run", "/api/prior"):
            continue  # they take nothing, so nothing can be wrong with that
        if operation.path == "/api/animation":
            continue  # drawn slowly, and tests/view/test_film.py looks at it

        @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
        @given(case=operation.as_strategy(generation_mode=mode))
        def attempt(case: schemathesis.Case) -> None:
            # That tokens fit the model, and bytes are an image, a schema cannot say: refusing those is right.
            case.call_and_validate(headers={"Host": "localhost"}, excluded_checks=[positive_data_acceptance])
            tried.add(case.operation.path)

        attempt()
    assert {"/api/map", "/api/encode", "/api/decode", "/api/shift", "/api/path", "/api/tokens", "/api/frame"} <= tried
