"""Shapes by name, by file and by option, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from memtrain.command import BadInput
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import (
    PRESETS,
    from_huggingface,
    is_weights_source,
    model_config,
    shape_problems,
    weights_tokenizer,
)
from memtrain.options import RunConfig, padded_vocab_size

# of the published models, from their cards
PUBLISHED = {"1b": 1_235_814_400, "3b": 3_212_749_824, "7b": 6_738_415_616, "8b": 8_030_261_248}
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "vocab_size": 97}


def run(**options):
    return RunConfig(max_steps=1, **options)


def count(shape):
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    return sum(parameter.numel() for parameter in model.parameters())


def problems(config):
    with pytest.raises(BadInput) as error:
        model_config(config)
    return str(error.value).splitlines()


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    shape = PRESETS[name]
    assert shape.parameter_count == count(shape) == PUBLISHED.get(name, shape.parameter_count)
    assert not shape_problems(shape)


@pytest.mark.parametrize("changes", [BIASES, {**BIASES, "tie_word_embeddings": True}, {"attention_bias": True}],
                         ids=["all", "tied", "attention"])
def test_parameter_count_with_biases(make_shape, changes):
    shape = make_shape(**changes)
    assert shape.parameter_count == count(shape)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_padded_vocabulary_and_room_for_the_row(name):
    shape = model_config(run(model=name, seq_len=4096))
    assert shape.vocab_size % 64 == 0 and 0 <= shape.vocab_size - PRESETS[name].vocab_size < 64
    assert shape.max_position_embeddings >= 4096


@pytest.mark.parametrize("size, padded", [(1, 64), (64, 64), (65, 128), (50000, 50048), (128256, 128256)])
def test_padded_vocab_size(size, padded):
    assert padded_vocab_size(size) == padded


def test_options_go_over_the_preset():
    given = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 6,
             "num_key_value_heads": 2, "rope_theta": 500000.0, "tie_word_embeddings": False, "attention_dropout": 0.25}
    shape = model_config(run(model="tiny", vocab_size=1000, **given))
    assert {name: getattr(shape, name) for name in given} == given
    assert (shape.vocab_size, shape.head_dim) == (1024, 16)
    assert model_config(run(model="tiny", head_dim=64)).head_dim == 64
    assert model_config(run(model="tiny", head_dim=64, num_attention_heads=4)).head_dim == 64
    assert model_config(run(model="tiny")) == PRESETS["tiny"]


def test_all_problems_at_once():
    found = problems(run(model="tiny", hidden_size=90, num_attention_heads=10, num_key_value_heads=4,
                         num_hidden_layers=2, checkpointed_layers=3))
    assert len(found) == 3, found
    assert "num_key_value_heads=4" in found[0] and "head_dim=9" in found[1] and "checkpointed_layers=3" in found[2]


def test_a_width_that_heads_do_not_divide():
    """transformers refuses such a config.json even where head_dim is given: the export could not be loaded."""
    for options in ({"hidden_size": 100, "num_attention_heads": 6, "num_key_value_heads": 2},
                    {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}):
        assert "not a multiple of num_attention_heads" in problems(run(model="tiny", **options))[0]


def test_checkpointed_layers():
    model_config(run(model="tiny", checkpointed_layers=6))
    assert "has 6 layers" in problems(run(model="tiny", checkpointed_layers=7))[0]


VALUES = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 5e5}


@pytest.fixture
def config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    return tmp_path / "config.json"


def test_a_config_json_is_a_shape_to_start_from(config_json):
    shape = model_config(run(model=str(config_json), num_hidden_layers=5, seq_len=3000))
    assert (shape.vocab_size, shape.num_hidden_layers, shape.max_position_embeddings) == (128, 5, 3000)
    assert (shape.head_dim, shape.rope_theta, shape.rms_norm_eps) == (16, 5e5, 1e-6)
    assert not is_weights_source(str(config_json))


def test_a_folder_fixes_everything_but_dropout(config_json):
    folder = str(config_json.parent)
    assert is_weights_source(folder)
    shape = model_config(run(model=folder, attention_dropout=0.1, num_hidden_layers=2))
    assert (shape.vocab_size, shape.attention_dropout) == (97, 0.1), "the vocabulary of weights must not be padded"
    found = problems(run(model=folder, vocab_size=128, num_hidden_layers=3, rope_theta=1e4, tie_word_embeddings=True))
    assert len(found) == 4
    for name, kept in (("vocab_size=128", 97), ("num_hidden_layers=3", 2), ("rope_theta=10000.0", 5e5),
                       ("tie_word_embeddings=True", False)):
        assert any(line.startswith(name) and f"fix it at {kept}" in line for line in found), (name, found)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere.json", "~/nowhere_at_all", "no-such-name",
                                   "nobody/nothing"])
def test_models_that_are_not_there(model):
    found = problems(run(model=model))
    assert len(found) == 1 and model in found[0] and "tiny" in found[0]


def test_a_folder_without_config_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: cannot be read" in problems(run(model="empty"))[0]


def test_all_problems_of_a_config_json():
    values = {**VALUES, "hidden_act": "gelu", "rope_scaling": {"rope_type": "yarn"}}
    with pytest.raises(BadInput) as error:
        from_huggingface(values, "here")
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and all(line.startswith("here: ") for line in lines)


def test_the_tokenizer_of_a_folder(tmp_path):
    assert weights_tokenizer("tiny") is None and weights_tokenizer("some.json") is None
    assert weights_tokenizer(str(tmp_path)) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert weights_tokenizer(str(tmp_path)) == str(tmp_path)
    assert weights_tokenizer("owner/name") == "owner/name"
