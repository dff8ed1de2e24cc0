"""Drawing with a prior as part of the JSON API: new images, and the rest of one whose tokens were painted out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch
import torch.nn.functional as F
from fastapi import FastAPI
from torch import Tensor

from topovq.prior.generate import Pair, draw
from topovq.tokenizer.atlas import from_planes, to_planes
from topovq.tokenizer.models import as_levels
from topovq.view.explorer import schemas as api
from topovq.view.explorer.problems import PROBLEMS, ApiError
from topovq.view.report import Study
from topovq.view.report.images import data_uri, to_array

Checked = Callable[[list[list[list[int]]], Study], list[Tensor]]
InTurn = Callable[[Callable[[], api.Drawn]], Awaitable[api.Drawn]]


def add_generator(app: FastAPI, study: Study, pair: Pair, in_turn: InTurn, checked: Checked) -> None:
    """Serve the prior of a run. `in_turn` runs work when its turn has come, `checked` gives the tokens of a request."""
    prior = pair.prior
    height, width = max(shape[:2] for shape in prior.shapes)
    names = prior.class_names or [str(number) for number in range(prior.classes)]

    @app.get("/api/prior", responses=PROBLEMS)
    async def prior_info() -> api.PriorInfo:
        """What the prior draws, and the classes that it knows."""
        size = study.model.image_size
        return api.PriorInfo(run=study.name, classes=names, height=height, width=width, image_size=size)

    @app.post("/api/draw", responses=PROBLEMS)
    async def drawn(request: api.Draw) -> api.Drawn:
        """New images, or completions of an image: the tokens that were painted out are drawn, the others stay."""
        if request.label is not None and request.label >= prior.classes:
            raise ApiError(422, f"the prior has no class {request.label}; it has {prior.classes}, counted from 0")
        if request.guidance != 1 and request.label is None:
            raise ApiError(422, f"guidance {request.guidance:g} needs a label: it is the class that is followed")
        known_T = None
        if request.tokens is not None:
            planes = checked(request.tokens, study)
            known_T = known(planes, request.painted)

        def work() -> api.Drawn:
            labels_N = None if request.label is None else torch.full((request.number,), request.label)
            tokens_NT = draw(
                pair,
                request.number,
                labels_N=labels_N,
                temperature=request.temperature,
                top_p=request.top_p,
                guidance=request.guidance,
                seed=request.seed,
                known_T=known_T,
            )
            pixels = pair.decode(tokens_NT.to(pair.device))
            levels = prior.to_levels(tokens_NT)
            found = to_planes(levels[0] if len(levels) == 1 else levels)
            each = [[plane[n].tolist() for plane in found] for n in range(request.number)]
            images = [data_uri(to_array(image)) for image in pixels]
            return api.Drawn(images=[api.Decoded(tokens=t, image=i) for t, i in zip(each, images)])

        return await in_turn(work)

    def known(planes: list[Tensor], painted: list[list[bool]]) -> Tensor:
        """The tokens of a sequence, -1 where one is painted out: `painted` has the rows of the finest level, and a
        token of a coarser one goes where any part of it is painted."""
        if len(painted) != height or any(len(row) != width for row in painted):
            raise ApiError(422, f"painted must be {height} rows of {width}, the tokens of the finest level")
        mask = torch.tensor([painted], dtype=torch.float32)
        tokens_1T = prior.to_sequence(as_levels(from_planes(planes, study.maps)))
        out = []
        for rows, columns, *stages in prior.shapes:
            level = F.adaptive_max_pool2d(mask, (rows, columns)).bool()
            out.append(level.flatten().repeat_interleave(stages[0] if stages else 1))
        return torch.where(torch.cat(out), -1, tokens_1T[0])
