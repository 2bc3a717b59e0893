"""The report in a real headless Chromium: it loads without an error or a request, and all controls work."""

import pytest

from megatron_tlt.report.__main__ import write_report
from tests.unit.report_logs import pretrain_records, rl_records, write_log
from tools.bench.report import write_run
from tools.browser import chromium_path, open_page

CHROMIUM = chromium_path()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: apt-get install chromium, or playwright install chromium"
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A page with two pretraining runs, an RL run, and an RL run with 2,000 timeline events."""
    folder = tmp_path_factory.mktemp("report")
    write_log(folder / "dense", pretrain_records())
    write_log(folder / "est", pretrain_records(est=True))
    write_log(folder / "short", rl_records())
    write_run(folder / "long", events=2_000, ranks=2, steps=4)
    _, written = write_report([folder], folder / "out")
    with open_page(written.html, CHROMIUM) as (page, problems, _):
        yield page, problems


def timeline(page, expression: str):
    return page.evaluate(f"(() => {{ const t = window.report.timelines[0]; return {expression}; }})()")


def canvas_box(page) -> dict[str, float]:
    """Where the canvas is, below the header that stays."""
    page.evaluate("document.querySelector('.canvas').scrollIntoView({ block: 'center' })")
    return page.locator("canvas").bounding_box()


@pytest.fixture
def page(opened):
    """The page as it is after loading; whatever a test does must leave no error."""
    page, problems = opened
    for control in ("step", "rank"):
        page.select_option(f"[data-filter={control}]", "")
    page.fill("[data-filter=text]", "")
    page.locator("[data-zoom=all]").click()
    yield page
    assert problems == []


def test_every_chart_is_drawn(page):
    charts = page.evaluate("window.report.data.charts.length + window.report.data.plain.length")
    assert charts > 10
    assert page.locator("figure .main-svg").count() >= charts
    assert page.locator("figure").count() == charts
    assert timeline(page, "t.painted") > 100


def test_the_axis_changes_the_curves_and_the_shades(page):
    curve = "document.getElementById('pretrain-0').data[0].x"
    assert page.evaluate(curve) == [10, 20]
    stage = "document.getElementById('pretrain-0').layout.shapes[0].x1"
    assert page.evaluate(stage) == 15
    page.select_option("#axis", "seconds")
    assert page.evaluate(curve) == pytest.approx([20, 30])
    assert page.evaluate(stage) == pytest.approx(25)
    page.select_option("#axis", "steps")


def test_a_run_can_be_hidden(page):
    visible = "document.getElementById('pretrain-0').data.filter((t) => t.visible).length"
    assert page.evaluate(visible) == 4
    page.uncheck("[data-run='0']")
    assert page.evaluate(visible) == 2
    page.check("[data-run='0']")


def test_the_wheel_zooms_where_it_points_and_double_click_shows_all(page):
    box = canvas_box(page)
    x, y = box["x"] + 600, box["y"] + 60
    span, at = (timeline(page, text) for text in ("t.view.to - t.view.from", "t.view.from + 450 / t.scale"))
    page.mouse.move(x, y)
    for _ in range(6):
        page.mouse.wheel(0, -200)
    page.wait_for_function(
        f"window.report.timelines[0].view.to - window.report.timelines[0].view.from < {span / 20}"
    )
    page.wait_for_timeout(100)
    assert timeline(page, "t.view.from + 450 / t.scale") == pytest.approx(at, rel=0.02)
    before = timeline(page, "t.view.from")
    page.mouse.down()
    page.mouse.move(x + 200, y, steps=4)
    page.mouse.up()
    assert timeline(page, "t.view.from") < before
    page.mouse.dblclick(x, y)
    assert timeline(page, "t.view.to - t.view.from") == pytest.approx(span, rel=1e-6)


def test_hovering_names_the_event(page):
    box = canvas_box(page)
    page.mouse.move(box["x"] + 300, box["y"] + 22 + 15 + 6)  # the second lane: strategy
    assert page.locator("#hover").is_visible()
    text = page.locator("#hover").inner_text()
    assert "step 1" in text and "batch" in text


def test_filters_leave_what_they_name(page):
    everything = timeline(page, "t.count")
    page.select_option("[data-filter=rank]", "1")
    assert 0 < timeline(page, "t.count") < everything
    assert set(timeline(page, "t.rows.map((n) => t.data.lanes[n].rank)")) == {1}
    page.select_option("[data-filter=step]", "2")
    page.fill("[data-filter=text]", "prompt 2001 sample")
    assert timeline(page, "t.count") == 8
    page.fill("[data-filter=text]", "no such thing")
    assert timeline(page, "t.count") == 0


def test_a_colour_can_be_switched_off(page):
    everything = timeline(page, "t.count")
    page.uncheck("[data-label=wait]")
    assert timeline(page, "t.count") < everything
    page.check("[data-label=wait]")
    assert timeline(page, "t.count") == everything
