"""The report of a real run, resumed after a kill, in a real browser from file://."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from launching import ROOT, quiet_environment

import report

pytestmark = pytest.mark.slow

BROWSER = shutil.which("chromium")


@pytest.fixture(scope="module")
def run(pretrained, heldout, tmp_path_factory) -> Path:
    """Run six steps, cut the run back to the checkpoint of step 3, and run steps 4 to 6 again."""
    directory = pretrained(tmp_path_factory.mktemp("runs") / "resumed", **heldout)
    return pretrained(tiny.cut(directory, 3), **heldout)


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None:
        pytest.skip("there is no chromium here (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Return a function that opens a page; at the end check that only the file was requested."""
    asked, failed = [], []

    def open_page(path: Path, **options):
        page = chromium.new_page(viewport={"width": 1200, "height": 900}, **options)
        page.set_default_timeout(600_000)  # the machine may be busy
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: failed.append(message.text))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    assert failed == []
    assert all(url.startswith("file://") and url.endswith(".html") for url in asked)


def test_a_run_writes_its_page_when_it_ends(run):
    page = (run / "report.html").read_text()
    assert "Finished at step 6 of 6: final/ holds the model." in page
    assert f"{tiny.losses(run)[-1]:.4g}" in page
    assert f"{tiny.evaluations(run, 'heldout')[6]:.4g}" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    train, lost = ({line["style"]: line for line in data["charts"][0]["lines"]}[each]
                   for each in ("line", "lost"))  # fmt: skip
    assert train["y"] == [float(f"{loss:.6g}") for loss in tiny.losses(run)]
    assert lost["step"] == [4, 5, 6, 6], "done again by the second start"
    assert lost["y"][:3] == train["y"][3:], "with the same losses"
    given = tiny.starts(run)[0]["given"]
    assert given["learning_rate"] == "--learning_rate"
    assert "seed" not in given


def test_the_command_needs_neither_torch_nor_transformers(run):
    program = (
        "import sys, report; report.main([sys.argv[1]]); "
        "sys.exit(bool({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], cwd=ROOT, check=False)
    assert done.returncode == 0


def ticks(page) -> list[str]:
    """Return the labels of the first chart's horizontal axis."""
    chart = page.locator("#charts figure").first
    return chart.locator("text[text-anchor=middle]:not(.label)").all_text_contents()


def test_the_page_zooms_toggles_and_follows_keys(opened, run):
    page = opened(run / "report.html", color_scheme="light")
    whole, plot = ticks(page), page.locator(".plot").first
    assert page.locator("#charts figure").count() >= 5
    assert page.locator("#charts path.series").count() >= 6
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 100)
    assert page.locator("#place").inner_text().startswith("step ")
    page.mouse.up()
    assert ticks(page) != whole
    assert page.locator("#reset").is_enabled()
    page.keyboard.press("Escape")
    assert ticks(page) == whole
    assert page.locator("#reset").is_disabled()
    plot.focus()
    page.keyboard.press("+")
    assert ticks(page) != whole
    page.keyboard.press("-")
    page.keyboard.press("ArrowRight")
    assert ticks(page) == whole
    assert plot.locator("line.cursor").get_attribute("visibility") == "visible"
    key = page.locator(".keys button", has_text="train").first
    drawn = plot.locator("path.series").count()
    key.click()
    assert plot.locator("path.series").count() == drawn - 1
    assert key.get_attribute("aria-pressed") == "false"
    key.click()
    for axis, unit in (("tokens", ""), ("hours", "min"), ("step", "")):
        page.locator(f"input[value={axis}]").check()
        assert ticks(page), axis
        assert all(unit in each for each in ticks(page))
    assert ticks(page) == whole
    page.mouse.move(0, 0)
    assert key.inner_text().startswith("train last ")
    labels = page.locator("#charts figure").first.locator("text.label").all_text_contents()
    assert labels == ["nats per token", "step"]
    titles = page.locator("#charts h3").all_text_contents()
    assert [title for title in titles if "emory" in title] == ["Host memory"], "one process"
    right = plot.locator("clipPath rect").bounding_box()
    last = plot.locator("path.series.line").last.bounding_box()
    assert last["x"] + last["width"] < right["x"] + right["width"], "the last point is whole"
    page.locator("#smooth").fill("0.9")
    assert plot.locator("path.series.faint").count() == 1
    log = page.get_by_label("log scale").first
    log.check()
    assert log.is_checked()


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_dark_print_narrow_and_without_scripts(opened, run, tmp_path):
    page = opened(run / "report.html", color_scheme="dark")
    dark = background(page)
    page.locator("#theme").click()
    light = background(page)
    assert [dark, light] == ["rgb(20, 22, 26)", "rgb(255, 255, 255)"]
    page.locator("#theme").click()
    assert background(page) == dark
    page.emulate_media(media="print")
    assert background(page) == light
    page.emulate_media(media="screen")
    page.pdf(path=tmp_path / "page.pdf", print_background=True)
    assert (tmp_path / "page.pdf").stat().st_size > 10_000
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    assert page.locator(".plot svg").first.bounding_box()["width"] <= 390
    wide = (
        "tables => tables.filter(table => table.scrollWidth > table.parentNode.clientWidth).length"
    )
    assert page.locator("table").evaluate_all(wide) == 0, "no table is cut"
    assert page.locator("td[data-title='how it ended']").count() == 2
    bare = opened(run / "report.html", java_script_enabled=False)
    assert "Finished at step 6 of 6: final/ holds the model." in bare.locator("body").inner_text()


def test_runs_are_compared(opened, run, tmp_path):
    # Remove the checkpoints: their copies of config.yaml would be used.
    ignored = shutil.ignore_patterns("checkpoint-*")
    other = shutil.copytree(run, tmp_path / "other", ignore=ignored)
    settings = other / "config.yaml"
    settings.write_text(settings.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
    report.main([str(run), str(other), "--output", str(tmp_path / "compared.html")])
    page = opened(tmp_path / "compared.html")
    assert page.locator("table >> nth=0").locator("tr").count() == 3
    assert page.locator("#charts figure >> nth=0").locator("path.series").count() == 2
    assert "learning_rate\t0.01\t0.02" in page.locator("body").inner_text()
    (other / "metrics.jsonl").write_text("{half a li")
    report.main([str(other)])
    damaged = opened(other / "report.html")
    assert "metrics.jsonl: 1 damaged line skipped" in damaged.locator("body").inner_text()
    assert damaged.locator("#charts figure").count() == 0


def test_a_run_that_fails_has_its_page_too(pretraining, tmp_path):
    """The launcher writes the report after any failure; without a launcher, the run itself does."""
    run, told, teller = tmp_path / "run", tmp_path / "told", tmp_path / "tell me"
    teller.write_text(f'#!/bin/bash\necho "$STOKER_EVENT|$*" >>"{told}"\n')
    teller.chmod(0o755)
    settings = {"save_steps": 2, "restarts_in_job": 0}
    script = ["tests/integration/troubled_run.py", *pretraining(run, **settings)]
    python = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "ACCELERATE_USE_CPU": "true"}
    python |= {"STOKER_ON_EVENT": str(teller)}
    for launched, trouble, code, words in (
        (True, "kill:0:9", 76, "no last word: it was killed"),
        (False, "raise:0:3", 1, "RuntimeError: the batch is spoilt"),
        (False, "raise:0:99", 0, "Finished at step 6 of 6: final/ holds"),  # after the last step
    ):
        env = quiet_environment(python | {"STOKER_TEST_TROUBLE": trouble})
        command = ["slurm/launch_node.sh" if launched else sys.executable, *script]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        shown = done.stdout + done.stderr
        assert done.returncode == code, shown
        page = (run / "report.html").read_text()
        assert words in page
        assert f"report: {run}/report.html" in shown
        assert ("Next: resume: " in page) == (code > 0)
    killed, failed, finished = told.read_text().splitlines()
    assert killed.startswith(f"failed|failed {run}  rank 0 on "), killed
    assert failed.startswith(f"failed|failed {run}  RuntimeError: the batch is spoilt ("), failed
    assert finished == f"finished|finished {run}  done"
