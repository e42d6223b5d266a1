"""torchaudio's models, made small."""

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.zoo.groups.inputs import Shape, maker, runnable, small
from benchmarks.zoo.libraries import load
from benchmarks.zoo.subject import Subject


def _models() -> dict[str, tuple[Callable[[Any], nn.Module], dict[str, Shape], dict[str, Any]]]:
    """Return {name: (builder, shapes of the inputs, constants)}."""
    wave = Shape("real", (1600,))
    plain = {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
        "extractor_conv_bias": False, "encoder_embed_dim": 16, "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 2, "encoder_num_layers": 2,
        "encoder_num_heads": 2, "encoder_attention_dropout": 0.0, "encoder_ff_interm_features": 32,
        "encoder_ff_interm_dropout": 0.0, "encoder_dropout": 0.0, "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0, "aux_num_out": 7,
    }  # fmt: skip
    return {
        "Wav2Vec2Model": (
            lambda m: m.wav2vec2_model(**plain), {"waveforms": wave}, {},
        ),
        "WavLM": (
            lambda m: m.wavlm_model(**plain, encoder_num_buckets=16, encoder_max_distance=32),
            {"waveforms": wave}, {},
        ),
        "DeepSpeech": (lambda m: m.DeepSpeech(20, 16, 5), {"x": Shape("real", (1, 12, 20))}, {}),
        "Wav2Letter": (
            lambda m: m.Wav2Letter(num_classes=5, input_type="mfcc", num_features=8),
            {"x": Shape("real", (8, 64))}, {},
        ),
        "ConvTasNet": (
            lambda m: m.ConvTasNet(2, enc_num_feats=16, msk_num_feats=8, msk_num_hidden_feats=16,
                                   msk_num_layers=2, msk_num_stacks=2),
            {"input": Shape("real", (1, 400))}, {},
        ),
        "HDemucs": (
            lambda m: m.HDemucs(["a", "b"], channels=4, nfft=256, depth=4),
            {"input": Shape("real", (2, 4096))}, {},
        ),
        "WaveRNN": (
            lambda m: m.WaveRNN([2, 2], 5, 4, n_res_block=2, n_rnn=8, n_fc=8, kernel_size=5,
                                n_freq=8, n_hidden=8, n_output=8),
            {"waveform": Shape("real", (1, 12)), "specgram": Shape("real", (1, 8, 7))}, {},
        ),
        "SquimObjective": (
            lambda m: m.squim_objective_model(
                feat_dim=16, win_len=16, d_model=16, nhead=2, hidden_dim=8, num_blocks=1,
                rnn_type="LSTM", chunk_size=9),
            {"x": Shape("real", (400,))}, {},
        ),
        "Conformer": (
            lambda m: _Lengths(m.Conformer(16, 2, 16, 2, 5)), {"x": Shape("real", (12, 16))}, {},
        ),
        "Conformer group norm": (
            lambda m: _Lengths(m.Conformer(16, 2, 16, 2, 5, use_group_norm=True)),
            {"x": Shape("real", (12, 16))}, {},
        ),
        "Emformer": (
            lambda m: _Lengths(m.Emformer(16, 2, 16, 2, 4, right_context_length=2)),
            {"x": Shape("real", (14, 16))}, {},
        ),
    }  # fmt: skip


class _Lengths(nn.Module):
    """A model that also takes lengths, all of which are the whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        """Return the outputs without lengths."""
        lengths = x.new_full((x.shape[0],), x.shape[1]).long()
        return self.model(x, lengths)[0]


def names(heads: bool = False, wanted: Any = None) -> list[str]:
    """Return the models."""
    return list(_models())


def build(name: str) -> Subject:
    """Return one of them."""
    create, shapes, fixed = _models()[name]
    models = load("torchaudio").models
    model = small(lambda: create(models))
    return Subject(model, runnable(model, [maker(shapes, fixed)]))
