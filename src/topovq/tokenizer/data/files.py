"""Data files: the cache folder, checksums, opening, downloads, and the error that bad ones raise."""

import hashlib
import os
import shutil
import stat
import subprocess
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

PathLike = str | os.PathLike[str]
MOST_BYTES = 2**29  # of an image file: 89 million pixels, the most that are decoded, take no more without compression


class DataError(ValueError):
    """Data that is not there, or not what it should be. The message says what was looked for."""


def cache_dir() -> Path:
    """The folder for what is fetched or indexed once: `$TOPOVQ_CACHE`, else `~/.cache/topovq`. May not exist yet."""
    return Path(os.environ.get("TOPOVQ_CACHE") or Path.home() / ".cache" / "topovq")


def check_digest(path: Path, algorithm: str, expected: str) -> None:
    """Refuse a file whose `algorithm` (a name hashlib knows) digest is not `expected`."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise DataError(f"{path} is damaged or another file: its {algorithm} is {found}, not {expected}")


def open_file(path: PathLike) -> BinaryIO:
    """Open a regular file to read, of an image's size. Others are refused at once: a named pipe would be waited at for
    ever, and some of Pillow's decoders take a whole file into memory."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
        os.close(handle)
        large = f"{status.st_size:,} bytes are more than an image has; at most {MOST_BYTES:,} are read"
        raise OSError(large if stat.S_ISREG(status.st_mode) else "not a regular file")
    return os.fdopen(handle, "rb")


TIMEOUT_SECONDS = 10.0


def download(url: str, path: Path) -> Path:
    """Fetch `url` into `path`, which is returned; DataError if it cannot be had."""
    try:
        with (
            urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response,
            open(path, "wb") as file,
            _progress(DownloadColumn(), TransferSpeedColumn()) as progress,
        ):
            length = response.headers.get("Content-Length")
            task = progress.add_task(url.rpartition("/")[2], total=None if length is None else int(length))
            while chunk := response.read(1 << 20):
                file.write(chunk)
                progress.advance(task, len(chunk))
    except (OSError, HTTPException) as error:
        raise DataError(f"{url}: {error}") from error
    return path


def npm_pack(package: str, folder: Path) -> Path:
    """Fetch `package` (`name@version`) of the npm registry into `folder`; its file. DataError if it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"npm pack {package}: npm is not installed")
    command = [npm, "pack", package, "--ignore-scripts", "--fetch-retries=0", "--pack-destination", str(folder)]
    with _progress() as progress:
        progress.add_task(f"npm pack {package}", total=None)
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    packed = folder / f"{package.replace('@', '-')}.tgz"
    if done.returncode or not packed.is_file():
        said = done.stderr.strip().splitlines() or ["no message"]
        raise DataError(f"npm pack {package}: exit status {done.returncode}: {said[0]}")
    return packed


def _progress(*columns: TextColumn | DownloadColumn | TransferSpeedColumn) -> Progress:
    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(), *columns, TimeElapsedColumn(), console=Console(stderr=True))
