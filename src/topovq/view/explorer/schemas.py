"""What the JSON API takes and gives. A model's maps are numbered as in `GET /api/run`, coarsest level first."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MOST_UPLOAD_BYTES = 8 * 2**20
MOST_PIXELS = 25_000_000
MOST_OFFSET = 10_000

Token = Annotated[int, Field(ge=0, lt=2**31)]
Planes = Annotated[list[list[list[Token]]], Field(description="tokens of one image: map, row, column")]
Offset = Annotated[int, Field(ge=-MOST_OFFSET, le=MOST_OFFSET)]
DataURI = Annotated[str, Field(description="a PNG as a data: address")]
SetName = Literal["validation", "samples", "folder"]
RunNumber = Annotated[int, Query(ge=0, description="number of the run")]
MapNumber = Annotated[int, Query(ge=0, description="number of the map")]


class Strict(BaseModel):
    """Nothing is guessed: 1.0 and "1" are no integers, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Problem(BaseModel):
    detail: Annotated[str, Field(description="what went wrong and what would be right, in a sentence")]


class GridInfo(BaseModel):
    shape: list[int]
    topology: str
    wrap: list[bool]


class MapInfo(BaseModel):
    name: str
    level: Annotated[int, Field(description="0 is the coarsest")]
    codes: int
    height: Annotated[int, Field(description="rows of tokens of an image")]
    width: int
    pixels: Annotated[int, Field(description="side of the square of pixels a token stands for")]
    grid: GridInfo


class RunInfo(BaseModel):
    name: str
    model: str
    quantizer: str
    image_size: int
    maps: list[MapInfo]
    step: int | None
    loss: Annotated[float | None, Field(description="of the last validation")]
    perplexity: float | None
    usage: Annotated[float | None, Field(description="share of the codes chosen at least once in `tokens` tokens")]
    tokens: Annotated[int | None, Field(description="of the last validation, where the run says it")]
    film: Annotated[bool, Field(description="whether there is something to see at /api/film")]


class ImageSet(BaseModel):
    name: SetName
    count: int
    source: str
    first: Annotated[int, Field(description="the image that is good to begin with")] = 0


class Runs(BaseModel):
    runs: list[RunInfo]
    images: list[ImageSet]
    prior: Annotated[bool, Field(description="whether the first run has a prior, at /api/prior")] = False
    most_upload_bytes: int = MOST_UPLOAD_BYTES
    most_pixels: int = MOST_PIXELS


class Sheet(BaseModel):
    """Every code decoded: code k is the square at row k // columns, column k % columns."""

    image: DataURI
    columns: int
    side: int


class MapView(BaseModel):
    map: MapInfo
    places: Annotated[list[tuple[float, float]], Field(description="x, y of each code in widths of a cell")]
    hits: Annotated[list[int], Field(description="how often each code occurs in the validation images looked at")]
    distances: Annotated[list[float], Field(description="mean distance of each code to those next to it")]
    images: Annotated[int, Field(description="how many images the hits are counted over")]
    sheet: Sheet


class PickedImage(Strict):
    run: Annotated[int, Field(ge=0)] = 0
    set: SetName
    index: Annotated[int, Field(ge=0)]


class SentImage(Strict):
    run: Annotated[int, Field(ge=0)] = 0
    data: Annotated[
        str,
        Field(description="the image file (PNG, JPEG, ...) in base64", min_length=1, max_length=MOST_UPLOAD_BYTES * 2),
    ]


TAGS = ("picked", "sent")
ImageOf = Annotated[
    Annotated[PickedImage, Tag("picked")] | Annotated[SentImage, Tag("sent")],
    Discriminator(lambda value: "sent" if isinstance(value, dict) and "data" in value else "picked"),
]


class Encoded(BaseModel):
    tokens: Planes
    original: DataURI
    reconstruction: DataURI
    psnr: Annotated[float | None, Field(description="dB; null where the two are the same")]
    ssim: float


class TokensOf(Strict):
    run: Annotated[int, Field(ge=0)] = 0
    tokens: Planes


class NamedTokens(TokensOf):
    name: Annotated[str, Field(description="the image's name", min_length=1, max_length=200)]


class Shifted(TokensOf):
    offsets: Annotated[
        list[list[Offset]], Field(description="per map, how far to move along each axis of its grid, rows first")
    ]


class Decoded(BaseModel):
    tokens: Planes
    image: DataURI


class PriorInfo(BaseModel):
    run: str
    classes: Annotated[list[str], Field(description="the names of the classes that it knows, if any")]
    height: Annotated[int, Field(description="rows of tokens of the finest level, which can be painted out")]
    width: int
    image_size: int


class Draw(Strict):
    tokens: Annotated[Planes | None, Field(description="the image to complete; without it new ones are drawn")] = None
    painted: Annotated[
        list[list[bool]], Field(description="which tokens of the finest level are drawn anew: row, column")
    ] = []
    number: Annotated[int, Field(ge=1, le=64)] = 8
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    label: Annotated[int | None, Field(ge=0, description="number of a class; without one, any")] = None
    guidance: Annotated[float, Field(ge=0, le=10, description="above 1 follows the label more closely")] = 1.0


class Drawn(BaseModel):
    images: list[Decoded]


class PathOnMap(BaseModel):
    codes: list[int]
    image: Annotated[str, Field(description="one image a code, side by side: a PNG as a data: address")]


class Validated(BaseModel):
    step: int
    loss: float


class FilmInfo(BaseModel):
    """What there is of a run's film now; a run in training adds to it."""

    name: str
    steps: Annotated[list[int], Field(description="the steps of which there is a frame")]
    total: Annotated[int | None, Field(description="steps of the whole training, where that is known")]
    finished: bool
    validations: list[Validated]


class FrameView(BaseModel):
    """One map at one step."""

    step: int
    maps: Annotated[list[str], Field(description="the names of the run's maps")]
    grid: GridInfo
    places: Annotated[list[tuple[float, float]], Field(description="x, y of each code in widths of a cell")]
    distances: Annotated[list[float], Field(description="mean distance of each code to those next to it")]
    sheet: Sheet
    strip: Annotated[DataURI, Field(description="images above what the model made of them")]
