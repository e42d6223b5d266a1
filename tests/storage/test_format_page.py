"""docs/format.md: its reader reads our files, and its tables name all that is in them."""

import random
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gradscope.config import parse_compression
from tests.storage.example import expected, with_layout, write

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def _block(number: int, name: str, libraries: set[str]) -> Any:
    """A function of the page, which is short and needs nothing of ours."""
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    body = [line for line in code[code.index(f"def {name}(") :].splitlines() if line.strip()]
    assert len(body) <= 20
    assert set(re.findall(r"^import (\w+)", code, re.MULTILINE)) == libraries
    found: dict[str, Any] = {}
    exec(code, found)
    return found[name]


def _reader() -> Any:
    return _block(0, "read", {"h5py", "numpy"})


@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_the_reader_on_the_page(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "o.h5", with_layout(layout))
    rows, means = (_reader()(tmp_path / "o.h5", k) for k in (0, 1))
    assert rows.keys() == means.keys() == expected().keys()
    for name, wanted in expected().items():
        np.testing.assert_allclose(rows[name], wanted, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(means[name], wanted.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_the_check_on_the_page(tmp_path: Path, compression: str | None) -> None:
    """It knows nothing of ours, and finds whatever is changed."""
    check, path = _block(1, "is_as_sealed", {"hashlib", "numpy"}), tmp_path / "o.h5"
    packed = None if compression is None else parse_compression(compression)
    write(path, with_layout("auto", compression=packed))
    assert check(path)
    good, generator = path.read_bytes(), random.Random(3)
    for _ in range(10):
        data = bytearray(good)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        assert not check(path)


def test_the_tables_name_everything(tmp_path: Path) -> None:
    write(tmp_path / "o.h5")
    columns = re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
    known = set(re.findall(r"`([^`]+)`", " ".join(columns)))
    paths, attributes = set(), set()
    with h5py.File(tmp_path / "o.h5") as file:

        def visit(path: str, item: h5py.HLObject) -> None:
            general = re.sub(r"^(chains|states)/\d+", r"\1/K", path)
            general = re.sub(r"^(norms|chains/K|states/K)/[^/]+", r"\1/NAME", general)
            paths.add("/" + re.sub(r"^axis\d+_\d+", "axisJ_S", general))
            attributes.update(item.attrs)

        file.visititems(visit)
        attributes.update(file.attrs)
    scales = {f"/chains/K/NAME/{axis}" for axis in "ktrcd"}
    assert "/chains/K/NAME/{k,t,r,c,d}" in known
    assert "/states/K/NAME" in paths
    known = {path.replace("/KEY", "/NAME") for path in known}
    assert paths - scales - known <= {"/samples", "/norms", "/chains", "/states", "/states/K"}
    assert attributes - known == {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST"}
