"""The film of a training as part of the JSON API: what frames there are, one frame, and the animation."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import Annotated

import torch
from fastapi import FastAPI, Query, Response

from topovq.tokenizer.atlas import enlarge, neighbor_distances, places
from topovq.view.explorer import schemas as api
from topovq.view.explorer.problems import PROBLEMS, ApiError
from topovq.view.explorer.sheets import sheet_of
from topovq.view.film import Film, animation
from topovq.view.report.images import data_uri


def add_film(app: FastAPI, films: Sequence[tuple[str, Film]]) -> None:
    """Serve these films, each with its run's name. They are read by the framework's own threads, beside the models."""

    def film_of(run: int) -> tuple[str, Film]:
        if run >= len(films):
            raise ApiError(404, f"there is no film of run {run}; there are {len(films)}, counted from 0")
        return films[run]

    @app.get("/api/film", responses=PROBLEMS)
    def film_info(run: api.RunNumber = 0) -> api.FilmInfo:
        """The frames there are of a run's training, and its validations."""
        name, film = film_of(run)
        record = film.record
        validations = [line for line in record if line["event"] == "validation" and line["loss"]]
        return api.FilmInfo(
            name=name,
            steps=film.steps(),
            total=record[0].get("steps") if record else None,
            finished=bool(record) and record[-1]["event"] == "final",
            validations=[api.Validated(step=line["step"], loss=line["loss"]) for line in validations],
        )

    @app.get("/api/frame", responses=PROBLEMS)
    def frame_view(
        step: Annotated[int, Query(ge=0, description="one of the film's steps")],
        run: api.RunNumber = 0,
        map: api.MapNumber = 0,
    ) -> api.FrameView:
        """A map at one step of the training."""
        try:
            frame = film_of(run)[1].frame(step)
        except LookupError as error:
            raise ApiError(404, str(error.args[0])) from None
        except (OSError, ValueError, zipfile.BadZipFile):
            raise ApiError(404, f"the snapshot of step {step} is gone or damaged") from None
        if map >= len(frame.maps):
            raise ApiError(404, f"run {run} has no map {map}; it has {len(frame.maps)}, counted from 0")
        shown = frame.maps[map]
        return api.FrameView(
            step=step,
            maps=[each.name for each in frame.maps],
            grid=api.GridInfo(**shown.grid.to_dict()),
            places=[(x, y) for x, y in places(shown.grid).tolist()],
            distances=neighbor_distances(torch.from_numpy(shown.codes_KD), shown.grid).tolist(),
            sheet=sheet_of(enlarge(shown.tiles_KCss, 1)),
            strip=data_uri(frame.strip_HWC),
        )

    @app.get("/api/animation", responses={**PROBLEMS, 200: {"content": {"image/webp": {}}}}, response_class=Response)
    def animated(run: api.RunNumber = 0, map: api.MapNumber = 0) -> Response:
        """The film as an animated WebP."""
        try:
            return Response(animation(film_of(run)[1], "WEBP", map), media_type="image/webp")
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ApiError(404, str(error)) from None
