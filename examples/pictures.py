"""Draw the pictures of reports in docs/images from recorded runs.

    python examples/pictures.py     # needs chromium and the packages of requirements-test.lock

Each picture is a part of the page that report.py writes for a run in benchmarks/results/.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "benchmarks" / "results"
REAL = RESULTS / "real_text"
H200 = RESULTS / "gpu" / "h200_qwen3_0_6b_full"
MARGIN = 16  # pixels


class Picture(NamedTuple):
    """A part of a report: from the element `first` to the element `last`."""

    run: Path
    width: int
    scheme: str  # light or dark
    first: str
    last: str


PICTURES = {
    "report-light.png": Picture(REAL, 1280, "light", "header", "#charts figure >> nth=0"),
    "report-dark.png": Picture(
        H200, 1280, "dark", "h2:has-text('Curves')", "#charts figure >> nth=8"
    ),
}


def main() -> None:
    """Write the reports into a temporary folder and draw their parts."""
    from playwright.sync_api import sync_playwright

    from utils.observe.page import write_pages

    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.exit("chromium is not installed (Debian: apt-get install chromium)")
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.chdir(directory),  # the page names the run's path
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, picture in PICTURES.items():
            run = Path("runs") / picture.run.name
            shutil.copytree(picture.run, run)
            (run / "final").mkdir()  # the weights of a finished run are not recorded
            page = write_pages([run], Path(directory) / f"{name}.html", None)
            draw(browser, page, picture, IMAGES / name)
        browser.close()


def draw(browser: Any, report: Path, picture: Picture, output: Path) -> None:
    """Save a part of a report as a PNG file."""
    page = browser.new_page(
        viewport={"width": picture.width, "height": 900},
        color_scheme=picture.scheme,
    )
    page.set_default_timeout(600_000)  # the machine may be busy
    page.goto(report.as_uri())
    page.wait_for_function("document.querySelectorAll('.plot svg').length > 0")
    top = page.locator(picture.first).bounding_box()["y"] - MARGIN
    last = page.locator(picture.last).bounding_box()
    bottom = last["y"] + last["height"] + MARGIN
    clip = {"x": 0, "y": top, "width": picture.width, "height": bottom - top}
    page.screenshot(path=output, clip=clip, full_page=True)
    page.close()


if __name__ == "__main__":
    main()
