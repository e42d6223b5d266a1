"""Scripted clicks and keys in headless Chromium: what is clicked is what is shown.

The truth is the data set, the result file and `gradscope stats --json`, none of which the page's
script knows. Run by `make browser`, which installs playwright; the browser is the system's.
"""

import base64
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page

from gradscope.markup.glossary import TERMS
from gradscope.stats.sections import short
from tests.pages import ROOT

SAMPLES = ROOT / "sample_models"
IMAGES = ROOT / "docs"
HOSTILE = ['<img src=x onerror="window.harmed=1">', "=1+1", "\x1b[31m</script><script>harmed=1//"]
HARM = "window.addEventListener('error', () => {}); window.harmed = undefined;"


def gradscope(*words: object) -> str:
    command = [sys.executable, "-m", "gradscope", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Result files of pictures (rows stored), of texts, and of a table with hostile names."""
    folder = tmp_path_factory.mktemp("view")
    chains = {"digits_mlp": "identity", "text_transformer": "project:dim=64"}
    for name, chain in chains.items():
        config = SAMPLES / name / "run.toml"
        some = ["--samples", ":60"] if name == "text_transformer" else []
        words = ["compute", "--config", config, "-t", chain, "-q", *some]
        gradscope(*words, "-o", folder / f"{name}.h5")
    return {name: folder / f"{name}.h5" for name in chains} | {"table": hostile(folder)}


def hostile(folder: Path) -> Path:
    """Compute a table whose classes, columns and ids are markup."""
    rng = np.random.default_rng(0)
    rows = [["id", HOSTILE[0], "b", "y"]]
    for k in range(40):
        name = HOSTILE[k % 3] + str(k)
        rows.append([name, *(f"{v:.4f}" for v in rng.normal(size=2)), HOSTILE[k % 2]])
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (folder / "model.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)\n")
    import torch

    torch.manual_seed(0)
    torch.save(torch.nn.Linear(2, 2).state_dict(), folder / "weights.pt")
    classes = json.dumps(sorted(HOSTILE[:2]))
    columns = json.dumps([HOSTILE[0], "b"])
    (folder / "run.toml").write_text(
        f"""version = 1
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.pt"
[dataset]
path = "table.csv"
columns = {{ inputs = {columns}, targets = "y" }}
classes = {{ targets = {classes} }}
dtype = {{ inputs = "float32" }}
id = "id"
[loss]
name = "cross_entropy"
"""
    )
    gradscope("compute", "--config", folder / "run.toml", "-q", "-t", "gram", "-o", folder / "t.h5")
    return folder / "t.h5"


def opened(browser: Browser, address: str, width: int = 1200, dark: bool = False) -> Page:
    scheme = "dark" if dark else "light"
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.goto(address)
    if page.locator("#data").count():  # drawn by a script
        page.wait_for_selector("html[data-ready]")
    assert not wrong
    return page


def written(path: Path, *more: object) -> str:
    gradscope("view", path, *more, "-o", path.with_suffix(".html"))
    return path.with_suffix(".html").as_uri()


def table(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: column[...] for name, column in file["samples"].items()}


def dense(path: Path) -> np.ndarray:
    """Return every sample's gradient (N, p) of a dense file, its parameters side by side."""
    with h5py.File(path) as file:
        arrays = sorted(file["chains/0"].items())
        return np.concatenate([a[...].reshape(len(a), -1).astype(float) for _, a in arrays], 1)


def at(page: Page, place: int) -> tuple[float, float]:
    """Return where the dot of the sample at a place is drawn."""
    x, y = page.evaluate("(p) => document.getElementById('chart').where(p)", place)
    return x, y


def pixels(page: Page, selector: str) -> np.ndarray:
    """Return the grey picture that a canvas shows."""
    data = page.evaluate("(s) => document.querySelector(s).toDataURL()", selector)
    with Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))) as picture:
        return np.asarray(picture.convert("L"))


def digit(k: int) -> np.ndarray:
    with np.load(SAMPLES / "digits_mlp" / "data.npz") as data:
        images = data["images"].reshape(-1, 8, 8).astype(float)
    return np.rint(images[k] * 255 / images.max()).astype(np.uint8)


def facts(page: Page) -> dict[str, str]:
    """Return what the opened sample's list says."""
    found = page.eval_on_selector_all(
        "#sample-body .whole .facts tr",
        "(all) => all.map((one) => [one.cells[0].textContent, one.cells[1].textContent])",
    )
    return dict(found)


def test_the_sample_that_is_clicked_is_shown(browser: Browser, files: dict[str, Path]) -> None:
    path = files["digits_mlp"]
    page = opened(browser, written(path))
    assert path.with_suffix(".html").stat().st_size < 3e6
    columns = table(path)
    rng = np.random.default_rng(0)
    page.locator("#chart").scroll_into_view_if_needed()
    for place in [int(np.argmax(columns["norm"])), *rng.integers(0, 1797, 5).tolist()]:
        page.mouse.move(*at(page, place))
        page.wait_for_selector("#hover:not([hidden])")
        near = int(page.get_attribute("#hover", "data-index") or -1)
        drawn, wanted = at(page, near), at(page, place)
        assert np.hypot(drawn[0] - wanted[0], drawn[1] - wanted[1]) < 1  # dots lie on each other
        page.mouse.click(*at(page, place))
        page.wait_for_selector("#sample[open] canvas")
        assert page.get_attribute("#sample", "data-index") == str(near)
        assert (pixels(page, "#sample .whole canvas") == digit(near)).all()
        told = facts(page)
        assert told["target"] == str(columns["target"][near])
        assert told["prediction"].split()[0] == str(columns["prediction"][near])
        assert told["norm"].startswith(short(float(columns["norm"][near])) + ",")
        assert told["loss"] == short(float(columns["loss"][near]))
        page.keyboard.press("Escape")
    page.context.close()


def test_numbers_are_those_of_stats(browser: Browser, files: dict[str, Path]) -> None:
    path = files["digits_mlp"]
    found = json.loads(gradscope("stats", path, "--json", "--top", 5, "--nearest", 899))
    page = opened(browser, written(path))
    shown = page.eval_on_selector_all(
        "#list .card", "(all) => all.slice(0, 5).map((one) => one.innerText)"
    )
    for text, row in zip(shown, found["samples"], strict=True):
        lines = text.splitlines()
        assert lines[0] == f"sample {row['index']}"
        assert f"norm {short(row['norm'])}" in lines and f"loss {short(row['loss'])}" in lines
    page.select_option("#sort", label="most opposed")
    first = page.locator("#list .card").first
    first.click()
    page.wait_for_selector("#sample[open]")
    opposed = found["most_opposed"][0]
    told = facts(page)
    cosines = [row["cosine"] for row in found["most_opposed"]]
    assert float(told["cosine with the mean gradient"]) <= min(cosines) + 1e-3
    assert opposed["index"] in [row["index"] for row in found["most_opposed"]]
    page.keyboard.press("Escape")
    page.fill("#find", "899")
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open] ul[data-side=aligned] .card")
    for side, key in (("aligned", "aligned"), ("opposed", "opposed")):
        listed = page.eval_on_selector_all(
            f"#sample ul[data-side={side}] .card",
            "(all) => all.map((one) => [Number(one.dataset.index), one.innerText])",
        )
        for (index, text), row in zip(listed[:5], found["nearest"][key], strict=True):
            assert index == row["index"]
            assert f"cosine {short(row['cosine'])}" in text
    page.locator("#sample ul[data-side=aligned] .card").first.click()
    page.wait_for_function(
        "(wanted) => document.getElementById('sample').dataset.index === wanted",
        arg=str(found["nearest"]["aligned"][0]["index"]),
    )
    page.context.close()


def test_filters_sorting_and_ids(browser: Browser, files: dict[str, Path]) -> None:
    path = files["digits_mlp"]
    columns = table(path)
    page = opened(browser, written(path))
    page.select_option("#class", value="8")
    page.check("#wrong")
    page.fill("#low", "5")
    wanted = (columns["target"] == 8) & (columns["prediction"] != 8) & (columns["norm"] >= 5)
    order = np.flatnonzero(wanted)
    order = order[np.argsort(-columns["loss"][order], kind="stable")]
    page.select_option("#sort", label="largest loss")
    assert page.inner_text("#count") == f"{wanted.sum()} of 1,797 samples"
    with page.expect_download() as download:
        page.click("#export")
    lines = Path(download.value.path()).read_text().split()
    assert lines == ["index", *map(str, columns["index"][order])]
    page.click("button[type=reset]")
    page.locator("#count", has_text="1,797 of 1,797").wait_for()
    page.click("#after")
    assert page.inner_text("#page") == "49 to 96 of 1,797"
    page.context.close()


def test_keys_alone(browser: Browser, files: dict[str, Path]) -> None:
    path = files["digits_mlp"]
    order = np.argsort(-table(path)["norm"], kind="stable")
    page = opened(browser, written(path), width=400)
    page.focus("#chart")
    for key, place in [("ArrowRight", 0), ("ArrowDown", 1), ("End", -1), ("Home", 0)]:
        page.keyboard.press(key)
        index = str(table(path)["index"][order[place]])
        page.wait_for_function(
            "(wanted) => document.getElementById('hover').dataset.index === wanted", arg=index
        )
        assert f"sample {index}," in page.inner_text("#spoken")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sample[open]")
    assert page.get_attribute("#sample", "data-index") == str(table(path)["index"][order[0]])
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "chart"
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.context.close()


def test_texts_are_those_of_the_data(browser: Browser, files: dict[str, Path]) -> None:
    path = files["text_transformer"]
    with h5py.File(path) as file:
        run = json.loads(file.attrs["run"])
    page = opened(browser, written(path))
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open]")
    index = int(page.get_attribute("#sample", "data-index") or -1)
    from gradscope.sources.opened import ShownData

    content = ShownData.of(run).contents([index])[0]
    assert isinstance(content, str)
    assert page.inner_text("#sample .excerpt").strip() == content.strip()
    assert page.locator("#sample ul[data-side=aligned] .card").count() == 6
    page.context.close()


def test_strangers_texts_are_texts(browser: Browser, files: dict[str, Path]) -> None:
    page = opened(browser, written(files["table"]))
    ids = [page.inner_text(f"#list li:nth-child({k + 1}) strong") for k in range(40)]
    assert any(HOSTILE[0] in one for one in ids)
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open] table")
    assert HOSTILE[0] in page.inner_text("#sample")
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.click("#export")
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row)
    assert page.evaluate("window.harmed") is None
    assert page.locator("#list img, #heat image, dialog img").count() == 0
    page.context.close()


def test_before_and_after(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    path = files["digits_mlp"]
    weights = tmp_path / "weights.safetensors"
    from safetensors.numpy import load_file, save_file

    state = load_file(SAMPLES / "digits_mlp" / "weights.safetensors")
    save_file({name: 0.5 * value for name, value in state.items()}, weights)
    gradscope(
        *("compute", weights, "--config", SAMPLES / "digits_mlp" / "run.toml", "-q"),
        *("--samples", ":500", "-o", tmp_path / "second.h5"),
    )
    second = table(tmp_path / "second.h5")
    page = opened(browser, written(path, tmp_path / "second.h5"))
    page.check("#changed")
    changed = int((second["prediction"] != table(path)["prediction"][:500]).sum())
    assert page.inner_text("#count") == f"{changed} of 1,797 samples"
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open]")
    index = int(page.get_attribute("#sample", "data-index") or -1)
    assert facts(page)["norm, second file"] == short(float(second["norm"][index]))
    page.keyboard.press("Escape")
    page.select_option("#what", label="norm before and after")
    page.context.close()


def test_scores_say_who_helped(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    scores = tmp_path / "scores.h5"
    for name, samples in (("train", "100:400"), ("query", "0:20")):
        gradscope(
            *("compute", "--config", SAMPLES / "digits_mlp" / "run.toml", "-q", "-t", "identity"),
            *("--samples", samples, "-o", tmp_path / f"{name}.h5"),
        )
    sides = tmp_path / "train.h5", tmp_path / "query.h5"
    gradscope("attribute", *sides, "--curvature", "identity", "-q", "-o", scores)
    page = opened(browser, written(sides[1], "--scores", scores))
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open] ul[data-scored='0'] canvas")
    index = int(page.get_attribute("#sample", "data-index") or -1)
    train, query = (dense(side) for side in sides)
    best = int(np.argmax(train @ query[index])) + 100
    first = page.inner_text("#sample ul[data-scored='0'] li:first-child strong")
    assert first == f"training sample {best}"
    assert (pixels(page, "#sample ul[data-scored='0'] canvas") == digit(best)).all()
    page.context.close()


def test_a_hundred_thousand_samples(browser: Browser, tmp_path: Path) -> None:
    path = many(tmp_path, 100_000)
    page = opened(browser, written(path))
    assert "of 100,000 samples are drawn" in page.inner_text("#chart-note")
    assert "of 100,000 samples" in page.inner_text("#list-note")
    took = page.evaluate(
        """async () => {
          const found = [], find = document.getElementById("low");
          for (const low of [0.1, 0.2, 0.3]) {
            const begun = performance.now();
            find.value = low;
            find.dispatchEvent(new Event("input", { bubbles: true }));
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            found.push(performance.now() - begun);
          }
          return found;
        }"""
    )
    print("a filter of 100,000 samples, in ms:", took)
    columns = table(path)
    kept = int((columns["norm"] >= 0.3).sum())
    assert page.inner_text("#count") == f"{kept:,} of 100,000 samples"
    page.context.close()


def many(folder: Path, n: int) -> Path:
    """Compute norms of n rows of numbers."""
    import torch

    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", inputs=rng.normal(size=(n, 64)).astype(np.float32),
             targets=rng.integers(0, 5, n))  # fmt: skip
    (folder / "model.py").write_text("from torch import nn\ndef build(): return nn.Linear(64, 5)\n")
    torch.manual_seed(0)
    torch.save(torch.nn.Linear(64, 5).state_dict(), folder / "weights.pt")
    factory = folder / "model.py"
    gradscope(
        *("compute", folder / "weights.pt", folder / "data.npz", "--model", f"{factory}:build"),
        *("--loss", "cross_entropy", "-t", "mean", "-q", "-o", folder / "many.h5"),
    )
    return folder / "many.h5"


def test_a_server_has_every_sample(browser: Browser, tmp_path: Path) -> None:
    path = many(tmp_path, 7000)
    words = [sys.executable, "-m", "gradscope", "view", str(path), "--serve"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            page = opened(browser, server.stdout.readline().strip())
            page.select_option("#sort", label="position")
            for index in (3, 6999):
                page.fill("#find", str(index))
                page.locator(f"#list .card[data-index='{index}']").click()
                page.wait_for_selector(f"#sample[open][data-index='{index}'] .whole canvas")
                with np.load(tmp_path / "data.npz") as data:
                    row = data["inputs"][index].reshape(8, 8)
                seen = pixels(page, "#sample .whole canvas").ravel().astype(int)
                assert (np.diff(seen[np.argsort(row.ravel())]) >= 0).all()
                page.keyboard.press("Escape")
            page.context.close()
        finally:
            server.send_signal(2)
            assert server.wait(10) == 130


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["digits_mlp", "text_transformer", "table"])
def test_axe_finds_nothing(browser: Browser, files: dict[str, Path], name: str, dark: bool) -> None:
    page = opened(browser, written(files[name]), dark=dark)
    assert broken(page) == []
    page.locator("#list .card").first.click()
    page.wait_for_selector("#sample[open]")
    page.wait_for_timeout(300)
    assert broken(page) == []
    page.context.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_stats(browser: Browser, files: dict[str, Path], dark: bool) -> None:
    """Its headings sort its tables by full numbers, it fits a phone, and axe finds nothing."""
    path = files["digits_mlp"]
    gradscope("stats", path, "--html", path.with_suffix(".stats.html"))
    page = opened(browser, path.with_suffix(".stats.html").as_uri(), 400, dark=dark)
    rows = json.loads(gradscope("stats", path, "--json"))["parameters"]
    heading = page.locator("table[aria-label=Parameters] th button", has_text="mean norm")
    for sign in (-1, 1):
        heading.click()
        names = page.locator("table[aria-label=Parameters] tbody th").all_inner_texts()
        wanted = sorted(rows, key=lambda row: sign * row["mean_norm"])
        assert names == [row["name"] for row in wanted]
    wide = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not wide and broken(page) == []
    page.context.close()


def broken(page: Page) -> list[Any]:
    found = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


def test_pictures_for_the_docs(browser: Browser, files: dict[str, Path]) -> None:
    page = opened(browser, written(files["digits_mlp"]), width=1000)
    page.focus("#chart")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#hover:not([hidden])")
    page.wait_for_timeout(300)
    page.screenshot(path=IMAGES / "view.png", clip={"x": 0, "y": 0, "width": 1000, "height": 760})
    page.keyboard.press("Enter")
    page.wait_for_selector("#bars svg")
    page.wait_for_timeout(300)
    page.screenshot(path=IMAGES / "view-sample.png")
    assert (IMAGES / "view.png").stat().st_size > 10_000
    page.context.close()


def test_terms_are_explained_by_keyboard_pointer_and_touch(
    browser: Browser, files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "stats.html"
    gradscope("stats", files["digits_mlp"], "--html", out)
    context = browser.new_context(viewport={"width": 400, "height": 700}, has_touch=True)
    page = context.new_page()
    page.goto(out.as_uri())
    tip = page.locator("#tip")
    for term, act in (
        (page.locator("abbr", has_text="noise scale").first, "focus"),
        (page.locator("abbr", has_text="what learns"), "hover"),
        (page.locator("abbr", has_text="opposed").first, "tap"),
        (page.locator("th button", has_text="SNR"), "focus"),
    ):
        getattr(term, act)()
        page.wait_for_timeout(50)
        box, name = tip.bounding_box(), term.text_content()
        assert tip.text_content() == TERMS[str(name)] and box is not None
        assert box["x"] >= 0 and box["x"] + box["width"] <= 400
        assert box["y"] >= 0 and box["y"] + box["height"] <= 700
        page.keyboard.press("Escape")
        assert not tip.is_visible()
    context.close()
