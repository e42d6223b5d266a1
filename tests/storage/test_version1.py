"""Files of the first version, written by the code of that time: the same numbers, the same checks.

20 samples; `w` (3, 4) of k/7, `emb` (6, 2) scattered from rows of k/3, `scale` of k; their mean.
"""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest

from gradscope.errors import ResultFileError
from gradscope.storage import check_parts, open_file
from tests.storage.example import load, same

N = 20
FILES = sorted((Path(__file__).parent / "version1").iterdir())


def _expected() -> dict[str, np.ndarray]:
    emb, index = np.zeros((N, 6, 2), np.float32), np.arange(2 * N).reshape(N, 2) % 6
    rows = np.arange(4 * N, dtype=np.float32).reshape(N, 2, 2) / np.float32(3)
    np.add.at(emb, (np.arange(N)[:, None], index), rows)
    w = np.arange(12 * N, dtype=np.float32).reshape(N, 3, 4) / np.float32(7)
    return {"w": w, "emb": emb, "scale": np.arange(N, dtype=np.float32)}


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "o.h5"
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def test_the_same_numbers(old: Path) -> None:
    assert old.read_bytes().endswith(b"gradseal")
    with open_file(old) as file:
        assert file.hdf5.attrs["format_version"] == 1
        assert file.hdf5["chains/0/w"].fletcher32
        assert file.samples["index"].tolist() == list(range(N))
        for name, wanted in _expected().items():
            np.testing.assert_array_equal(file.chains[0][name][...], wanted)
            np.testing.assert_array_equal(file.chains[0][name][[7, 2]], wanted[[7, 2]])
            mean = wanted.astype(float).mean(0)
            np.testing.assert_allclose(file.chains[1][name][...], mean, rtol=1e-6)
            np.testing.assert_allclose(file.states["1"][f"sum:{name}"][...], N * mean, rtol=1e-6)
            norms = np.sqrt((wanted.reshape(N, -1).astype(float) ** 2).sum(1))
            np.testing.assert_allclose(file.norms[name], norms, rtol=1e-6)


def test_its_checks_are_those_of_then(old: Path) -> None:
    good, wanted, generator = old.read_bytes(), load(old), random.Random(2)
    refused = 0
    for _ in range(40):
        data = bytearray(good)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        old.write_bytes(data)
        try:
            found = load(old)
        except ResultFileError as error:
            assert error.where and error.remedy
            refused += 1
        else:
            assert same(found, wanted)
    assert refused


def test_what_lacks_an_identity_is_no_part(old: Path) -> None:
    """As ever: the file was written without a pipeline."""
    with pytest.raises(ResultFileError, match="which samples of which run"):
        check_parts([old])
