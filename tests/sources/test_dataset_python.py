"""Data sets of the user's own, and texts by a tokenizer, against what they were made from."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gradscope.config import DatasetSpec
from gradscope.errors import DatasetError, InputError
from gradscope.sources.data import Dataset, open_dataset

N = 23
X, Y = torch.arange(N * 2.0).reshape(N, 2), torch.arange(N) % 3

CODE = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

N = 23
X, Y = torch.arange(N * 2.0).reshape(N, 2), torch.arange(N) % 3

def pairs(scale=1.0): return TensorDataset(X * scale, Y)
def empty(): return TensorDataset(X[:0], Y[:0])
def with_collate(): return Words(), Words().collate_fn
def loader(): return DataLoader(pairs(), batch_size=4, shuffle=True)
def alone(): return X
def number(): return 3
def flattening(): return pairs(), lambda samples: torch.cat([x for x, _ in samples])
def mixing(): return pairs(), lambda s: [a - a.float().mean(0) for a in default_collate(s)]
def turned(): return pairs(), lambda samples: default_collate(samples[::-1])
def sparse(): return pairs(), lambda s: [a.to_sparse() for a in default_collate(s)]
def averaged(): return Extra(), lambda s: {"inputs": (X[: len(s)], torch.tensor(1 / len(s)))}
def raising(): raise ValueError("no such folder")

stored, stored_loader, stored_list = pairs(), loader(), list(zip(X, Y))
only_x, config = TensorDataset(X), {"width": 4}

class Sized(Dataset):
    def __len__(self): return N

class Named(Sized):
    def __getitem__(self, k): return {"image": X[k], "mask": X[k] > 3, "label": int(Y[k])}

class Words(Sized):
    def __getitem__(self, k): return [k] * (k % 4 + 1), Y[k]
    def collate_fn(self, samples):
        ids = torch.tensor([(s + [-1] * 4)[:4] for s, _ in samples])
        return {"ids": ids, "mask": ids >= 0}, torch.stack([y for _, y in samples])

class Padded(Words):
    def collate_fn(self, samples):
        rows = [torch.tensor(s).float() for s, _ in samples]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        padded[:, 0] = torch.nan
        return padded * (1 + 1e-6 * (len(rows) > 1)), torch.stack([y for _, y in samples])

class Extra(Words):  # a mask where one is needed, the longest, places in the batch
    def collate_fn(self, samples):
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s, _ in samples], True, -1)
        waves = torch.fft.fft(X[: len(rows)] * torch.nan)
        mask = {"mask": (rows >= 0).long()} if (rows < 0).any() else {}
        inputs = {"ids": rows, **mask, "longest": torch.tensor(rows.shape[1]), "waves": waves}
        places = torch.arange(len(rows))
        return {"inputs": inputs, "targets": rows.clone(), "places": places}

class Random(Sized):
    def __getitem__(self, k): return torch.rand(2) + random.random() + np.random.rand(), Y[k]

class Stateful(Sized):
    generator = torch.Generator()
    def __getitem__(self, k): return torch.rand(2, generator=self.generator), Y[k]

class Breaking(Sized):
    def __getitem__(self, k):
        if k == 7: raise KeyError("seventh")
        return X[k], Y[k]

class Stream(IterableDataset):
    def __init__(self, n=N, shuffle=False): self.n, self.shuffle = n, shuffle
    def __len__(self): return self.n
    def __iter__(self):
        order = list(range(N))
        if self.shuffle: random.shuffle(order)
        return ((X[k], Y[k]) for k in order)

class Unsized(IterableDataset):
    def __iter__(self): return iter(zip(X, Y))

class Once(Stream):
    def __iter__(self): return self
    def __next__(self): raise StopIteration
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.py"
    path.write_text(CODE)
    return path


def opened(file: Path, name: str, **spec: Any) -> Dataset:
    return open_dataset(DatasetSpec(path=Path(f"{file}:{name}"), **spec))


@pytest.mark.parametrize(
    "name", ["pairs", "Stream", "loader", "stored", "stored_loader", "stored_list"]
)
def test_inputs_and_targets(file: Path, name: str) -> None:
    data = opened(file, name)
    assert len(data) == N
    for rows in (range(5), range(5, N), range(2), range(3, 20, 4)):  # also back to the beginning
        batch = data.batch(rows)
        torch.testing.assert_close(batch.inputs, X[list(rows)])
        assert torch.equal(batch.targets, Y[list(rows)])
        assert batch.index.tolist() == list(rows)


def test_arrays_by_name(file: Path) -> None:
    data = opened(
        file,
        "Named",
        inputs={"x": "image", "keep": "mask"},
        targets=["label"],
        scale={"image": 0.5},
        dtype={"mask": "float32"},
        reshape={"image": [2, 1]},
    )
    batch = data.batch(range(4, 9))
    torch.testing.assert_close(batch.inputs["x"], X[4:9, :, None] / 2)
    torch.testing.assert_close(batch.inputs["keep"], (X[4:9] > 3).float())
    assert torch.equal(batch.targets, Y[4:9])
    assert data.describe()["samples"] == N


@pytest.mark.parametrize("name", ["Words", "with_collate"])
def test_its_own_collate(file: Path, name: str) -> None:
    batch = opened(file, name).batch(range(1, 4))
    assert batch.inputs["ids"].tolist() == [[1, 1, -1, -1], [2, 2, 2, -1], [3, 3, 3, 3]]
    assert batch.inputs["mask"].sum(1).tolist() == [2, 3, 4]
    assert torch.equal(batch.targets, Y[1:4])


def test_a_note_on_padding(file: Path) -> None:
    told = "the collate function pads samples to the longest sample of their batch"
    assert [told in note for note in opened(file, "Padded").notes] == [True]
    assert not any(told in note for note in opened(file, "with_collate").notes)


def test_a_collate_that_pads_to_the_longest_of_a_batch(file: Path) -> None:
    batch = opened(file, "Padded").batch(range(1, 4))
    nan = torch.nan
    expected = torch.tensor([[nan, 1, 0, 0], [nan, 2, 2, 0], [nan, 3, 3, 3]])
    torch.testing.assert_close(batch.inputs, expected, equal_nan=True)


def test_a_collate_whose_batches_differ_in_what_they_hold(file: Path) -> None:
    inputs = opened(file, "Extra").batch(range(3, 6)).inputs
    assert inputs["ids"].tolist() == [[3, 3, 3, 3], [4, -1, -1, -1], [5, 5, -1, -1]]
    assert (inputs["mask"].sum(), inputs["longest"]) == (7, 4)


def test_inputs_alone_and_arguments(file: Path) -> None:
    for name in ("alone", "X", "only_x"):  # without targets, a loss is given None
        for given in ({}, {"targets": []}):
            batch = opened(file, name, **given).batch(range(3))
            torch.testing.assert_close(batch.inputs, X[:3])
            assert batch.targets is None
    with pytest.raises(DatasetError, match="applies to a function, but this is a TensorDataset"):
        opened(file, "stored", kwargs={"scale": 2.0})
    torch.testing.assert_close(
        opened(file, "pairs", kwargs={"scale": 3.0}, select=[4, 2]).batch(range(2)).inputs,
        3 * X[[4, 2]],
    )


def test_entries_that_the_model_does_not_take_are_targets(tmp_path: Path) -> None:
    file = tmp_path / "triples.py"
    file.write_text(
        "import torch\ndata = [(torch.ones(2) * k, k, torch.zeros(3)) for k in range(5)]\n"
    )
    spec = DatasetSpec(path=f"{file}:data")
    for taken, inputs, targets in ((1, 1, 2), (2, 2, 1), (3, 3, 0), (None, 3, 0)):
        batch = open_dataset(spec, taken).batch(range(4))
        sides = [v if isinstance(v, tuple) else (v,) for v in (batch.inputs, batch.targets)]
        assert [len([p for p in side if p is not None]) for side in sides] == [inputs, targets]
        parts = [part for side in sides for part in side]
        torch.testing.assert_close(parts[0], torch.arange(4.0)[:, None].expand(4, 2))
        torch.testing.assert_close(parts[1], torch.arange(4))
        torch.testing.assert_close(parts[2], torch.zeros(4, 3))


def test_a_class_that_needs_arguments(tmp_path: Path) -> None:
    file = tmp_path / "sets.py"
    file.write_text("class Rows:\n    def __init__(self, path, train=True): pass\n")
    with pytest.raises(DatasetError) as caught:
        open_dataset(DatasetSpec(path=f"{file}:Rows", kwargs={"train": False}))
    assert str(caught.value) == (
        f"data set {file}:Rows: its arguments do not fit: missing a required argument: 'path'\n"
        "It takes: path, train=True. Write these values in the run file, under [dataset.kwargs]. "
        "Or write a function without arguments, in a file data.py in this folder:\n"
        "    from sets import Rows\n    def data():\n        return Rows(...)\n"
        "Then give data.py:data as the data set."
    )


def test_random_samples_are_one_draw_by_position(file: Path) -> None:
    """The same in each batch and each process; the caller's generators do not change."""
    torch.manual_seed(9)
    before = torch.get_rng_state()
    data = open_dataset(DatasetSpec(path=f"{file}:Random"))
    assert any("samples are random" in note for note in data.notes)
    found = data.batch([2, 5]).inputs
    assert torch.equal(before, torch.get_rng_state())
    for row, k in zip(found, (2, 5), strict=True):
        torch.manual_seed(k)
        random.seed(k)
        np.random.seed(k)
        torch.testing.assert_close(row, torch.rand(2) + random.random() + np.random.rand())
    torch.testing.assert_close(data.batch([4, 5]).inputs[1], found[1])


def test_the_digest_tells_data_apart(file: Path) -> None:
    first = opened(file, "pairs").sha256
    assert first == opened(file, "pairs").sha256
    assert first != opened(file, "pairs", kwargs={"scale": 2.0}).sha256
    file.write_text(CODE + "\n# changed\n")
    assert first != opened(file, "pairs").sha256


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Unsized", "it has no __len__"),
        ("empty", "there are no samples"),
        ("number", "the function returned int"),
        ("Once", "iterated only once"),
        ("flattening", "collated to inputs of shape (46,)"),
        ("mixing", "sample 0 is collated to different numbers alone than in a batch of 23"),
        ("averaged", "sample 0 is collated to different numbers alone than in a batch of 23"),
        ("sparse", "inputs or targets contain a sparse_coo tensor"),
        ("turned", "sample 0 is collated to different numbers alone than in a batch of 23"),
        ("raising", "your code raised ValueError: no such folder"),
        ("nothing", "there is no 'nothing' in it"),
        ("Breaking", "your code raised KeyError: 'seventh'"),
        ("Stateful", "sample 0 is different when read again"),
        ("config", "'config' is a dict, not a function"),
    ],
)
def test_data_sets_that_cannot_be_used(file: Path, name: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        data = opened(file, name)
        data.batch(range(N))
    assert expected in str(caught.value)
    assert caught.value.exit_code == 3
    assert caught.value.remedy
    assert str(file) in str(caught.value)


def test_a_length_that_is_not_true(file: Path) -> None:
    data = opened(file, "Stream", kwargs={"n": 30})
    with pytest.raises(DatasetError, match="ended after 23 samples, but 30 are expected"):
        data.batch(range(20, 30))


def test_an_iterable_without_length_has_the_selected_samples(file: Path) -> None:
    spec = DatasetSpec(path=Path(f"{file}:Unsized"))
    data = open_dataset(spec, samples="4:12")
    assert (len(data), data.rows("4:12")) == (12, range(4, 12))
    for rows in (range(4, 8), range(8, 12), range(5)):
        assert torch.equal(data.batch(rows).inputs, X[list(rows)])
    with pytest.raises(DatasetError, match="ended after 23 samples, but 30 are expected") as caught:
        open_dataset(spec, samples=":30").batch(range(30))
    assert "samples" in caught.value.remedy
    with pytest.raises(DatasetError, match="no __len__") as caught:
        open_dataset(spec, samples="4:")
    assert ":1000" in caught.value.remedy


def test_shuffled_samples_are_noticed(file: Path) -> None:
    data = opened(file, "Stream", kwargs={"shuffle": True})
    with pytest.raises(DatasetError, match="different when read again"):
        for _ in range(20):
            data.batch(range(8))


def test_what_is_for_files_is_not_for_code(file: Path) -> None:
    with pytest.raises(DatasetError, match=r"\[dataset\] pad applies to data files only"):
        opened(file, "pairs", pad={"inputs": 0})


def test_samples_that_are_objects(tmp_path: Path) -> None:
    place = tmp_path / "graphs.py"
    place.write_text(
        "import torch\nclass Graph: pass\n"
        "def collate(batch): return [g for g, _ in batch], torch.tensor([y for _, y in batch])\n"
        "def graphs(): return [(Graph(), k % 2) for k in range(4)], collate\n"
    )
    with pytest.raises(DatasetError, match="inputs that are a list of Graph, not tensors"):
        opened(place, "graphs").batch(range(4))


WORDS = {"[UNK]": 0, "[PAD]": 1, "a": 2, "small": 3, "cat": 4, "sat": 5}
TEXTS = ["a cat sat", "a small cat", "cat", "a dog sat a cat"]
IDS = [[2, 4, 5], [2, 3, 4], [4], [2, 0, 5, 2, 4]]


def tokenizer(folder: Path, pad: bool = True) -> Path:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    settings |= {"pad_token": "[PAD]"} if pad else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_texts_are_tokenized(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"text": t, "label": k} for k, t in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    spec = {
        "path": path,
        "inputs": {"input_ids": "text", "attention_mask": "text_mask"},
        "targets": ["label"],
        "dtype": {"text_mask": "int64"},
    }
    folder = tokenizer(tmp_path / "tokens")
    expected = np.full((4, 5), 1)
    for k, ids in enumerate(IDS):
        expected[k, : len(ids)] = ids
    for place in (folder, folder / "tokenizer.json"):
        pad = {} if place == folder else {"text": 1}
        data = open_dataset(DatasetSpec(**spec, tokenizer={"text": place}, pad=pad))
        found = data.batch(range(4)).inputs
        np.testing.assert_array_equal(found["input_ids"].numpy(), expected)
        lengths = np.array([len(ids) for ids in IDS])
        np.testing.assert_array_equal(
            found["attention_mask"].numpy(), (np.arange(5) < lengths[:, None]).astype(int)
        )
        assert found["attention_mask"].dtype == torch.int64
    bare = tokenizer(tmp_path / "bare", pad=False)
    with pytest.raises(DatasetError, match="fewer than 5 entries"):
        open_dataset(DatasetSpec(**spec, tokenizer={"text": bare}))
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(DatasetError, match="the tokenizer cannot be read"):
        open_dataset(DatasetSpec(**spec, tokenizer={"text": bare}))
    with pytest.raises(DatasetError, match="no such tokenizer"):
        open_dataset(DatasetSpec(**spec, tokenizer={"text": tmp_path / "nowhere"}))
    with pytest.raises(DatasetError, match="it has numbers, not texts"):
        open_dataset(
            DatasetSpec(**spec | {"inputs": ["label"], "dtype": {}}, tokenizer={"label": bare})
        )
