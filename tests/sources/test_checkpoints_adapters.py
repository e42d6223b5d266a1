"""PEFT's adapters as checkpoints: peft's own model and its loop in float64 say what is right."""

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import gradscope
from gradscope.cli.app import run as command_line
from gradscope.config import CheckpointSpec, ModelSpec, load
from gradscope.errors import CheckpointError, InputError, ModelError
from gradscope.sources.models import LoadedModel, load_model
from tests import oracle
from tests.sources.test_checkpoints_hugging_face import TOKENS, saved

BLOCK = ["c_attn", "c_proj"]
LORA = {"r": 2, "target_modules": BLOCK, "fan_in_fan_out": True}
KINDS = {
    "lora": peft.LoraConfig(**LORA),
    "rslora": peft.LoraConfig(**LORA, use_rslora=True, lora_alpha=3),
    "dora": peft.LoraConfig(**LORA, use_dora=True),
    "biases": peft.LoraConfig(**LORA, bias="all"),
    "its biases": peft.LoraConfig(**LORA, bias="lora_only"),
    "embedding": peft.LoraConfig(r=2, target_modules=["wte", "c_fc"], fan_in_fan_out=True),
    "head": peft.LoraConfig(**LORA, modules_to_save=["lm_head", "ln_f"]),
    "tokens": peft.LoraConfig(**LORA, trainable_token_indices=[1, 4]),
    "pissa": peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "ia3": peft.IA3Config(
        target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True
    ),
    "vera": peft.VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "biases and a head": peft.LoraConfig(**LORA, bias="all", modules_to_save=["ln_f"]),
    "one bank": peft.VBLoRAConfig(
        r=2, num_vectors=8, vector_length=4, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    "activated": peft.LoraConfig(**LORA, alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
    "skills": peft.PolyConfig(
        r=2, n_tasks=2, n_skills=2, target_modules=["lm_head"], task_type="CAUSAL_LM"
    ),
    "prompts": peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
    "loha": peft.LoHaConfig(r=2, target_modules=["lm_head"]),
    "some entries": peft.ShiraConfig(r=2, target_modules=["lm_head"]),
    "the largest entries": peft.SupertuningConfig(target_modules=["lm_head"], sparsity=0.5),
}


def adapter(folder: Path, config: Any) -> Any:
    """Save a base model and beside it an adapter as after some steps; return peft's own of it."""
    base = saved(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        for p in model.parameters():
            if p.requires_grad:  # one begins with zeros, which have no gradients
                p.data += 0.1 * torch.randn_like(p)
        config.base_model_name_or_path = "base"
        model.save_pretrained(str(folder / "tuned"), save_embedding_layers=False)
    return model.eval()


def held(folder: Path, factory: str = "checkpoint", **kwargs: Any) -> LoadedModel:
    return load_model(
        ModelSpec(factory=factory, kwargs=kwargs), CheckpointSpec(path=folder / "tuned")
    )


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, of SHiRA
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_adapter_alone_are_those_of_pefts_own_model(
    tmp_path: Path, kind: str
) -> None:
    own = adapter(tmp_path, KINDS[kind])
    loaded = held(tmp_path)
    inputs = {"input_ids": TOKENS}
    if kind == "skills":
        inputs["task_ids"] = TOKENS[:, 0] % 2
    torch.testing.assert_close(
        loaded.model(**inputs), own(**inputs).logits, rtol=1e-5, atol=1e-6, msg="not the same model"
    )
    trained = {name for name, p in own.named_parameters() if p.requires_grad}
    assert trained and all("base_model.model" in name for name in trained)
    found = gradscope.per_sample_gradients(loaded.model, "causal_lm", inputs, TOKENS)

    def loss(answer: Any, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(answer.logits[0, :-1], tokens[0, 1:])[None]

    _, expected = oracle.per_sample_gradients(own, loss, inputs, TOKENS)
    assert found.keys() == trained == expected.keys()
    assert all(g.abs().max() > 0 for g in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "tuned" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_where_the_base_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = adapter(tmp_path, KINDS["lora"])
    expected = own(TOKENS).logits
    digests = {held(tmp_path).checkpoint.sha256}
    for name in (str(tmp_path / "base"), "../base", "somebody/base"):  # as trained elsewhere
        configured(tmp_path, base_model_name_or_path=name)
        torch.testing.assert_close(held(tmp_path).model(TOKENS), expected)
        digests.add(held(tmp_path).checkpoint.sha256)
    assert len(digests) == 1  # of the weights, both files'
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="'somebody/base' is not on this machine") as raised:
        held(tmp_path)
    assert 'model="FOLDER"' in (raised.value.remedy or "")
    loaded = held(tmp_path, str(tmp_path / "moved"))
    torch.testing.assert_close(loaded.model(TOKENS), expected)
    assert loaded.digests.keys() == {"adapter_config.json", "config.json"}
    file = tmp_path / "tuned" / "adapter_model.safetensors"
    again = load_model(ModelSpec(factory=str(tmp_path / "moved")), CheckpointSpec(path=file))
    assert again.checkpoint.sha256 == loaded.checkpoint.sha256
    hub = tmp_path / "hub" / "models--somebody--base"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    shutil.copytree(tmp_path / "moved", hub / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    torch.testing.assert_close(held(tmp_path).model(TOKENS), expected)


def test_from_the_command_line_with_some_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path, KINDS["lora"])
    np.savez(tmp_path / "data.npz", inputs=TOKENS.numpy(), targets=TOKENS.numpy())
    out = str(tmp_path / "o.h5")
    words = ["compute", "tuned", "data.npz", "--model", "base", "--loss", "causal_lm", "-o", out]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradscope", *words, "--parameters", "*h.0*lora_B*"])
    assert command_line() == 0
    monkeypatch.setattr(sys, "argv", ["gradscope", "init", "tuned", "data.npz", "-o", "run.toml"])
    assert command_line() == 0
    assert load(tmp_path / "run.toml").model.factory == "checkpoint"
    with gradscope.open(out) as file:
        assert set(file.parameters) == {
            f"base_model.model.transformer.h.0.{place}.lora_B.default.weight"
            for place in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")
        }
        expected = gradscope.per_sample_gradients(held(tmp_path).model, "causal_lm", TOKENS, TOKENS)
        rows = {name: torch.from_numpy(file.chains[0][name][:]) for name in file.parameters}
    torch.testing.assert_close(rows, {k: expected[k] for k in rows}, rtol=1e-5, atol=1e-7)


def test_a_factory_builds_the_base_model(tmp_path: Path) -> None:
    """Any module of torch: the adapter knows its layers by name."""
    code = (
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))\n"
    )
    (tmp_path / "model.py").write_text(code)
    factory = f"{tmp_path / 'model.py'}:build"
    scope: dict[str, Any] = {}
    exec(code, scope)
    own = peft.PeftModel(scope["build"](), peft.LoraConfig(r=1, target_modules=["0"]))
    for p in own.parameters():
        p.data += 0.1 if p.requires_grad else 0
    own.save_pretrained(str(tmp_path / "tuned"))
    loaded = held(tmp_path, factory)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    found = gradscope.per_sample_gradients(loaded.model, "mse", x, y)
    _, expected = oracle.per_sample_gradients(
        own, lambda out, target: (out - target).square().mean(1), x, y
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)
    with pytest.raises(CheckpointError, match="has no base_model_name_or_path"):
        held(tmp_path)


def test_weights_that_are_pickled(tmp_path: Path) -> None:
    own = adapter(tmp_path, KINDS["lora"])
    path = tmp_path / "tuned" / "adapter_model.safetensors"
    torch.save(safetensors.torch.load_file(path), path.with_suffix(".bin"))
    path.unlink()
    torch.testing.assert_close(held(tmp_path).model(TOKENS), own(TOKENS).logits)


def rewritten(folder: Path, change: Any) -> None:
    path = folder / "tuned" / "adapter_model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path)


def without(content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in content.items() if "h.1.attn.c_proj.lora_A" not in k}


def spoilt(content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v * torch.nan for k, v in content.items()}


@pytest.mark.parametrize(
    ("change", "expected", "error"),
    [
        (
            lambda f: rewritten(f, without),
            "weights of the adapter are missing: ",
            CheckpointError,
        ),
        (
            lambda f: rewritten(f, lambda c: c | {"base_model.model.x.lora_A.weight": TOKENS}),
            "the model has no parameters for base_model.model.x",
            CheckpointError,
        ),
        (
            lambda f: rewritten(f, lambda c: {k: (v * 100).to(torch.int8) for k, v in c.items()}),
            "not floating-point numbers but torch.int8: base_model.model.transformer.h.0",
            CheckpointError,
        ),
        (lambda f: rewritten(f, spoilt), "values are not finite in 12 tensors", CheckpointError),
        (
            lambda f: rewritten(f, lambda c: {k: v * 1j for k, v in c.items()}),
            "not named real tensors",
            CheckpointError,
        ),
        (
            lambda f: shutil.copy(f / "base" / "model.safetensors", f / "tuned"),
            "has a model, model.safetensors, and an adapter, adapter_model.safetensors",
            CheckpointError,
        ),
        (
            lambda f: configured(f, peft_type="VBLORA", save_only_topk_weights=True),
            "only its largest weights were saved",
            ModelError,
        ),
        (lambda f: configured(f, r=3), "PeftModel: size mismatch for base_model", ModelError),
        (lambda f: configured(f, brand_new=True), "has no setting brand_new", ModelError),
        (lambda f: configured(f, peft_type="XLORA"), "mixes adapters of other folders", ModelError),
        (lambda f: configured(f, target_modules=["no"]), "peft cannot add the ada", ModelError),
        (lambda f: configured(f, peft_type="NEW"), "peft cannot add the adapter", ModelError),
        (lambda f: configured(f, peft_type=None), "no table of settings with a", CheckpointError),
        (
            lambda f: configured(f, init_lora_weights="pissa_niter_4"),
            "random numbers change the base model's weights",
            ModelError,
        ),
        (
            lambda f: configured(f, peft_type="PROMPT_TUNING", num_virtual_tokens=2),
            "PROMPT_TUNING add positions to the inputs",
            ModelError,
        ),
        (
            lambda f: (f / "tuned" / "adapter_config.json").write_text('{"r": 2, "r": 3}'),
            "it has the key 'r' twice",
            CheckpointError,
        ),
        (
            lambda f: (f / "tuned" / "adapter_config.json").unlink(),
            "adapter_config.json is missing in the folder of these weights",
            CheckpointError,
        ),
        (
            lambda f: (shutil.rmtree(f / "base"), shutil.copytree(f / "tuned", f / "base")),
            "the base model of the adapter is itself an adapter",
            CheckpointError,
        ),
        (
            lambda f: (f / "tuned" / "adapter_model.safetensors").unlink(),
            "this folder has no weights; it has README.md, adapter_config.json",
            CheckpointError,
        ),
    ],
)
def test_an_adapter_that_is_refused(
    tmp_path: Path, change: Any, expected: str, error: type[InputError]
) -> None:
    adapter(tmp_path, KINDS["lora"])
    change(tmp_path)
    with pytest.raises(error, match=expected) as raised:
        held(tmp_path)
    assert str(tmp_path) in str(raised.value.where)


@pytest.mark.parametrize(
    ("kind", "name", "change", "expected"),
    [
        ("some entries", "shira_indices", lambda v: None, "weights of the adapter are missing"),
        ("some entries", "shira_indices", lambda v: v[:, 1:], "outside of the layer's weight"),
        ("some entries", "shira_indices", lambda v: v + 11, "outside of the layer's weight"),
        ("some entries", "shira_indices", lambda v: v - 11, "outside of the layer's weight"),
        ("the largest entries", "supertuning_indices", lambda v: v + 88, "outside of the layer"),
        ("vera", "vera_A", lambda v: v / 0, "base_model.vera_A"),
    ],
)
def test_what_an_adapter_does_not_train_is_its_own_too(
    tmp_path: Path, kind: str, name: str, change: Any, expected: str
) -> None:
    """Entries that are trained, drawn at random, and projections that never change."""

    def damaged(content: dict[str, Tensor]) -> dict[str, Tensor]:
        (key,) = (k for k in content if k.endswith(name))
        value = change(content[key])
        return {k: v for k, v in content.items() if k != key} | (
            {} if value is None else {key: value.contiguous()}
        )

    adapter(tmp_path, KINDS[kind])
    rewritten(tmp_path, damaged)
    with pytest.raises(CheckpointError, match=expected):
        held(tmp_path)


def test_a_class_with_a_head_that_the_adapter_brings(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    kind = transformers.GPT2ForSequenceClassification
    tuned = kind.from_pretrained(tmp_path / "base", num_labels=3, pad_token_id=0)
    config = peft.LoraConfig(**LORA, task_type="SEQ_CLS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = peft.get_peft_model(tuned, config).eval()
        own.save_pretrained(str(tmp_path / "tuned"))
    with pytest.raises(CheckpointError, match=r"base_model\.model\.score") as raised:
        held(tmp_path)
    assert "kwargs = { architecture" in str(raised.value.remedy)
    values = {"num_labels": 3, "pad_token_id": 0}
    model = held(tmp_path, architecture=kind.__name__, **values).model
    torch.testing.assert_close(model(TOKENS), own(TOKENS).logits)


def test_a_folder_as_the_base_model_of_what_is_no_adapter(tmp_path: Path) -> None:
    saved(tmp_path / "tuned")
    with pytest.raises(ModelError, match="CHECKPOINT is not an adapter"):
        held(tmp_path, str(tmp_path))


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter(tmp_path, KINDS["lora"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match="this adapter needs peft, which is not") as raised:
        held(tmp_path)
    assert raised.value.remedy == "pip install 'torch-gradscope[peft]'"
