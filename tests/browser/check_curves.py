"""The curves of trainings in headless Chromium: whole steps, legends, values on hover."""

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from gradscope.report.page import write_html
from gradscope.training import read_histories
from tests.report.test_curves import lines_of, run


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_are_drawn_and_answer(
    browser: Browser,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    paths = [run(tmp_path / f"{name}.jsonl", 1, 3, 7, seed=k) for k, name in enumerate("ab")]
    write_html(read_histories(paths), tmp_path / "out.html")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if "http" in request.url else "")
    page.goto(f"file://{tmp_path}/out.html")
    page.wait_for_selector("html[data-ready=yes]")
    assert page.locator("figure.curves svg").count() == 7
    figure = page.locator("figure.curves").first
    steps = figure.locator("g.role-axis").nth(1).locator("text").all_text_contents()
    assert all(re.fullmatch(r"[\d,]+|step", text) for text in steps), steps
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    figure.locator(".chart").scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 80)
    values = figure.locator(".values").inner_text()
    losses = [lines_of(path)[-1]["loss"] for path in paths]
    assert values == "step 7: " + ", ".join(
        f"{name} {loss:#.3g}" for name, loss in zip("ab", losses, strict=True)
    )
    page.mouse.move(1, 1)
    page.locator("figure.curves figcaption abbr").first.hover()
    assert "median of the samples' gradient norms" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert not found, [one["id"] for one in found]
    assert errors == []
    page.close()
