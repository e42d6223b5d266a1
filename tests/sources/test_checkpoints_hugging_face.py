"""Hugging Face folders as models: local files, our own readers, no code of the folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import gradscope
from gradscope.config import CheckpointSpec, ModelSpec
from gradscope.errors import CheckpointError, InputError, ModelError, SpecError
from gradscope.sources.formats import sha256
from gradscope.sources.models import LoadedModel, load_model, require_order
from tests import oracle

GPT2 = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
BERT = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 16, "max_position_embeddings": 8, "num_labels": 3}


def saved(folder: Path, kind: str = "gpt2") -> Any:
    """Save a small model with random weights, and return it."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    made: Any = (
        GPT2LMHeadModel(GPT2Config(**GPT2))
        if kind == "gpt2"
        else BertForSequenceClassification(BertConfig(**BERT))
    )
    made.eval().save_pretrained(folder)
    return made


def held(folder: Path, **kwargs: Any) -> LoadedModel:
    return load_model(ModelSpec(factory="checkpoint", kwargs=kwargs), CheckpointSpec(path=folder))


def rewritten(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path)


def configured(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def piped(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


TOKENS = torch.arange(24).reshape(6, 4).remainder(11)


def test_a_language_model_answers_with_logits_and_its_gradients_are_right(tmp_path: Path) -> None:
    source = saved(tmp_path)
    loaded = held(tmp_path)
    assert not loaded.model.training
    torch.testing.assert_close(loaded.model(TOKENS), source(TOKENS).logits, rtol=0, atol=0)
    assert loaded.digests == {"config.json": sha256(tmp_path / "config.json")}
    assert held(tmp_path / "model.safetensors").digests == loaded.digests  # the file in the folder
    assert any("Tied" in note and "lm_head.weight" in note for note in loaded.notes)
    found = gradscope.per_sample_gradients(loaded.model, "causal_lm", {"input_ids": TOKENS}, TOKENS)

    def loss(answer: Any, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(answer.logits[0, :-1], tokens[0, 1:])[None]

    _, expected = oracle.per_sample_gradients(source, loss, {"input_ids": TOKENS}, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_a_classifier_with_a_mask(tmp_path: Path) -> None:
    source = saved(tmp_path, "bert")
    model, mask = held(tmp_path).model, torch.ones_like(TOKENS)
    mask[2:, 3] = 0
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    inputs = {"input_ids": TOKENS, "attention_mask": mask}
    found = gradscope.per_sample_gradients(model, "cross_entropy", inputs, labels)

    def loss(answer: Any, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(answer.logits, label)[None]

    _, expected = oracle.per_sample_gradients(source, loss, inputs, labels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_names_of_the_published_file_are_mapped(tmp_path: Path) -> None:
    """As in the published gpt2: without the head's prefix, with masks that the model has not."""
    source = saved(tmp_path)

    def old(content: dict[str, Tensor]) -> dict[str, Tensor]:
        content = {k.removeprefix("transformer."): v for k, v in content.items()}
        return content | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}

    rewritten(tmp_path, old)
    model = held(tmp_path).model
    torch.testing.assert_close(dict(model.state_dict()), dict(source.state_dict()), rtol=0, atol=0)


def test_what_the_model_does_not_use_is_told(tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, lambda content: content | {"extra.weight": torch.ones(2)})
    assert any(
        "does not use these tensors of the checkpoint: extra.weight" in n
        for n in held(tmp_path).notes
    )


@pytest.mark.parametrize("shards", [False, True])
def test_pickled_weights_are_read_by_our_own_reader(tmp_path: Path, shards: bool) -> None:
    source = saved(tmp_path)
    content = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(content)
    parts = [names[::2], names[1::2]] if shards else [names]
    table = {}
    for k, part in enumerate(parts):
        file = f"pytorch_model-{k}.bin" if shards else "pytorch_model.bin"
        torch.save({name: content[name] for name in part}, tmp_path / file)
        table |= dict.fromkeys(part, file)
    if shards:
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": table}))
    model = held(tmp_path).model
    torch.testing.assert_close(dict(model.state_dict()), dict(source.state_dict()), rtol=0, atol=0)


def without(content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in content.items() if "ln_f" not in k}


def normed(folder: Path, weight: Tensor) -> None:
    rewritten(folder, lambda content: content | {"transformer.ln_f.weight": weight})


def remote(folder: Path) -> None:
    (folder / "mine.py").write_text("raise SystemExit('executed')")
    configured(folder, auto_map={"AutoModelForCausalLM": "mine.Net"}, model_type="mine")


@pytest.mark.parametrize(
    ("change", "expected", "error"),
    [
        (lambda f: rewritten(f, without), "2 weights of the model are missing", CheckpointError),
        (
            lambda f: normed(f, torch.ones(3)),
            "(3,) in the checkpoint, (8,) in the model",
            CheckpointError,
        ),
        (lambda f: normed(f, torch.ones(8) * torch.nan), "ln_f.weight (8 of 8)", CheckpointError),
        (remote, "needs code from its folder or a hub, which is never executed", ModelError),
        (
            lambda f: configured(f, attn_implementation="a/b"),
            "needs code from its folder",
            ModelError,
        ),
        (lambda f: configured(f, architectures=[]), "it has no architecture", ModelError),
        (lambda f: configured(f, architectures=["AutoModel"]), "no model 'AutoModel'", ModelError),
        (lambda f: configured(f, architectures=["Nope"]), "no model 'Nope'", ModelError),
        (lambda f: configured(f, architectures=[3]), "no model 3", ModelError),
        (lambda f: configured(f, model_type="nope"), "cannot build the model", ModelError),
        (lambda f: configured(f, n_head=3), "cannot build the model", ModelError),
        (lambda f: configured(f, quantization_config={}), "are quantized", ModelError),
        (lambda f: (f / "config.json").write_text("[]"), "is not a table", ModelError),
        (piped, "not a regular file", ModelError),
        (lambda f: (f / "config.json").write_text("{"), "is not valid JSON", ModelError),
        (lambda f: (f / "config.json").write_text("[" * 99_999), "is not valid JSON", ModelError),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "is empty", CheckpointError),
        (lambda f: (f / "model.safetensors").unlink(), "folder has no weights", CheckpointError),
    ],
)
def test_a_folder_that_is_refused(
    tmp_path: Path, change: Any, expected: str, error: type[InputError]
) -> None:
    saved(tmp_path)
    change(tmp_path)
    with pytest.raises(error) as caught:
        held(tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def test_arguments_choose_the_class_and_replace_values_of_the_config(tmp_path: Path) -> None:
    saved(tmp_path)
    base = held(tmp_path, architecture="GPT2Model", attn_implementation="eager")
    assert type(base.model).__name__ == "GPT2Model"
    with pytest.raises(ModelError, match="no value 'n_heads'"):
        held(tmp_path, n_heads=4)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"torch-gradscope\[hf\]"):
        held(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_weights_of_more_digits_than_the_config_says(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """With --dtype float64 they keep them; else a note says that they are rounded."""
    saved(tmp_path, "bert")
    draw = torch.Generator().manual_seed(0)

    def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            k: torch.randn(v.shape, generator=draw, dtype=torch.float64) for k, v in state.items()
        }

    rewritten(tmp_path, changed)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    spec = CheckpointSpec(path=tmp_path)
    found = load_model(ModelSpec(factory="checkpoint"), spec, dtype=dtype)
    for name, p in found.model.named_parameters():
        assert torch.equal(p, state[name].to(dtype or torch.float32))
    told = [note for note in found.notes if "more digits than the model" in note]
    assert len(told) == (dtype is None)


def test_arrays_in_another_order_than_the_arguments_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    model = held(tmp_path).model
    require_order(model, ["input_ids", "attention_mask"])
    require_order(model, {"attention_mask": "attention_mask", "input_ids": "input_ids"})
    with pytest.raises(
        SpecError, match="'token_type_ids' would be passed as the model's argument 'atten"
    ):
        require_order(model, ["input_ids", "token_type_ids"])
