"""The live page in a real browser, with a real training that is watched, saved and stopped from there."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import forgefield
from forgefield.runs import Run
from tests.support.browser import Browser, browser_is_installed
from tests.support.example_run import write_example_run
from tests.support.helpers import tiny_config
from tests.support.launching import clean_environment

pytestmark = pytest.mark.skipif(
    not browser_is_installed(), reason="Chromium, chromedriver or selenium is not installed"
)
PATIENCE_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    for seed, name in enumerate(("small", "large", "third")):
        write_example_run(folder / "runs" / name, epochs=20 + 10 * seed, frames=4, seed=seed)
    config = folder / "runs" / "large" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.003"))
    return folder


@pytest.fixture(scope="module")
def page(folder):
    with forgefield.watch(folder / "runs", port=0) as page:
        yield page


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium, page):
    chromium.open(page.address)
    yield chromium
    assert chromium.console() == [], "errors or warnings of the browser"
    assert chromium.origins() <= {f"http://127.0.0.1:{page.port}"}, "loaded from elsewhere"


@pytest.fixture
def training(folder):
    """A training that takes minutes unless it is stopped."""
    config = tiny_config(folder, name="live", callbacks=["tests.support.interrupting.Slow"])
    config["training"] |= {"checkpoint": {"every_epochs": None, "every_seconds": None}, "engine": "eager"}
    config["trainer"] |= {"max_epochs": 5000}
    path = folder / "live.yaml"
    path.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "forgefield", "train", str(path)],
        cwd=Path(__file__).parents[3],
        env=clean_environment(SLOW="0.05"),
        stdout=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_training_is_watched_saved_and_stopped_from_the_page(browser, folder, training):
    path = folder / "runs" / "live"
    browser.wait(lambda: browser.text_of_row("live"), PATIENCE_S)
    browser.click_row("live")
    browser.wait(lambda: "running" in browser.text_of_row("live"), PATIENCE_S)
    points = "return state.charts.has('val/loss') ? state.charts.get('val/loss').uplot.data[0].length : 0"
    browser.wait(lambda: browser.run(points) > 2, PATIENCE_S)
    before = browser.run(points)
    browser.wait(lambda: browser.run(points) > before, PATIENCE_S)  # without a reload

    browser.click("#checkpoint")
    browser.wait(lambda: "saves a checkpoint" in browser.text("#message"), PATIENCE_S)
    browser.wait(lambda: list((path / "checkpoints").glob("step-*.ckpt")), PATIENCE_S)
    assert training.poll() is None, "it continues"
    browser.wait(lambda: "A checkpoint was requested" in browser.text("#log"), PATIENCE_S)

    browser.click("#stop")
    browser.click("#confirm button[value=no]")
    time.sleep(0.3)
    assert training.poll() is None
    browser.click("#stop")
    browser.click("#confirm button[value=yes]")
    assert training.wait(PATIENCE_S) == 128 + signal.SIGINT
    browser.wait(lambda: "stopped" in browser.text_of_row("live"), PATIENCE_S)
    browser.wait(lambda: browser.run("return document.getElementById('stop').disabled"), PATIENCE_S)
    assert Run(path).info["status"] == "stopped"
    assert "Run the same command to resume" in browser.text("#log")


def test_selected_runs_are_compared(browser):
    for name in ("small", "large"):
        browser.select(name, True)
    browser.wait(lambda: browser.run("return state.selected.length") >= 2)
    for name in browser.run("return state.selected"):
        browser.select(name, name in ("small", "large"))
    browser.wait(lambda: "training.lr" in browser.text("#compared-settings"))
    assert "0.003" in browser.text("#compared-settings")
    assert "forces MAE, meV/A" in browser.text("#compared-errors")
    curves = "return state.charts.get('val/forces_mae').uplot.series.slice(1).map((s) => s.label)"
    browser.wait(lambda: set(browser.run(curves)) >= {"small", "large"})
    assert "run=small" in browser.run("return location.hash"), "the address keeps the selection"
    browser.open(browser.run("return location.href"))
    browser.wait(lambda: "training.lr" in browser.text("#compared-settings"))


def test_a_click_on_a_heading_sorts(browser):
    browser.wait(lambda: browser.rows())
    for descending in (False, True):
        browser.run(
            "[...document.querySelectorAll('#table th button')].find((b) => b.textContent.startsWith('forces MAEtest')).click()"
        )
        values = [row["test/forces_mae"] for row in browser.run(ROWS) if row["test/forces_mae"] is not None]
        assert values == sorted(values, reverse=descending)


ROWS = """
const byName = new Map(state.table.rows.map((row) => [row[0][1], row]));
return [...document.querySelectorAll('#table tbody tr')].map((line) => {
  const row = byName.get(line.querySelector('.name button').title);
  return Object.fromEntries(state.table.columns.map((column, i) => [column.key, row[i][1]]));
});
"""


def test_names_of_runs_are_text_and_not_markup(browser, folder):
    name = "<img src=x onerror=document.title='broken'>"
    write_example_run(folder / "runs" / name, epochs=2, frames=2)
    browser.open(browser.run("return location.href.split('#')[0]"))
    browser.wait(lambda: browser.text_of_row(name))
    browser.click_row(name)
    browser.wait(lambda: browser.text("#run-name") == name)
    assert browser.run("return document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_on_a_phone_light_and_dark(browser, dark):
    with browser.phone(dark=dark):
        browser.open(browser.run("return location.href.split('#')[0] + '#run=small&run=large'"))
        browser.wait(lambda: browser.run("return document.querySelectorAll('.charts canvas').length") > 1)
        assert browser.run("return innerWidth") <= 400
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        shade = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(shade) < 150) is dark
        controls = "[...document.querySelectorAll('.controls button, select')]"
        small = browser.run(f"return {controls}.filter((b) => b.offsetHeight && b.offsetHeight < 36).length")
        assert small == 0, "buttons are large enough for a finger"


def test_a_server_that_has_ended_is_reported(chromium, folder):
    page = forgefield.watch(folder / "runs", port=0)
    chromium.open(page.address)
    chromium.wait(lambda: chromium.rows())
    page.close()
    chromium.run("refresh()")
    chromium.wait(lambda: "is forgefield watch still running" in chromium.text("#status"))
    chromium.console()  # forget the failed requests
