"""The run file: strict, all errors at once, flags win, paths relative to the file."""

import tomllib
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.config import RunSpec, load, resolve, run_options, split_reference
from gradscope.core.grammar import parse, resolve_paths
from gradscope.errors import SpecError
from tests.run import project

RUN = project.RUN.format(loss="mse")


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(config: Path | None, overrides: dict | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        resolve(config, overrides or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    spec = load(write(tmp_path, RUN))
    assert (spec.version, spec.model.mode, spec.model.kwargs) == (1, "eval", {})
    assert (spec.dataset.inputs, spec.dataset.targets) == (("inputs",), ("targets",))
    assert (spec.compute.backend, spec.compute.transform) == ("auto", ("identity",))
    assert (spec.compute.seed, spec.compute.layout, spec.compute.verify) == (0, "dense", "audit")
    assert spec.compare.backends == ("loop", "hooks", "vmap", "expand")


def test_each_setting_is_described() -> None:
    """A flag belongs to one setting of a command; each setting says what it may be."""
    for setting in run_options():
        assert setting.accepted
        assert bool(setting.flags) == bool(setting.commands) == bool(setting.help)
    taken = [(name, c) for s in run_options() for name in s.flags for c in s.commands]
    assert len(set(taken)) == len(taken)


def test_paths_of_a_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    more = 'kwargs = {weight = [1, 2]}\n[compute]\ntransform = ["mine.py:soft | mean"]\n'
    run = RUN.replace("data.npz", "../data.npz").replace('"mse"', '"loss.py:f:tau=2"')
    write(tmp_path, run + more)
    monkeypatch.chdir(inner)
    spec = load(Path("../run.toml"))
    assert spec.checkpoint.path.resolve() == (tmp_path / "weights.pt").resolve()
    assert spec.dataset.path.resolve() == (tmp_path.parent / "data.npz").resolve()
    file, name = split_reference(spec.model.factory)
    assert (Path(file).resolve(), name) == ((tmp_path / "model.py").resolve(), "build")
    assert all(p.is_absolute() for p in (spec.checkpoint.path, spec.dataset.path, Path(file)))
    file, name = split_reference(spec.loss.stage.name)
    assert (Path(file).resolve(), name) == ((tmp_path / "loss.py").resolve(), "f")
    assert spec.loss.stage.arguments == {"tau": "2", "weight": "1,2"}
    assert Path(spec.compute.transform[0].partition(":")[0]).is_absolute()


def test_a_folder_as_the_model_is_relative_to_the_run_file(tmp_path: Path) -> None:
    """That of an adapter's base model; what is too long for a path is a wrong setting."""
    (tmp_path / "base").mkdir()
    run = write(tmp_path, RUN.replace("model.py:build", "base"))
    assert load(run).model.factory == str(tmp_path / "base")
    assert resolve(run, {"model": {"factory": "checkpoint"}}).model.factory == "checkpoint"
    for wrong in ("gone", "x" * 9000):
        assert "a function that returns the model" in message(run, {"model": {"factory": wrong}})


def test_files_named_in_chains_are_relative_to_the_run_file(tmp_path: Path) -> None:
    text = 'mine.py:soft:level=0.1 | dot:with="out.h5:clip:max_norm=1 | mean" | mean'
    found = resolve_paths(text, tmp_path)
    assert found == (
        f"{tmp_path}/mine.py:soft:level=0.1 | "
        f'dot:with="{tmp_path}/out.h5:clip:max_norm=1 | mean" | mean'
    )
    assert resolve_paths(found, tmp_path / "elsewhere") == found
    assert resolve_paths("a | | b", tmp_path) == "a | | b"
    (_, vector, _), (adam,) = parse(found), parse(resolve_paths("adam:state=o.pt", tmp_path))
    assert vector.files == {"with": tmp_path / "out.h5"}
    assert adam.files == {"state": tmp_path / "o.pt"}
    (adam,) = parse(resolve_paths("adam:state=o.pt,names=n.json", tmp_path))
    assert adam.files == {"state": tmp_path / "o.pt", "names": tmp_path / "n.json"}
    (adam,) = parse(resolve_paths("adam:state=o.pt,names=model", tmp_path))
    assert adam.arguments["names"] == "model"


def test_flags_win_and_their_paths_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, RUN + '[compute]\nbackend = "hooks"\nbatch_size = 7\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    flags = {
        "checkpoint": {"path": Path("other.pt")},
        "model": {"factory": "my.models:net"},
        "loss": {"name": "loss.py:f"},
        "compute": {"backend": "loop", "dtype": None, "transform": ["mine.py:soft"]},
    }
    spec = resolve(config, flags)
    assert spec.checkpoint.path == elsewhere / "other.pt"
    assert spec.model.factory == "my.models:net"
    assert spec.loss.name == f"{elsewhere / 'loss.py'}:f"
    assert (spec.compute.backend, spec.compute.batch_size) == ("loop", 7)
    assert spec.compute.transform == ("mine.py:soft",)
    assert spec.dataset.path == tmp_path / "data.npz"
    flags["dataset"] = {"path": Path("d.npz")}
    assert resolve(None, flags).dataset.path == elsewhere / "d.npz"


def test_a_batch_size_and_a_budget_are_one_choice(tmp_path: Path) -> None:
    """The flag takes the place of the run file's other one; side by side they are refused."""
    memory, size = 'memory = "2GB"\n', "batch_size = 7\n"
    config = write(tmp_path, f"{RUN}[compute]\n{memory}")
    spec = resolve(config, {"compute": {"batch_size": 3}}).compute
    assert (spec.memory, spec.batch_size) == (None, 3)
    write(tmp_path, f"{RUN}[compute]\n{size}")
    spec = resolve(config, {"compute": {"memory": "1GB"}}).compute
    assert (spec.memory, spec.batch_size) == ("1GB", None)
    write(tmp_path, f"{RUN}[compute]\n{size}{memory}seed = -1\n")
    told = message(config)
    assert f"{config}: compute.memory: memory and batch_size cannot be combined" in told
    assert "compute.seed: found -1" in told
    both = message(None, {"compute": {"memory": "1GB", "batch_size": 3}})
    assert "--memory: memory and batch_size cannot be combined" in both


def test_a_dataset_spec_lies_under_the_keys_beside_it_and_replaces_them_as_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(data, 'path = "d.npz"\ninputs = ["a"]\ntargets = ["b"]\n', "dataset.toml")
    beside = RUN.replace('path = "data.npz"', 'spec = "data/dataset.toml"\ntargets = []')
    spec = load(write(tmp_path, beside)).dataset
    assert (spec.path, spec.inputs, spec.targets) == (data / "d.npz", ("a",), ())
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path, RUN.replace('"data.npz"', '"data.npz"\ninputs = ["x"]'))
    other = resolve(config, {"dataset": {"path": Path("other.npz")}}).dataset
    assert (other.path, other.inputs) == (tmp_path / "other.npz", ("x",))
    third = resolve(config, {"dataset": {"path": Path("data/dataset.toml")}}).dataset
    assert (third.path, third.inputs, third.targets) == (data / "d.npz", ("a",), ("b",))
    one = load(write(tmp_path, RUN.replace('"data.npz"', '"data.npz"\ntargets = "inputs"')))
    assert one.dataset.targets == ("inputs",)


def test_inputs_may_be_named_by_keyword(tmp_path: Path) -> None:
    config = write(tmp_path, RUN.replace('"data.npz"', '"d.npz"\ninputs = {x = "a", y = "b"}'))
    spec = load(config).dataset
    assert spec.inputs == {"x": "a", "y": "b"}
    assert spec.arrays == ("a", "b", "targets")


def test_the_settings_can_be_written_down_and_read_again(tmp_path: Path) -> None:
    run = RUN.replace('build"', 'build"\nkwargs = {widths = [3, 4], made = 2024-01-02}')
    spec = load(write(tmp_path, run))
    assert spec.model.kwargs["made"] == date(2024, 1, 2)
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again.model_copy(update={"model": spec.model}).model_dump() == spec.model_dump()


def test_all_errors_are_told_at_once_with_file_key_and_what_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, 'path = "d.npz"\ninput = ["a"]\n[scale]\nimages = "much"\n', "dataset.toml")
    config = write(
        tmp_path,
        """
        [model]
        factory = "model"
        mode = "test"
        [checkpoint]
        path = 3
        [dataset]
        spec = "dataset.toml"
        reshape = {images = [0, 3]}
        [los]
        name = "mse"
        [compute]
        batch_sise = 4
        seed = "7"
        """,
    )
    text = message(config, {"compute": {"dtype": "float8"}})
    run, data = str(config), str(tmp_path / "dataset.toml")
    for line in (
        f"{run}: model.factory: found 'model'. Accepted: FILE.py:NAME",
        f"{run}: model.mode: found 'test'. Accepted: eval or train (--mode).",
        f"{run}: checkpoint.path: found 3. Accepted: the path",
        f"{data}: input: unknown key. Did you mean 'inputs'?",
        f"{data}: scale.images: found 'much'. Accepted: a table",
        f"{run}: dataset.reshape.images: found [0, 3]. Accepted: a table",
        f"{run}: los: unknown key. Did you mean 'loss'?",
        f"{run}: loss.name: missing. Accepted: a name from",
        f"{run}: compute.batch_sise: unknown key. Did you mean 'batch_size'?",
        f"{run}: compute.seed: found '7'. Accepted: an integer from 0 to 2^63 - 1 (--seed).",
        "--dtype: found 'float8'. Accepted: float32, float64, float16 or",
    ):
        assert line in text, line
    assert text.startswith("11 settings are wrong:")
    assert len(text.splitlines()) == 12


WRONG = {
    "version": ["2", "0", "true", "1.0", '"1"'],
    "model": ["3"],
    "compute": ["3"],
    "model.factory": ['"model.pyc"', '"checkpont"', '"a b:c"'],
    "model.kwargs": ["[1]", "{a = 0x" + "f" * 5000 + "}"],
    "model.mode": ["true"],
    "checkpoint.key": ['""', "3"],
    "checkpoint.unsafe_pickle": ['"yes"', "1"],
    "dataset.inputs": ["5", "[]", "[1]", "{x = 1}"],
    "dataset.targets": ['{x = "a"}'],
    "dataset.dtype": ['{a = "float31"}'],
    "dataset.scale": ["{a = nan}", "{a = true}"],
    "dataset.reshape": ["{a = 3}", "{a = [-1, -1]}", "{a = [-2]}"],
    "dataset.spec": ["3"],
    "dataset.path": ['""', '"a\\u0000b"'],
    "loss.name": ['"loss.py:"'],
    "compute.backend": ['""'],
    "compute.transform": ['"mean"', "[]"],
    "compute.parameters": ['"*"'],
    "compute.samples": ['"1:2:3"', "[0, 1]"],
    "compute.shard": ['"2/2"'],
    "compute.memory": ['"much"'],
    "compute.compression": ['"lz4"'],
    "compute.batch_size": ["0", "1.0", "true", "0x" + "f" * 5000],
    "compute.dtype": ['"int64"'],
    "compute.device": ['"cuda:٣"', '"cpu\\n"'],
    "compute.seed": ["-1"],
    "compute.layout": ['"sparse"'],
    "compute.verify": ["1979-05-27"],
    "compare.backends": ["[]", '["loop", "loop"]'],
}


@pytest.mark.parametrize(("place", "value"), [(k, v) for k, vs in WRONG.items() for v in vs])
def test_a_wrong_value_is_one_error_that_names_the_key(
    tmp_path: Path, place: str, value: str
) -> None:
    document = tomllib.loads(RUN)
    section, _, key = place.partition(".")
    lines = [] if key else [f"{section} = {value}"]
    for name in dict.fromkeys([*document, *([section] if key else [])]):
        if key or name != section:
            lines.append(f"[{name}]")
            lines += [f'{k} = "{v}"' for k, v in document.get(name, {}).items() if k != key]
        if key and name == section:
            lines.append(f"{key} = {value}")
    told = message(write(tmp_path, "\n".join(lines)))
    assert f"run.toml: {place}" in told
    assert "found" in told
    assert "Accepted" in told
    assert len(told) < 700


DEEP = b".".join([b"a"] * 50_000)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[model\n", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a = 1\n" * 200_000, "larger than 1,000,000 bytes"),
        (b"\xff" * 1_000_001, "larger than 1,000,000 bytes"),  # weights, by mistake
        (b"\x00", "not valid TOML"),
        (b"\n" + DEEP + b" = 1", "line 2 has more than 32 names joined by dots"),
        (
            b"[" + b" . ".join([b'"a.\\""'] * 9_000) + b"]",
            "line 1 has more than 32 names",
        ),
        (
            b"x = [{" + b".".join([b"'a'"] * 9_000) + b" = 1}]",
            "line 1 has more than 32 names",
        ),
    ],
)
@pytest.mark.parametrize("name", ["run.toml", "dataset.toml"])
def test_a_file_that_is_no_run_file(
    tmp_path: Path, content: bytes, expected: str, name: str
) -> None:
    config = write(tmp_path, RUN.replace('path = "data.npz"', 'spec = "dataset.toml"'))
    (tmp_path / name).write_bytes(content)
    told = message(config)
    assert expected in told
    assert str(tmp_path / name) in told
    assert "missing" not in told  # nothing follows from a file that could not be read
    assert len(told) < 500


def test_a_missing_run_file_a_directory_and_a_missing_dataset_spec(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "none.toml")
    assert "directory" in message(tmp_path)
    assert "regular file" in message(Path("/dev/null"))
    config = write(tmp_path, RUN.replace('path = "data.npz"', 'spec = "none.toml"'))
    assert f"{tmp_path / 'none.toml'}: there is no such file" in message(config)
    write(tmp_path, 'spec = "other.toml"\npath = "d.npz"\n', "none.toml")
    assert "none.toml: spec: unknown key" in message(config)


MANY = {
    "keys": "".join(f"k{k} = 1\n" for k in range(20_000)),
    "values": f"transform = [{'1,' * 60_000}]",
    "quoted": f"parameters = [{'2,' * 60_000}]",
}


@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_of_many_mistakes_some_are_told(tmp_path: Path, text: str) -> None:
    told = message(write(tmp_path, f"{RUN}[compute]\n{text}"))
    assert told.startswith("more than 20 settings are wrong:")
    assert len(told) < 10_000
    assert len(told.splitlines()) == 22


@pytest.mark.parametrize("letter", ["x", "|", ",", "[", "*", ".py:a"])
def test_a_long_text_is_refused_before_it_takes_long(tmp_path: Path, letter: str) -> None:
    long = letter * 150_000
    for key, text in (
        ("compute.transform", f'{RUN}[compute]\ntransform = ["{long}"]'),
        ("compute.parameters", f'{RUN}[compute]\nparameters = ["{long}"]'),
        ("loss.name", RUN.replace('"mse"', f'"{long}"')),
    ):
        told = message(write(tmp_path, text))
        assert f"{key}" in told
        assert "found a text of" in told
        assert len(told) < 500


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    assert load(path).loss.name == "mse"


def test_without_anything_every_needed_setting_is_named() -> None:
    told = message(None)
    for key in ("--model", "CHECKPOINT", "DATASET", "--loss"):
        assert f"{key}: missing" in told


def test_a_setting_knows_the_file_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text('path = "d.npz"\n')
    text = RUN.replace('path = "data.npz"', 'spec = "data.toml"') + "[compute]\nseed = 1\n"
    config = write(tmp_path, text)
    spec = resolve(config, {"compute": {"backend": "loop"}, "loss": {"name": "l1"}})
    assert spec.place("compute", "seed") == f"{config}: compute.seed"
    assert spec.place("dataset", "path") == f"{tmp_path / 'data.toml'}: path"
    assert spec.place("compute", "backend") is None and spec.is_flag("compute", "backend")
    assert spec.place("loss", "name") is None and spec.is_flag("loss", "name")
    assert spec.place("compute", "dtype") is None and not spec.is_flag("compute", "dtype")
    assert not spec.is_flag("compute", "seed")


SECTIONS: dict[str, list[str]] = {}
for each in run_options():
    SECTIONS.setdefault(each.section, []).append(each.key)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.sampled_from(["a.toml", "m.py:f", "0:3", "eval", "float32", "cpu", Path("x.toml")]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
tables = st.fixed_dictionaries(
    {},
    optional={
        name: st.dictionaries(st.sampled_from([*keys, "spec", "kwarg"]), values, max_size=5)
        | values
        for name, keys in SECTIONS.items()
    }
    | {"version": values, "extra": values},
)


@settings(max_examples=100, deadline=None)
@given(tables)
def test_whatever_is_given_the_answer_is_a_spec_or_a_spec_error(overrides: dict) -> None:
    try:
        spec = resolve(None, overrides)
    except SpecError as error:
        assert error.remedy
    else:
        assert isinstance(spec, RunSpec)
