"""The run file: strict, all errors at once, flags win, paths relative to the file."""

import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.config import RunSpec, load, parse_samples, resolve, split_reference
from gradscope.errors import SpecError
from gradscope.sources.draft import quoted

RUN = """
[model]
factory = "model.py:build"
[checkpoint]
path = "weights.pt"
[dataset]
path = "data.npz"
[loss]
name = "mse"
"""


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
    assert spec.version == 1
    assert spec.model.mode == "eval"
    assert spec.model.kwargs == {}
    assert spec.dataset.inputs == ("inputs",)
    assert spec.dataset.targets == ("targets",)
    assert spec.compute.backend == "auto"
    assert spec.compute.transform == ("identity",)
    assert spec.compute.seed == 0
    assert spec.compute.layout == "dense"
    assert spec.compute.verify == "audit"
    assert spec.compare.backends == ("loop", "hooks", "vmap", "expand")


def test_paths_of_a_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write(tmp_path, RUN.replace("data.npz", "../data.npz"))
    monkeypatch.chdir(inner)
    spec = load(Path("../run.toml"))
    assert spec.checkpoint.path.resolve() == (tmp_path / "weights.pt").resolve()
    assert spec.dataset.path.resolve() == (tmp_path.parent / "data.npz").resolve()
    file, name = split_reference(spec.model.factory)
    assert (Path(file).resolve(), name) == ((tmp_path / "model.py").resolve(), "build")
    assert all(p.is_absolute() for p in (spec.checkpoint.path, spec.dataset.path, Path(file)))


def test_flags_win_and_their_paths_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, RUN + '[compute]\nbackend = "hooks"\nbatch_size = 7\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    spec = resolve(
        config,
        {
            "checkpoint": {"path": Path("other.pt")},
            "model": {"factory": "my.models:net"},
            "loss": {"name": "loss.py:f"},
            "compute": {"backend": "loop", "dtype": None},
        },
    )
    assert spec.checkpoint.path == elsewhere / "other.pt"
    assert spec.model.factory == "my.models:net"
    assert spec.loss.name == f"{elsewhere / 'loss.py'}:f"
    assert (spec.compute.backend, spec.compute.batch_size) == ("loop", 7)
    assert spec.dataset.path == tmp_path / "data.npz"


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
    assert f"{config}: compute.memory: memory is there to choose the batch size" in told
    assert "compute.seed: found -1" in told
    both = message(None, {"compute": {"memory": "1GB", "batch_size": 3}})
    assert "command line: compute.memory: memory is there" in both


def test_no_run_file_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = resolve(
        None,
        {
            "model": {"factory": "model.py:build"},
            "checkpoint": {"path": Path("w.pt")},
            "dataset": {"path": Path("d.npz")},
            "loss": {"name": "mse"},
        },
    )
    assert spec.dataset.path == tmp_path / "d.npz"


def test_a_dataset_spec_lies_under_the_keys_beside_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(data, 'path = "d.npz"\ninputs = ["a"]\ntargets = ["b"]\n', "dataset.toml")
    config = write(
        tmp_path, RUN.replace('path = "data.npz"', 'spec = "data/dataset.toml"\ntargets = []')
    )
    spec = load(config).dataset
    assert (spec.path, spec.inputs, spec.targets) == (data / "d.npz", ("a",), ())


def test_a_data_file_as_flag_keeps_the_columns_a_spec_as_flag_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path, RUN.replace('"data.npz"', '"data.npz"\ninputs = ["a"]'))
    other = resolve(config, {"dataset": {"path": Path("other.npz")}}).dataset
    assert (other.path, other.inputs) == (tmp_path / "other.npz", ("a",))
    write(tmp_path, 'path = "third.npz"\ntargets = ["y"]\n', "third.toml")
    third = resolve(config, {"dataset": {"path": Path("third.toml")}}).dataset
    assert (third.path, third.inputs, third.targets) == (
        tmp_path / "third.npz",
        ("inputs",),
        ("y",),
    )


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
        factory = "model.py"
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
        f"{run}: model.factory: found 'model.py'. Accepted: FILE.py:NAME",
        f"{run}: model.mode: found 'test'. Accepted: eval or train",
        f"{run}: checkpoint.path: found 3. Accepted: the path",
        f"{data}: input: unknown key. Did you mean 'inputs'?",
        f"{data}: scale.images: found 'much'. Accepted: a table",
        f"{run}: dataset.reshape.images: found [0, 3]. Accepted: a table",
        f"{run}: los: unknown key. Did you mean 'loss'?",
        f"{run}: loss.name: missing. Accepted: a loss",
        f"{run}: compute.batch_sise: unknown key. Did you mean 'batch_size'?",
        f"{run}: compute.seed: found '7'. Accepted: an integer",
        "command line: compute.dtype: found 'float8'. Accepted: float32",
    ):
        assert line in text, line
    assert text.startswith("11 settings are wrong:")
    assert len(text.splitlines()) == 12


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "kwargs", "[1]"),
        ("model", "kwargs", "{a = 0x" + "f" * 5000 + "}"),
        ("model", "mode", "true"),
        ("dataset", "inputs", '"images"'),
        ("dataset", "inputs", "[]"),
        ("dataset", "inputs", "[1]"),
        ("dataset", "inputs", "{x = 1}"),
        ("dataset", "targets", '{x = "a"}'),
        ("dataset", "dtype", '{a = "float31"}'),
        ("dataset", "scale", "{a = nan}"),
        ("dataset", "scale", "{a = true}"),
        ("dataset", "reshape", "{a = 3}"),
        ("dataset", "reshape", "{a = [-1, -1]}"),
        ("dataset", "reshape", "{a = [-2]}"),
        ("dataset", "spec", "3"),
        ("dataset", "path", '""'),
        ("dataset", "path", '"a\\u0000b"'),
        ("compute", "backend", '""'),
        ("compute", "transform", '"mean"'),
        ("compute", "transform", "[]"),
        ("compute", "parameters", '"*"'),
        ("compute", "samples", '"1:2:3"'),
        ("compute", "samples", "[0, 1]"),
        ("compute", "batch_size", "0"),
        ("compute", "batch_size", "1.0"),
        ("compute", "batch_size", "true"),
        ("compute", "batch_size", "0x" + "f" * 5000),
        ("compute", "dtype", '"int64"'),
        ("compute", "device", '"cuda:٣"'),
        ("compute", "device", '"cpu\\n"'),
        ("compute", "seed", "-1"),
        ("compute", "layout", '"sparse"'),
        ("compute", "verify", "1979-05-27"),
        ("compare", "backends", "[]"),
        ("compare", "backends", '["loop", "loop"]'),
    ],
)
def test_a_wrong_value_is_one_error_that_names_the_key(
    tmp_path: Path, section: str, key: str, value: str
) -> None:
    base = tomllib.loads(RUN)
    if section not in base:
        text = f"{RUN}[{section}]\n{key} = {value}\n"
    elif key in base[section]:
        text = RUN.replace(f'{key} = "data.npz"', f"{key} = {value}")
    else:
        text = RUN.replace(f"[{section}]", f"[{section}]\n{key} = {value}")
    told = message(write(tmp_path, text))
    assert f"run.toml: {section}.{key}" in told
    assert "found" in told
    assert "Accepted" in told
    assert len(told) < 700


@pytest.mark.parametrize("version", ["2", "0", "true", "1.0", '"1"'])
def test_another_version_is_refused(tmp_path: Path, version: str) -> None:
    assert "version: found" in message(write(tmp_path, f"version = {version}\n{RUN}"))


@pytest.mark.parametrize("section", ["model", "checkpoint", "dataset", "loss", "compute"])
def test_a_section_must_be_a_table(tmp_path: Path, section: str) -> None:
    text = RUN.replace(f"[{section}]", "[was]")
    told = message(write(tmp_path, f"{section} = 3\n{text}"))
    assert f"{section}: found 3" in told
    assert f"Accepted: a table [{section}]" in told


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[model\n", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a = 1\n" * 200_000, "larger than 1,000,000 bytes"),
        (b"\x00", "not valid TOML"),
        (
            b"\n" + b".".join([b"a"] * 50_000) + b" = 1",
            "more than 32 names are joined by dots at line 2",
        ),
        (b"[" + b" . ".join([b'"a.\\""'] * 9_000) + b"]", "names are joined by dots at line 1"),
        (b"x = [{" + b".".join([b"'a'"] * 9_000) + b" = 1}]", "names are joined by dots at line 1"),
    ],
)
def test_a_file_that_is_no_run_file(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    told = message(path)
    assert expected in told
    assert str(path) in told
    assert "missing" not in told  # nothing follows from a file that could not be read
    assert len(told) < 500


def test_a_key_of_a_dataset_spec_is_no_longer_either(tmp_path: Path) -> None:
    write(tmp_path, ".".join("a" * 33) + " = 1", "deep.toml")
    config = write(tmp_path, RUN.replace('path = "data.npz"', 'spec = "deep.toml"'))
    assert "deep.toml: more than 32 names are joined by dots at line 1" in message(config)
    write(tmp_path, ".".join("a" * 32) + " = 1", "deep.toml")
    assert "deep.toml: a: unknown key" in message(config)


MANY = {
    "keys": "".join(f"k{k} = 1\n" for k in range(50_000)),
    "values": f"transform = [{'1,' * 200_000}]",
    "quoted": f"parameters = [{'2,' * 200_000}]",
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
    loss = RUN.replace('"mse"', f'"{long}"')
    for key, text in (
        ("compute.transform", f'{RUN}[compute]\ntransform = ["{long}"]'),
        ("compute.parameters", f'{RUN}[compute]\nparameters = ["{long}"]'),
        ("loss.name", loss),
    ):
        told = message(write(tmp_path, text))
        assert f"{key}" in told
        assert "found a text of" in told
        assert len(told) < 500


def test_a_missing_run_file_a_directory_and_a_missing_dataset_spec(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "none.toml")
    assert "directory" in message(tmp_path)
    assert "regular file" in message(Path("/dev/null"))
    config = write(tmp_path, RUN.replace('path = "data.npz"', 'spec = "none.toml"'))
    assert f"{tmp_path / 'none.toml'}: there is no such file" in message(config)
    write(tmp_path, 'spec = "other.toml"\npath = "d.npz"\n', "none.toml")
    assert "none.toml: spec: unknown key" in message(config)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    assert load(path).loss.name == "mse"


def test_without_anything_every_needed_setting_is_named() -> None:
    told = message(None)
    for key in ("model.factory", "checkpoint.path", "dataset.path", "loss.name"):
        assert f"command line: {key}: missing" in told


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [("0:10", 0, 10), ("5:", 5, None), (":7", None, 7), (":", None, None), ("00:1", 0, 1)],
)
def test_samples(text: str, start: int | None, stop: int | None) -> None:
    assert parse_samples(text) == slice(start, stop)


@pytest.mark.parametrize(
    "text", ["", "5", "a:b", "-1:3", "5:5", "7:3", ":0", "1:2:3", "1 : 2", "١:٢"]
)
def test_samples_of_another_form(text: str) -> None:
    with pytest.raises(SpecError, match="A:B"):
        parse_samples(text)


@pytest.mark.parametrize(
    "text", ["model.py", "model.py:", ":build", "a b:c", "a..b:c", "m:1x", "m:"]
)
def test_references_of_another_form(text: str) -> None:
    with pytest.raises(SpecError, match=r"FILE\.py:NAME"):
        split_reference(text)


def test_torch_is_not_imported() -> None:
    code = "import sys, gradscope.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def keys_of(model: type) -> list[str]:
    return [*model.model_fields]


SECTIONS = {
    name: keys_of(field.annotation)
    for name, field in RunSpec.model_fields.items()
    if hasattr(field.annotation, "model_fields")
}
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


@settings(max_examples=150, deadline=None)
@given(tables)
def test_whatever_is_given_the_answer_is_a_spec_or_a_spec_error(overrides: dict) -> None:
    try:
        spec = resolve(None, overrides)
    except SpecError as error:
        assert error.remedy
    else:
        assert isinstance(spec, RunSpec)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_whatever_a_file_holds_the_answer_is_a_spec_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError):  # no such file names a model
        load(path)


def test_files_named_in_chains_are_relative_to_the_run_file(tmp_path):
    from gradscope.core.grammar import anchored

    text = 'mine.py:soft:level=0.1 | dot:with="out.h5:clip:max_norm=1 | mean" | mean'
    found = anchored(text, tmp_path)
    assert found == (
        f"{tmp_path}/mine.py:soft:level=0.1 | "
        f'dot:with="{tmp_path}/out.h5:clip:max_norm=1 | mean" | mean'
    )
    assert anchored(found, tmp_path / "elsewhere") == found
    assert anchored("a | | b", tmp_path) == "a | | b"


@pytest.mark.parametrize(
    ("key", "value"),
    [("unsafe_pickle", '"yes"'), ("unsafe_pickle", "1"), ("key", '""'), ("key", "3")],
)
def test_a_trust_is_given_in_so_many_words(tmp_path: Path, key: str, value: str) -> None:
    text = RUN.replace('path = "weights.pt"', f'path = "weights.pt"\n{key} = {value}')
    assert f"checkpoint.{key}: found" in message(write(tmp_path, text))


def test_the_checkpoint_itself_may_be_the_model(tmp_path: Path) -> None:
    spec = load(write(tmp_path, RUN.replace("model.py:build", "checkpoint")))
    assert spec.model.factory == "checkpoint"
    assert spec.checkpoint.unsafe_pickle is False
    assert "or checkpoint, the model" in message(
        write(tmp_path, RUN.replace("model.py:build", "checkpont"))
    )


def test_a_setting_knows_the_file_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text('path = "d.npz"\n')
    text = RUN.replace('path = "data.npz"', 'spec = "data.toml"') + "[compute]\nseed = 1\n"
    config = write(tmp_path, text)
    spec = resolve(config, {"compute": {"backend": "loop"}, "loss": {"name": "l1"}})
    assert spec.place("compute", "seed") == f"{config}: compute.seed"
    assert spec.place("dataset", "path") == f"{tmp_path / 'data.toml'}: path"
    assert spec.place("compute", "backend") is None  # the command line
    assert spec.place("loss", "name") is None
    assert spec.place("compute", "dtype") is None  # nobody


_words = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=6)
_toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=5,
)


def as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        pairs = (f"{quoted(k)} = {as_toml(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    return repr(value)


@settings(max_examples=150, deadline=None)
@given(
    kwargs=st.dictionaries(_words, _toml_values, max_size=3),
    seed=st.integers(0, 2**63 - 1),
    parameters=st.none() | st.lists(_words, min_size=1, max_size=3),
    arrays=st.lists(_words, min_size=1, max_size=3, unique=True),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    kwargs: dict,
    seed: int,
    parameters: list[str] | None,
    arrays: list[str],
) -> None:
    compute = {"seed": seed} | ({} if parameters is None else {"parameters": parameters})
    document = tomllib.loads(RUN) | {"compute": compute}
    document["model"]["kwargs"] = kwargs
    document["dataset"]["inputs"] = arrays
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(
        "".join(f"{quoted(k)} = {as_toml(v)}\n" for k, v in document.items()), encoding="utf-8"
    )
    spec = load(path)
    assert spec.model.kwargs == kwargs
    assert spec.compute.seed == seed
    assert spec.compute.parameters == (None if parameters is None else tuple(parameters))
    assert spec.dataset.inputs == tuple(arrays)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*SECTIONS, "version", "x"]), _toml_values, max_size=4))
def test_any_document_gives_a_spec_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, document: dict
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    text = "".join(f"{quoted(k)} = {as_toml(v)}\n" for k, v in document.items())
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"any\.toml: ") as caught:  # no loss is ever named
        load(path)
    assert caught.value.remedy
