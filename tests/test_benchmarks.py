"""The benchmark on tiny models: every answer is checked, and a wrong one never counts."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradscope
from benchmarks import fallbacks, later, marks, scaling, training
from benchmarks.__main__ import main
from benchmarks.architectures import __main__ as architectures
from benchmarks.architectures.cases import ARCHITECTURES, tokens
from benchmarks.fallbacks import BACKENDS, MODELS
from benchmarks.measure import OutOfTimeError, Timing, measured, time_limit
from benchmarks.methods import METHODS, Call, DeclinedError, Method, Setting
from benchmarks.methods.dense import Projection, clipped, moments, norms, read, write
from benchmarks.reference import Reference, error, reference
from benchmarks.run import Cell, Conditions, cell, cells
from benchmarks.tasks import TASKS
from benchmarks.workloads import (
    FAMILIES,
    LARGE,
    REAL,
    TOLERANCE,
    Workload,
    clear_of_kinks,
    workload,
)
from gradscope.cli.app import run as command_line
from gradscope.training import read_history

CPU = torch.device("cpu")
OURS = [m for m in METHODS.values() if m.ours and not m.compiled]
PEERS = [m for m in METHODS.values() if m.comparable and not m.ours and not m.compiled]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Load the other tools, whose code warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in {m.needs for m in PEERS if m.needs is not None}:
            if find_spec(name) is not None:
                import_module(name)


def tiny(name: str) -> Workload:
    return workload(name, FAMILIES[name].quick)


@cache
def right_of(name: str) -> Reference:
    return reference(tiny(name))


@pytest.fixture
def conditions(tmp_path: Path) -> Conditions:
    return Conditions(repeats=1, scratch=tmp_path)


def check(found: Cell) -> None:
    assert found.status == "right", found.reason
    assert found.timing is not None
    assert found.error is not None and found.error <= TOLERANCE
    assert found.ratio is not None and 0 < found.ratio < float("inf")


@pytest.mark.full
def test_gradscope_compiled_is_right_or_declines(conditions: Conditions) -> None:
    method = METHODS["gradscope compiled"]
    found = cell(tiny("mlp"), right_of("mlp"), "clipped", method, conditions)
    check(found)
    assert found.compile_seconds is not None
    recurrent = cell(tiny("lstm"), right_of("lstm"), "norms", method, conditions)
    assert recurrent.status == "declined"
    assert recurrent.reason is not None and recurrent.reason.startswith("not compiled: ")
    assert cell(tiny("mlp"), right_of("mlp"), "file", method, conditions).status == "declined"


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_gradscope_is_right_on_every_model(name: str, conditions: Conditions) -> None:
    work = tiny(name)
    right = right_of(name)
    tasks = [t for t in FAMILIES[name].tasks if t in ("gradients", "norms", "moments", "clipped")]
    chosen = [METHODS["gradscope auto"], METHODS["gradscope expand"]]
    found = list(cells(work, right, tasks, chosen, conditions))
    assert len(found) == 2 * len(tasks) >= 4
    for one in found:
        check(one)


def declines(method: Method, task: str) -> bool:
    if method.name == "Opacus ghost":
        return task not in ("norms", "clipped")
    return not method.ours and task in ("kronecker", "sjlt")


@pytest.mark.sampled
@pytest.mark.parametrize("task", FAMILIES["mlp"].tasks)
def test_every_method_on_the_perceptron(task: str, conditions: Conditions) -> None:
    work = tiny("mlp")
    right = right_of("mlp")
    for found in cells(work, right, [task], [*OURS, *PEERS], conditions):
        if found.status == "not installed":
            assert METHODS[found.method].needs is not None
        elif declines(METHODS[found.method], task):
            assert found.status == "declined"
        else:
            check(found)
    assert not list(conditions.scratch.iterdir())  # nothing is left


def test_an_absent_tool_says_so(conditions: Conditions) -> None:
    def never(task: str, setting: Setting) -> Call:
        raise AssertionError("it must not be prepared")

    work = tiny("mlp")
    absent = Method("absent", never, needs="a_tool_that_nobody_has")
    found = cell(work, right_of("mlp"), "norms", absent, conditions)
    assert found.status == "not installed"
    assert found.reason == "a_tool_that_nobody_has is not installed"


def spoilt(method: Method, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Method:
    def prepare(task: str, setting: Setting) -> Call:
        call = method.prepare(task, setting)

        def result(raw: Any) -> dict[str, Tensor]:
            return spoil({name: value.clone() for name, value in call.result(raw).items()})

        return Call(call.run, call.before, result, call.expected)

    return Method("spoilt", prepare, needs=method.needs, ours=method.ours)


def rolled(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.flatten().roll(1).view(value.shape) for name, value in found.items()}


def scaled(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 1.001 * value for name, value in found.items()}


def one_parameter_zero(found: dict[str, Tensor]) -> dict[str, Tensor]:
    name = max(found, key=lambda k: float(found[k].norm()))
    return {**found, name: torch.zeros_like(found[name])}


def not_a_number(found: dict[str, Tensor]) -> dict[str, Tensor]:
    next(iter(found.values())).view(-1)[0] = float("nan")
    return found


def incomplete(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(found.items())[1:])


@pytest.mark.parametrize("task", ["gradients", "clipped"])
@pytest.mark.parametrize("spoil", [rolled, scaled, one_parameter_zero, not_a_number, incomplete])
def test_a_wrong_answer_is_marked_wrong(
    task: str,
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    conditions: Conditions,
) -> None:
    work = tiny("mlp")
    bad = spoilt(METHODS["vmap(grad)"], spoil)
    found = cell(work, right_of("mlp"), task, bad, conditions)
    assert found.status == "wrong"
    assert found.reason is not None and found.reason.startswith("relative error")
    assert found.ratio is None  # its time counts for nothing


def test_gradients_of_the_mean_are_wrong(conditions: Conditions) -> None:
    """The most common mistake: a factor 1/n."""

    def prepare(task: str, setting: Setting) -> Call:
        right = METHODS["vmap(grad)"].prepare(task, setting).run
        return Call(lambda: {k: g / setting.workload.n for k, g in right().items()})

    work = tiny("cnn")
    found = cell(work, right_of("cnn"), "gradients", Method("mean", prepare), conditions)
    assert found.status == "wrong"


def test_what_a_tool_raises_is_its_reason(conditions: Conditions) -> None:
    def refuse(task: str, setting: Setting) -> Call:
        raise TypeError("no rule for this layer\nand a long story")

    def decline(task: str, setting: Setting) -> Call:
        raise DeclinedError("not this task")

    work = tiny("mlp")
    right = right_of("mlp")
    refused = cell(work, right, "norms", Method("a", refuse), conditions)
    assert refused.status == "refused"
    assert refused.reason == "TypeError: no rule for this layer"
    declined = cell(work, right, "norms", Method("b", decline), conditions)
    assert (declined.status, declined.reason) == ("declined", "not this task")
    late = Method("c", lambda task, setting: Call(lambda: time.sleep(60), first_limit=0.2))
    stopped = cell(work, right, "norms", late, conditions)
    assert stopped.status == "refused"
    assert stopped.reason is not None and "took more than" in stopped.reason


def test_how_often_a_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run() -> int:
        calls.append("call")
        return len(calls)

    def measure(repeats: int) -> tuple[Timing, int]:
        calls.clear()
        return measured(
            run, lambda: calls.append("before"), lambda: calls.append("unit"), CPU, repeats
        )

    timing, result = measure(3)
    assert calls == ["before", "call", "unit", *["before", "call"], *["unit", "before", "call"] * 3]
    assert result == 5  # what the second call returned
    assert len(timing.seconds) == len(timing.unit) == 3
    monkeypatch.setattr("benchmarks.measure.BUDGET", 0.0)
    timing, result = measure(3)
    assert calls == ["before", "call", "unit", "unit"]
    assert timing.seconds == (timing.first,) and result == 2


def test_the_time_limit_lets_go() -> None:
    with pytest.raises(OutOfTimeError), time_limit(0.05):
        time.sleep(60)
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # no alarm is left


def test_the_workload_is_the_same_every_time_and_for_every_method(conditions: Conditions) -> None:
    first, second = tiny("gpt"), tiny("gpt")
    state = {k: v.clone() for k, v in first.model.state_dict().items()}
    assert torch.equal(first.inputs, second.inputs)
    list(cells(first, reference(first), ["norms"], PEERS, conditions))
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, state[name])
        assert torch.equal(value, first.model.state_dict()[name])
    assert all(not module._forward_hooks for module in first.model.modules())


def test_the_full_sizes_are_those_that_are_stated() -> None:
    sizes = {name: workload(name, FAMILIES[name].full) for name in ("cnn", "mlp", "lstm")}
    assert sizes["cnn"].parameters == 26_010
    assert sizes["mlp"].parameters == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    assert sizes["lstm"].parameters == 4 * 128 * (64 + 128 + 2) + 128 * 10 + 10
    assert [sizes[name].n for name in ("mlp", "cnn", "lstm")] == [256, 512, 64]


def test_samples_at_a_kink_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
    torch.nn.init.ones_(model[0].weight)
    near = torch.tensor([[1.0], [1e-6], [-1e-6], [-1.0], [1e-5]])
    assert clear_of_kinks(model, near).tolist() == [True, False, False, True, True]
    assert bool(clear_of_kinks(tiny("resnet").model, tiny("resnet").inputs).all())


def test_the_reference_against_autograd() -> None:
    work = tiny("tied")
    found = reference(work)
    names = [name for name, _ in work.model.named_parameters()]
    whole = torch.autograd.grad(work.losses().sum(), list(work.model.parameters()))
    for name, total in zip(names, whole, strict=True):
        torch.testing.assert_close(found.mean[name].float() * work.n, total)
    assert len(found.norms) == work.n
    assert float(found.norms.min()) < found.max_norm < float(found.norms.max())
    rows = torch.stack([g.flatten(1).square().sum(1) for g in found.gradients.values()])
    torch.testing.assert_close(rows.sum(0).sqrt(), found.norms[found.rows])


def test_the_error_is_that_of_the_worst_row_and_parameter() -> None:
    right = {"a": torch.ones(3, 4).double(), "b": torch.ones(3, 2).double()}
    one_off = {"a": right["a"].clone(), "b": right["b"].clone()}
    one_off["b"][2, 0] += 0.5
    assert error(right, right, by_row=True) == 0
    assert error(one_off, right, by_row=True) == pytest.approx(0.5 / 2**0.5)
    assert error(one_off, right, by_row=False) == pytest.approx(0.5 / 6**0.5)
    assert error({"a": right["a"]}, right, by_row=True) == float("inf")
    assert error({**right, "b": right["b"][:2]}, right, by_row=True) == float("inf")


def test_what_dense_tools_do_with_gradients() -> None:
    """Against numpy's arithmetic on the flat matrix."""
    generator = torch.Generator().manual_seed(0)
    gradients = {
        "w": torch.randn(5, 3, 2, generator=generator),
        "b": torch.randn(5, 4, generator=generator),
    }
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1).numpy()
    sizes = (flat**2).sum(1) ** 0.5
    torch.testing.assert_close(norms(gradients)["norms"], torch.from_numpy(sizes))
    limit = float(sizes.mean())
    factors = [min(1.0, limit / size) for size in sizes]
    cut = clipped(gradients, limit)["b"].numpy()
    expected = sum(f * row[6:] for f, row in zip(factors, flat, strict=True)) / 5
    assert abs(cut - expected).max() < 1e-6
    found = moments(gradients)
    assert abs(found["second:w"].numpy().ravel() - (flat[:, :6] ** 2).mean(0)).max() < 1e-6
    total = moments(gradients, {k: g.sum(0) for k, g in gradients.items()})
    torch.testing.assert_close(found["mean:b"], total["mean:b"])


def test_a_projection_that_is_made_anew_is_the_one_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = {"w": torch.randn(2, 700), "b": torch.randn(2, 3)}
    kept = Projection(703, torch.device("cpu"))
    monkeypatch.setattr("benchmarks.methods.dense._KEPT", 0)
    monkeypatch.setattr("benchmarks.methods.dense._BLOCK", 703)
    anew = Projection(703, torch.device("cpu"))
    torch.testing.assert_close(kept(gradients), anew(gradients))
    reordered = {"b": gradients["b"], "w": gradients["w"]}
    torch.testing.assert_close(kept(gradients), kept(reordered))
    # E‖gR‖² = ‖g‖², within 1/√512 or so
    flat = torch.cat(list(gradients.values()), 1)
    assert (kept(gradients)["projection"].norm(dim=1) / flat.norm(dim=1) - 1).abs().max() < 0.2


@pytest.mark.full
def test_a_command_is_checked_and_counted(conditions: Conditions) -> None:
    found = cell(tiny("mlp"), right_of("mlp"), "command", METHODS[marks.AUTO], conditions)
    check(found)
    assert found.timing is not None and found.timing.peak_bytes is not None
    assert found.timing.peak_bytes > 2**26  # torch alone
    assert not list(conditions.scratch.iterdir())


def test_gradients_a_part_at_a_time(
    conditions: Conditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, method = tiny("llama"), METHODS["vmap(grad)"]
    monkeypatch.setattr("benchmarks.methods.vmapped._HELD", 4 * 2 * work.parameters)
    for task in ("norms", "clipped"):
        check(cell(work, right_of("llama"), task, method, conditions))
    assert cell(work, right_of("llama"), "kronecker", method, conditions).status == "declined"


def test_only_adapters_are_differentiated() -> None:
    work = tiny("lora")
    rank, layers, width, kept = 2, 1, 16, 8  # of two heads of four: the values are half as wide
    assert work.parameters == layers * rank * (width + width + width + kept)
    assert set(right_of("lora").gradients) == set(work.trainable)
    assert all(float(g.norm()) > 0 for g in right_of("lora").gradients.values())


@pytest.mark.parametrize("name", [*REAL, *LARGE])
def test_a_real_model_is_measured_as_it_is_at_full_size(name: str) -> None:
    """Without dropout, and no sample changes another's loss: as an average over a batch would."""
    work = tiny(name)
    whole = work.losses()
    torch.testing.assert_close(work.losses(), whole)
    one = torch.cat(
        [
            replace(work, inputs=work.inputs[i : i + 1], targets=work.targets[i : i + 1]).losses()
            for i in range(work.n)
        ]
    )
    torch.testing.assert_close(one, whole)
    assert set(work.family.tasks) <= set(TASKS)


def test_real_sizes_are_measured_sparingly(conditions: Conditions) -> None:
    chosen = [METHODS["plain backward"], METHODS[marks.AUTO]]
    conditions = replace(conditions, repeats=2)
    found = list(cells(tiny("vit"), right_of("vit"), ["norms", "clipped"], chosen, conditions))
    unit, norms, again, clipped = found
    assert again == replace(unit, task="clipped")  # measured once
    assert norms.timing is not None and len(norms.timing.seconds) == 2
    assert norms.result_bytes in (4 * tiny("vit").n, 8 * tiny("vit").n)
    assert clipped.result_bytes == 4 * tiny("vit").parameters


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("tf32", 2e-2), ("bf16", 0.1)])
def test_a_number_format_has_its_own_bound(
    precision: str, bound: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "found.json"
    asked = ["--quick", "--models", "gpt", "--tasks", "norms", "--methods", "gradscope auto"]
    asked += ["--precision", precision, "--scratch", str(tmp_path), "--json", str(place)]
    assert main(asked) == 0
    document = json.loads(place.read_text())
    assert document["settings"]["precision"] == precision
    (found,) = [each for each in document["cells"] if each["method"] == "gradscope auto"]
    assert (found["status"], found["error"] < bound) == ("right", True)
    assert found["error"] > (1e-4 if precision == "bf16" else 0)  # bf16 has 8 bits
    assert found["tokens_per_second"] == pytest.approx(18 / found["seconds"])  # 3 of 6 tokens
    capsys.readouterr()


def test_the_memory_of_real_sizes_has_a_mark() -> None:
    def taking(method: str, peak: int, task: str = "norms") -> Cell:
        timing = Timing(first=1.0, seconds=(1.0,), unit=(1.0,), peak_bytes=peak)
        return Cell("bert", task, method, "right", timing=timing, result_bytes=10**9)

    unit = taking("plain backward", 2 * 10**9)
    assert marks.verdicts([unit, taking(marks.AUTO, 4 * 10**9)]) == []
    assert marks.verdicts([unit, taking(marks.AUTO, 5 * 10**9)]) == [
        "bert, norms: 5.00 GB of memory, the mark is 4.00"
    ]
    small = [replace(one, model="gpt") for one in (unit, taking(marks.AUTO, 5 * 10**9))]
    assert marks.verdicts(small) == []
    command = taking(marks.AUTO, 6 * 10**9, "command")
    assert marks.verdicts([unit, command]) == ["bert, command: 6.00 GB of memory, the mark is 5.00"]


def test_absent_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.real.NEEDS", ("torch", "a_package_that_nobody_has"))
    with pytest.raises(SystemExit):
        main(["--quick", "--models", "gpt2"])
    assert "a_package_that_nobody_has" in capsys.readouterr().err


def timed(method: str, ratio: float, first: float = 1.0, task: str = "norms") -> Cell:
    timing = Timing(first=first, seconds=(ratio, 2 * ratio), unit=(1.0, 1.5), peak_bytes=0)
    return Cell("gpt", task, method, "right", timing=timing, error=0.0)


def test_missed_marks_and_faster_tools_are_named() -> None:
    fine = timed(marks.AUTO, 1.0)
    assert marks.verdicts([fine, timed("vmap(grad)", 1.1)]) == []
    assert marks.verdicts([timed(marks.AUTO, 1.1)]) == ["gpt, norms: 1.10, the mark is 1.05"]
    assert marks.verdicts([fine, timed("vmap(grad)", 0.8)]) == [
        "gpt, norms: vmap(grad) is faster, 0.80 against 1.00"
    ]
    wrong = Cell("gpt", "norms", "vmap(grad)", "wrong", timing=timed("", 0.1).timing)
    assert marks.verdicts([fine, wrong]) == []  # fast and wrong is not faster
    assert marks.verdicts([fine, timed("gradscope hooks", 0.5), timed("floor", 0.5)]) == []
    assert "first call" in marks.verdicts([timed(marks.AUTO, 1.0, first=9.0)])[0]
    refused = Cell("gpt", "norms", marks.AUTO, "refused", "no way")
    assert marks.verdicts([refused]) == ["gpt, norms: gradscope auto is refused: no way"]
    for task, mark in (("file", "2.35"), ("gradients", "2.20")):
        writing = [timed(marks.AUTO, 2.5, task=task), timed("floor", 2.0, task=task)]
        assert marks.verdicts(writing) == [f"gpt, {task}: 2.50, the mark is {mark}"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "out.json", tmp_path / "out.svg"
    options = ["--quick", "--models", "mlp,lstm", "--tasks", "norms,gradients", "--repeat", "2"]
    files = ["--json", str(results), "--plot", str(picture), "--scratch", str(tmp_path / "s")]
    methods = ["--methods", "gradscope auto,vmap,opacus ghost"]
    assert main([*options, *files, *methods]) == 0
    printed = capsys.readouterr()
    assert "All gradients in memory" in printed.out and "gradscope auto" in printed.out
    assert "lstm, norms, gradscope auto: " in printed.err
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["isa"] == torch.backends.cpu.get_cpu_capability()
    table = {(c["model"], c["task"], c["method"]): c for c in found["cells"]}
    ours = table["mlp", "norms", "gradscope auto"]
    assert ours["status"] == "right" and ours["error"] <= TOLERANCE
    assert ours["ratio"] == min(ours["all_seconds"]) / min(ours["all_plain_seconds"])
    assert len(ours["all_seconds"]) == 2
    pairs = np.divide(ours["all_seconds"], ours["all_plain_seconds"])
    assert ours["median_ratio"] == pytest.approx(pairs.mean())  # the median of two
    assert ("mlp", "norms", "floor") not in table and ("mlp", "gradients", "floor") in table
    assert table["lstm", "norms", "vmap(grad)"]["status"] in ("right", "refused")
    assert picture.read_text(encoding="utf-8").count("<svg") == 1


@pytest.mark.full
def test_other_vector_instructions(tmp_path: Path) -> None:
    results = tmp_path / "out.json"
    words = ["--quick", "--models", "mlp", "--tasks", "norms", "--methods", "gradscope auto"]
    files = ["--json", str(results), "--scratch", str(tmp_path / "s")]
    able = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert main([*words, *files, "--isa", "avx2"]) == (0 if able else 2)
    assert results.exists() == able
    if able:
        assert json.loads(results.read_text(encoding="utf-8"))["machine"]["isa"] == "AVX2"


@pytest.mark.full
def test_the_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, picture = tmp_path / "out.json", tmp_path / "out.svg"
    options = [
        "--quick",
        "--scaling",
        "--models",
        "mlp",
        "--tasks",
        "norms",
        "--methods",
        "gradscope auto",
    ]
    files = ["--json", str(results), "--plot", str(picture), "--scratch", str(tmp_path / "s")]
    assert main([*options, *files]) == 0
    assert "cost against width" in capsys.readouterr().out
    points = json.loads(results.read_text(encoding="utf-8"))["scaling"]
    assert {(p["axis"], p["value"]) for p in points} == {
        (axis, value) for axis, values in scaling.QUICK_AXES.items() for value in values
    }
    assert {p["status"] for p in points} == {"right"}
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--models", "mlp,vgg", "vgg is none of mlp"),
        ("--tasks", "speed", "speed is none of gradients"),
        ("--methods", "jax", "no method begins with 'jax'"),
    ],
)
def test_unknown_names(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([option, value])
    assert message in capsys.readouterr().err


def test_the_tables_name_every_task_and_method() -> None:
    page = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in (*TASKS, *FAMILIES):
        assert f"`{name}`" in page
    for name in METHODS:
        words = name.split(" ", 1)
        assert words[0] in page and words[-1] in page
    assert f"error of any parameter is above {1e4 * TOLERANCE:g}e-4" in page


def test_rows_are_written_however_they_lie(tmp_path: Path) -> None:
    batches = [{"a": torch.randn(3, 4, 5).mT, "b": torch.randn(2, 3).T} for _ in range(2)]
    found = read(write(iter(batches), 2, tmp_path / "dense.h5"))
    for name in ("a", "b"):
        assert torch.equal(found[name], torch.cat([batch[name] for batch in batches]))


@pytest.mark.parametrize(("width", "batches"), [(8, 20), (1000, 14), (6000, 4)])
def test_a_run_to_a_file_is_long_enough(width: int, batches: int) -> None:
    """Half a GiB, of 10 samples with `width` · (`width` + 1) numbers of four bytes each."""
    model = torch.nn.Linear(width, width, device="meta")
    one = Workload("wide", {}, model, torch.empty(10, 1), torch.empty(10))
    assert one.file_batches == batches


@pytest.mark.full
def test_an_architecture_is_held_against_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the table of architectures does, in one process, with a model of two layers."""
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    small = replace(ARCHITECTURES["gpt2"], config=sizes, data=tokens(3, 5, 11))
    monkeypatch.setitem(ARCHITECTURES, "gpt2", small)
    monkeypatch.setattr(architectures, "apart", lambda function, *given: function(*given))

    def command(name: str, folder: Path, output: Path, *more: str) -> dict[str, Any]:
        words = [folder, folder / "data.toml", "--loss", small.loss, "--model", small.model]
        words = ["gradscope", "compute", *map(str, words), "-o", str(output), "-q", *more]
        monkeypatch.setattr(sys, "argv", words)
        assert command_line() == 0
        return {"seconds": 0.0, "gigabytes": 0.0, "backend": "hooks"}

    monkeypatch.setattr(architectures, "command", command)
    assert architectures.main(["gpt2", "--scratch", str(tmp_path)]) == 0
    assert "| 0.0M | 3 | hooks |" in capsys.readouterr().out and not any(tmp_path.iterdir())
    wrong = replace(small, alone=lambda *given: 1.01 * small.alone(*given))
    monkeypatch.setitem(ARCHITECTURES, "gpt2", wrong)
    assert architectures.main(["gpt2", "--scratch", str(tmp_path)]) == 1
    assert "WRONG at" in capsys.readouterr().out


@pytest.mark.full
def test_a_training_has_the_same_weights_with_a_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "OVERHEAD", None)
    name, path = "CNN, a plain loop", tmp_path / "run.jsonl"
    alone, along = (training.run(name, 20, each, tmp_path) for each in (None, path))
    assert alone.weights == along.weights
    assert [step.step for step in read_history(path).steps] == [1, 10, 20]


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[] if k == "siren" else pytest.mark.full) for k in later.CASES]
)
def test_later_calls_are_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    later.main([name, "--repeats", "1"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    assert all(float(figure) > 0 for figure in row.split()[1:])


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=[] if k == "halting" else pytest.mark.full) for k in MODELS]
)
def test_fallbacks_are_measured_and_agree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fallbacks.main([name, "--repeats", "1"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    base, backend, *ratios = row.split()[1:]
    assert backend in BACKENDS
    assert all(float(figure) > 0 for figure in (base, *ratios))
    case = MODELS[name]()
    inputs, targets = case.draw()
    first, *others = (
        gradscope.Scope(case.model, case.loss, backend=each).per_sample_gradients(inputs, targets)
        for each in ("loop", "expand", "hooks")
    )
    for other in others:
        for key, rows in first.items():
            torch.testing.assert_close(other[key], rows, rtol=1e-3, atol=1e-4)
