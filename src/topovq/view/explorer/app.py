"""The application: typed JSON in and out (docs/reference/view.md), and the page's files.

The models run in a pool of a few threads with a first-come first-served queue, so no client starves. Large bodies and
images that are sent are read in a thread of their own beside them. What is kept is bounded: the views of `KEPT_VIEWS`
maps, and `MOST_WAITING` requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from topovq.metrics import psnr, ssim
from topovq.prior.generate import Pair
from topovq.storage import model_id
from topovq.tokenizer.atlas import Chart, enlarge, fields, from_planes, neighbor_distances, places, tiles
from topovq.tokenizer.models import as_levels, codes_of
from topovq.tokenizer.tokenfile import open_writer
from topovq.tokenizer.training.runs import model_folder
from topovq.view.explorer import schemas as api
from topovq.view.explorer.film_api import add_film
from topovq.view.explorer.gallery import Gallery, sent_image
from topovq.view.explorer.generate_api import add_generator
from topovq.view.explorer.problems import PROBLEMS, SMALL, ApiError, Gate, speak_plainly
from topovq.view.explorer.schemas import MapNumber, RunNumber
from topovq.view.explorer.sheets import line, sheet_of
from topovq.view.film import Film
from topovq.view.report import Study, with_channels
from topovq.view.report.images import data_uri, png_bytes, sheet, to_array

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
KEPT_VIEWS = 16
MOST_WAITING = 64
MOST_VALUES = 1000  # of a request, beside tokens
MOST_BODY = api.MOST_UPLOAD_BYTES * 4 // 3 + 2**20
LARGEST_TILE = 16  # pixels a code is shown with on the map

T = TypeVar("T")


def create_app(
    studies: list[Study],
    images: Path | None = None,
    hosts: Collection[str] | None = None,
    token: str | None = None,
    films: Sequence[Film] = (),
    pair: Pair | None = None,
) -> FastAPI:
    """The application for runs already looked at; `images`: a folder to pick from, `hosts`: the names it answers to,
    `token`: what every request must bring, `films`: those of the runs, where it shows them, `pair`: a prior of the
    first run and its tokenizer."""
    cores = os.cpu_count() or 1
    pool = ThreadPoolExecutor(max_workers=min(4, cores), thread_name_prefix="model")
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")
    gallery = Gallery(studies, images)
    app = bare_app(hosts, token)
    waiting = {pool: 0, reader: 0}

    async def in_turn(work: Callable[[], T], lane: ThreadPoolExecutor = pool) -> T:
        """Run `work` when its turn has come."""
        if waiting[lane] >= MOST_WAITING:
            raise HTTPException(503, "the explorer has too many requests waiting; try again in a moment")
        waiting[lane] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane, work)
        finally:
            waiting[lane] -= 1

    most_values = MOST_VALUES + 2 * max(sum(chart.shape[0] * chart.shape[1] for chart in s.maps) for s in studies)

    async def parsed(body: bytes) -> Any:
        values = sum(map(body.count, (b",", b"[", b"{")))
        if values > most_values:
            raise HTTPException(413, f"the request has {values:,} values; the models here need {most_values:,} at most")
        return json.loads(body) if len(body) <= SMALL else await in_turn(lambda: json.loads(body), reader)

    app.router.route_class = route_with(parsed)

    def study_of(run: int) -> Study:
        if run >= len(studies):
            raise ApiError(404, f"there is no run {run}; there are {len(studies)}, counted from 0")
        return studies[run]

    def chart_of(run: int, number: int) -> tuple[Study, Chart]:
        study = study_of(run)
        if number >= len(study.maps):
            raise ApiError(404, f"run {run} has no map {number}; it has {len(study.maps)}, counted from 0")
        return study, study.maps[number]

    @lru_cache(maxsize=KEPT_VIEWS)
    def view(run: int, number: int) -> api.MapView:
        study, chart = chart_of(run, number)
        return map_view(study, number, chart)

    @app.get("/api/run", responses=PROBLEMS)
    async def runs() -> api.Runs:
        """The runs, their maps, and the images that can be picked."""
        has_film = [len(film.steps()) > 2 for film in films] or [False] * len(studies)
        infos = [run_info(s, film) for s, film in zip(studies, has_film)]
        return api.Runs(runs=infos, images=gallery.sets, prior=pair is not None)

    @app.get("/api/map", responses=PROBLEMS)
    async def map_of(run: RunNumber = 0, map: MapNumber = 0) -> api.MapView:
        """A map: where its codes are, how often they are used, how far apart neighbors are, each code decoded."""
        chart_of(run, map)
        return await in_turn(lambda: view(run, map))

    @app.get(
        "/api/images/{name}/{index}",
        responses={**PROBLEMS, 200: {"content": {"image/png": {}}}},
        response_class=Response,
    )
    async def image(name: api.SetName, index: Annotated[int, InPath(ge=0, lt=2**31)]) -> Response:
        """An image that can be picked, at the size of the first run's model, as PNG."""
        size = studies[0].model.image_size
        pixels = await in_turn(lambda: png_bytes(to_array(gallery.image(name, index, size))))
        return Response(pixels, media_type="image/png")

    @app.post("/api/encode", responses=PROBLEMS)
    async def encode(request: api.ImageOf) -> api.Encoded:
        """The tokens of an image, picked from a set or sent along, and what they decode to."""
        study = study_of(request.run)
        size = study.model.image_size
        if isinstance(request, api.SentImage):
            data = request.data
            pixels = await in_turn(lambda: sent_image(data, size), reader)
        else:
            name, index = request.set, request.index
            pixels = await in_turn(lambda: gallery.image(name, index, size))

        def work() -> api.Encoded:
            original = with_channels(pixels[None], study.model)
            planes = study.encode(original)
            decoded = study.decode(planes)
            ratio = psnr(decoded[0], original[0])
            return api.Encoded(
                tokens=to_lists(planes),
                original=data_uri(to_array(original[0])),
                reconstruction=data_uri(to_array(decoded[0])),
                psnr=ratio if np.isfinite(ratio) else None,
                ssim=float(ssim(decoded, original)),
            )

        return await in_turn(work)

    @app.post("/api/decode", responses=PROBLEMS)
    async def decode(request: api.TokensOf) -> api.Decoded:
        """The image that tokens stand for."""
        study = study_of(request.run)
        planes = to_tensors(request.tokens, study)
        return await in_turn(lambda: decoded_of(study, planes))

    @app.post("/api/shift", responses=PROBLEMS)
    async def shift(request: api.Shifted) -> api.Decoded:
        """Tokens moved on their maps, and the image they stand for then. Open borders hold them, others wrap."""
        study = study_of(request.run)
        planes = to_tensors(request.tokens, study)
        check_offsets(request.offsets, study)
        offsets = [tuple(offset) for offset in request.offsets]
        return await in_turn(lambda: decoded_of(study, study.shift(planes, offsets)))

    @app.post(
        "/api/tokens",
        responses={**PROBLEMS, 200: {"content": {"application/octet-stream": {}}}},
        response_class=Response,
    )
    async def token_file(request: api.NamedTokens) -> Response:
        """Tokens as the npz file that `topovq encode` would write and `topovq decode` reads."""
        study = study_of(request.run)
        planes = to_tensors(request.tokens, study)
        data = await in_turn(lambda: npz_bytes(study, planes, request.name))
        return Response(data, media_type="application/octet-stream")

    @app.get("/api/path", responses=PROBLEMS)
    async def path(
        start: Annotated[int, Query(ge=0, description="the code to go from")],
        end: Annotated[int, Query(ge=0, description="the code to go to")],
        run: RunNumber = 0,
        map: MapNumber = 0,
    ) -> api.PathOnMap:
        """The codes on the straight way between two places of a map, each decoded."""
        study, chart = chart_of(run, map)
        for code in (start, end):
            if code >= chart.grid.size:
                raise ApiError(404, f"the map has no code {code}; its codes are 0 to {chart.grid.size - 1}")

        def work() -> api.PathOnMap:
            codes = line(chart.grid, start, end)
            strip = fields(study.model, study.maps, map, torch.tensor(codes), study.usual)
            return api.PathOnMap(codes=codes, image=data_uri(sheet([list(strip)])))

        return await in_turn(work)

    if pair is not None:
        add_generator(app, studies[0], pair, in_turn, to_tensors)
    add_film(app, [(study.name, film) for study, film in zip(studies, films)])
    add_page(app, "index.html")
    return app


def create_follow_app(name: str, film: Film, hosts: Collection[str] | None = None, token: str | None = None) -> FastAPI:
    """The application that shows the film of a run alone: there may be no model yet."""
    app = bare_app(hosts, token)
    add_film(app, [(name, film)])
    add_page(app, "film.html")
    return app


def bare_app(hosts: Collection[str] | None, token: str | None) -> FastAPI:
    app = FastAPI(title="topovq explorer", version="1", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    app.add_middleware(Gate, hosts=hosts, most_bytes=MOST_BODY, token=token)
    speak_plainly(app)
    return app


def add_page(app: FastAPI, home: str) -> None:
    """The page's files; `home` is what stands at /."""
    app.add_api_route("/", page_file(home), include_in_schema=False)
    for path in sorted(PAGE.iterdir()):
        if path.suffix in TYPES and path.name != "index.html":
            app.add_api_route(f"/{path.name}", page_file(path.name), include_in_schema=False)


def route_with(parsed: Callable[[bytes], Awaitable[Any]]) -> type[APIRoute]:
    """Routes whose requests are read as JSON by `parsed`: a large body would hold up everybody else's."""

    class Parsed(Request):
        async def json(self) -> Any:
            return await parsed(await self.body())

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_parsed(request: Request) -> Response:
                return await handle(Parsed(request.scope, request.receive))

            return handle_parsed

    return Route


def page_file(name: str) -> Callable[[], Awaitable[Response]]:
    data, kind = (PAGE / name).read_bytes(), TYPES[Path(name).suffix]

    async def send() -> Response:
        return Response(data, media_type=kind)

    return send


def run_info(study: Study, film: bool) -> api.RunInfo:
    last = study.validations[-1] if study.validations else {}
    return api.RunInfo(
        name=study.name,
        model=study.model.kind,
        quantizer=study.model.config["quantizer"],
        image_size=study.model.image_size,
        maps=[map_info(chart) for chart in study.maps],
        step=last.get("step"),
        loss=last.get("loss"),
        perplexity=last.get("perplexity"),
        usage=last.get("usage"),
        tokens=last.get("tokens"),
        film=film,
    )


def map_info(chart: Chart) -> api.MapInfo:
    height, width = chart.shape
    return api.MapInfo(
        name=chart.name,
        level=chart.level,
        codes=chart.grid.size,
        height=height,
        width=width,
        pixels=chart.side,
        grid=api.GridInfo(**chart.grid.to_dict()),
    )


def map_view(study: Study, number: int, chart: Chart) -> api.MapView:
    every = enlarge(tiles(study.model, study.maps, number, study.usual), 1)
    every = every[:, :: -(-chart.side // LARGEST_TILE), :: -(-chart.side // LARGEST_TILE)]
    return api.MapView(
        map=map_info(chart),
        places=[(x, y) for x, y in places(chart.grid).tolist()],
        hits=study.hits[number].tolist(),
        distances=neighbor_distances(chart.codes_KD, chart.grid).tolist(),
        images=len(study.images_BCHW),
        sheet=sheet_of(every),
    )


def decoded_of(study: Study, planes: list[torch.Tensor]) -> api.Decoded:
    return api.Decoded(tokens=to_lists(planes), image=data_uri(to_array(study.decode(planes)[0])))


def npz_bytes(study: Study, planes: list[torch.Tensor], name: str) -> bytes:
    """A token file of one image."""
    model = study.model
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npz"
        id = model_id(model_folder(study.folder))
        with open_writer(path, model.token_shapes, codes_of(model.quantizers), id) as writer:
            writer.write([name], as_levels(from_planes(planes, study.maps)))
        return path.read_bytes()


def to_lists(planes: list[torch.Tensor]) -> list[list[list[int]]]:
    return [plane[0].tolist() for plane in planes]


def to_tensors(tokens: list[list[list[int]]], study: Study) -> list[torch.Tensor]:
    """Tokens of a request as planes [1, h, w], checked against the model's maps."""
    if len(tokens) != len(study.maps):
        raise ApiError(422, f"tokens of {len(tokens)} maps were sent; the model has {len(study.maps)}")
    planes = []
    for number, (rows, chart) in enumerate(zip(tokens, study.maps)):
        height, width = chart.shape
        if len(rows) != height or any(len(row) != width for row in rows):
            sizes = sorted({len(row) for row in rows})
            raise ApiError(
                422,
                f"the tokens of map {number} ({chart.name}) must be {height} rows of {width}; got {len(rows)} rows of "
                f"{', '.join(map(str, sizes)) or 'nothing'}",
            )
        plane = torch.tensor([rows])
        if int(plane.max()) >= chart.grid.size:
            raise ApiError(
                422, f"token {int(plane.max())} of map {number} is out of range: expected 0 to {chart.grid.size - 1}"
            )
        planes.append(plane)
    return planes


def check_offsets(offsets: list[list[int]], study: Study) -> None:
    if len(offsets) != len(study.maps):
        raise ApiError(422, f"offsets of {len(offsets)} maps were sent; the model has {len(study.maps)}")
    for number, (offset, chart) in enumerate(zip(offsets, study.maps)):
        if len(offset) != chart.grid.ndim:
            raise ApiError(
                422, f"the offset of map {number} must have {chart.grid.ndim} entries, one an axis; got {offset}"
            )
