"""Folders of transformers, both ways: what we export it loads whole, what it saves we load, all else is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from memtrain.command import BadInput
from memtrain.model import huggingface
from memtrain.model.huggingface import check_export_folder, export, load_model, load_weights
from memtrain.model.llama import LlamaForCausalLM
from memtrain.model.presets import read_config_json

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
# case E2
HARD = {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5, "head_dim": 16, "num_key_value_heads": 2}
SHAPES = {"hard": HARD, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True},
          "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rms_norm_eps": 1e-3}}
INPUT_IDS = torch.randint(0, 97, (1, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(93))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>",
                                                pad_token="<pad>", unk_token="<unk>")


@pytest.fixture
def exported(make_model, tokenizer, tmp_path):
    """exported(**changes) -> (our model, the folder it was exported to)."""

    def make(folder=None, dtype="float32", max_shard_size="5GB", **changes):
        model = make_model(**changes)
        folder = folder or tmp_path / "export"
        export(model.state_dict(), model.config, tokenizer, folder, dtype, max_shard_size)
        return model.eval(), folder

    return make


def load_theirs(folder, **kwargs):
    """transformers' model of a folder; nothing missing, nothing left over."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    model, info = loaded
    assert not any(info.values()), info
    return model.eval()


def assert_same_logits(one, other, tolerance=1e-6):
    with torch.no_grad():
        outs = one(INPUT_IDS), other(INPUT_IDS)
    found, wanted = (out if isinstance(out, torch.Tensor) else out.logits for out in outs)
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    assert error <= tolerance, f"logits differ by {error:.2e} of the largest"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def one_line(error):
    message = str(error.value)
    assert "\n" not in message and message, message
    return message


# -- export


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_transformers_loads_what_we_export(exported, changes):
    ours, folder = exported(**changes)
    theirs = load_theirs(folder)
    assert type(theirs) is transformers.LlamaForCausalLM and theirs.dtype == torch.float32
    assert_same_logits(ours, theirs)
    assert_same_logits(load_model(str(folder)), ours, 0.0)


def test_tied_embeddings_are_stored_once(exported):
    """Case E1."""
    ours, folder = exported(tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored and stored.keys() == ours.state_dict().keys()
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    theirs = load_theirs(folder)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert load_model(str(folder)).lm_head is None


def test_config_json_serves_both_versions(exported):
    ours, folder = exported(**HARD)
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"] and values["model_type"] == "llama"
    assert values["rope_theta"] == 500000.0 and values["rope_scaling"] == LLAMA3
    assert values["rope_parameters"] == {**LLAMA3, "rope_theta": 500000.0}
    assert values["dtype"] == values["torch_dtype"] == "float32"
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (0, 1, 2)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert read_config_json(folder / "config.json") == ours.config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_export(exported, dtype):
    ours, folder = exported(dtype=dtype, **HARD)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(tensor, ours.state_dict()[name].to(tensor.dtype)) for name, tensor in stored.items())
    assert load_theirs(folder).dtype == getattr(torch, dtype)
    assert_same_logits(load_theirs(folder, dtype=torch.float32), load_model(str(folder)))


def test_the_tokenizer_comes_along(exported, tokenizer):
    loaded = transformers.AutoTokenizer.from_pretrained(exported()[1])
    assert loaded("w1 w5 none").input_ids == tokenizer("w1 w5 none").input_ids == [5, 9, 3]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)


def test_shards(exported):
    ours, folder = exported(max_shard_size="20KB", **HARD)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert_same_logits(ours, load_theirs(folder))
    assert_same_logits(ours, load_model(str(folder)), 0.0)


def test_nothing_of_an_older_export_remains(exported, tmp_path):
    """Case E4: more shards before than after, and the other way round."""
    ours, folder = exported(max_shard_size="20KB", **HARD)
    many = set(files(folder))
    other, _ = exported(folder, tie_word_embeddings=True)
    assert set(files(folder)) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                  "tokenizer_config.json"}
    assert_same_logits(other, load_theirs(folder))
    exported(folder, max_shard_size="20KB", **HARD)
    assert set(files(folder)) == many
    assert_same_logits(ours, load_theirs(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["export"], "temporary folders were left"


def test_every_file_can_be_read_by_others(exported):
    _, folder = exported()
    assert folder.stat().st_mode & 0o777 == 0o755
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o444 == 0o444, f"{path.name} has mode {path.stat().st_mode & 0o777:o}"


def test_a_new_folder_below_missing_ones(exported, tmp_path):
    exported(tmp_path / "a" / "b" / "export")
    assert (tmp_path / "a" / "b" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["notes.txt", "pytorch_model.bin", ".git", "model-notes.txt"])
def test_a_folder_with_other_files_is_left_alone(exported, tmp_path, name):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / name).write_text("mine")
    (folder / "config.json").write_text("mine too")
    before = files(folder)
    with pytest.raises(BadInput) as error:
        exported(folder)
    assert name in one_line(error)
    assert files(folder) == before and len(list(tmp_path.iterdir())) == 1


def test_a_file_in_place_of_the_folder(exported, tmp_path):
    (tmp_path / "export").write_text("mine")
    with pytest.raises(BadInput, match="is a file"):
        exported()
    assert (tmp_path / "export").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(BadInput, match="permission"):
            check_export_folder(tmp_path / "export")
    finally:
        tmp_path.chmod(0o700)


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["weights", "config", "tokenizer", "first_rename", "second_rename"])
@pytest.mark.parametrize("earlier", [True, False])
def test_an_interrupted_export_changes_nothing(exported, tokenizer, tmp_path, monkeypatch, where, earlier):
    folder = tmp_path / "export"
    before = files(exported(**HARD)[1]) if earlier else None
    real_replace, renames = os.replace, []

    def replace(source, target):
        renames.append(target)
        # only the first attempt fails: putting things back must not
        if len(renames) == {"first_rename": 1, "second_rename": 2 if earlier else 1}.get(where):
            stop()
        real_replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface.os, "replace", replace)
        if where == "weights":
            patch.setattr("memtrain.model.weights_file.bytes_of", stop)
        elif where == "config":
            patch.setattr(huggingface, "_write_json", stop)
        elif where == "tokenizer":
            patch.setattr(type(tokenizer), "save_pretrained", stop)
        with pytest.raises(KeyboardInterrupt):
            exported(tie_word_embeddings=True)
    assert folder.exists() == earlier
    if before is not None:
        assert files(folder) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"export"}, "temporary folders were left"
    ours, _ = exported(tie_word_embeddings=True)
    assert_same_logits(ours, load_theirs(folder))


def run_child(code, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(huggingface.__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True,
                          text=True, timeout=120, check=False)


KILLED = """
import os, signal, sys
from pathlib import Path
from memtrain.model.huggingface import export, load_model
class Tokenizer:
    bos_token_id = eos_token_id = pad_token_id = None
    def save_pretrained(self, folder):
        assert (Path(folder) / "model.safetensors").is_file()
        os.kill(os.getpid(), signal.SIGKILL)
model = load_model(sys.argv[1])
export({name: tensor * 0 for name, tensor in model.state_dict().items()}, model.config, Tokenizer(), Path(sys.argv[1]))
"""


def test_a_killed_export_leaves_the_old_one_whole(exported):
    ours, folder = exported(**HARD)
    before = files(folder)
    child = run_child(KILLED, folder)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert files(folder) == before
    exported(folder, **HARD)
    assert_same_logits(ours, load_theirs(folder))


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("w1 w5 w9", return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
print(out[0].tolist())
"""


def test_a_fresh_process_generates(exported):
    """Case E5."""
    from memtrain.model.generate import generate

    ours, folder = exported(**HARD)
    child = run_child(FRESH, folder)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found == [5, 9, 13, *generate(ours, [5, 9, 13], 5)]
    assert "Warning" not in child.stderr and "warning" not in child.stderr, child.stderr


# -- import


@pytest.fixture
def saved(twins, tmp_path):
    """saved(**changes) -> (transformers' model, the folder it saved)."""

    def make(dtype=torch.float32, max_shard_size="5GB", **changes):
        theirs = twins(**changes)[1].to(dtype).eval()
        theirs.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
        return theirs, tmp_path / "saved"

    return make


def edit_config(folder, remove=(), **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in remove}))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_we_load_what_transformers_saves(saved, changes):
    theirs, folder = saved(**changes)
    ours = load_model(str(folder))
    assert not ours.training
    assert_same_logits(ours, theirs)


def test_sharded_and_in_bfloat16(saved):
    theirs, folder = saved(torch.bfloat16, "20KB", **HARD)
    assert not (folder / "model.safetensors").exists()
    ours = load_model(str(folder))
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, load_theirs(folder, dtype=torch.float32))
    low = load_model(str(folder), torch.bfloat16)
    assert all(torch.equal(low.state_dict()[name].float(), tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
                         ids=["default", "linear", "llama3"])
def test_config_json_of_version_4(saved, scaling, type_key):
    theirs, folder = saved(rope_theta=500000.0, rope_scaling=scaling)
    old = scaling and {type_key if key == "rope_type" else key: value for key, value in scaling.items()}
    edit_config(folder, remove=("rope_parameters", "dtype"), rope_theta=500000.0, rope_scaling=old,
                torch_dtype="float32")
    shape = read_config_json(folder / "config.json")
    assert shape.rope_theta == 500000.0 and shape.rope_scaling == scaling
    assert_same_logits(load_model(str(folder)), theirs)


def test_what_config_json_leaves_out_has_transformers_defaults(saved):
    theirs, folder = saved(head_dim=8, num_key_value_heads=4, rms_norm_eps=1e-6)
    edit_config(folder, remove=("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "attention_bias",
                                "mlp_bias", "tie_word_embeddings", "max_position_embeddings", "hidden_act"))
    assert_same_logits(load_model(str(folder)), theirs)
    default, shape = transformers.LlamaConfig(), read_config_json(folder / "config.json")
    for name in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert getattr(shape, name) == getattr(default, name), name


def test_old_checkpoints_hold_rotary_frequencies(saved):
    theirs, folder = saved()
    edit_weights(folder, lambda weights: weights.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_logits(load_model(str(folder)), theirs)


def test_a_tied_head_stored_all_the_same(saved):
    """Equal to the embedding it is superfluous; another one would be used by transformers, which then does not tie."""
    theirs, folder = saved(tie_word_embeddings=True)
    edit_weights(folder, lambda weights: weights.update(
        {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert_same_logits(load_model(str(folder)), theirs)
    edit_weights(folder, lambda weights: weights["lm_head.weight"].add_(1))
    with pytest.raises(BadInput) as error:
        load_model(str(folder))
    assert re.search("lm_head.weight.*tie_word_embeddings", one_line(error))


CONFIG_ERRORS = {
    "other_architecture": ({"model_type": "qwen2"}, "model_type is qwen2"),
    "other_activation": ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    "unknown_rope": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
                     "rotary scaling yarn"),
    "unknown_rope_4": ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
                       "rotary scaling dynamic"),
    "rope_without_factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    "rope_factor_of_text": ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
    "no_hidden_size": ({"hidden_size": None}, "hidden_size"),
    "no_heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "no_kv_heads": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    "odd_head": ({"head_dim": 7}, "head_dim=7"),
}


@pytest.mark.parametrize("changes, found", CONFIG_ERRORS.values(), ids=CONFIG_ERRORS.keys())
def test_configs_that_are_refused(saved, changes, found):
    _, folder = saved()
    edit_config(folder, **changes)
    with pytest.raises(BadInput) as error:
        load_model(str(folder))
    assert found in one_line(error) and str(folder) in str(error.value)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


FOLDER_ERRORS = {
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model*.safetensors"),
    "only_pickles": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
                     "no model*.safetensors"),
    "missing": (lambda folder: edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")),
                "1 tensors are missing, model.layers.1.mlp.up_proj.weight"),
    "extra": (lambda folder: edit_weights(folder, lambda weights: weights.update(score=torch.ones(2))), "tensor score"),
    "shape": (lambda folder: edit_weights(folder, lambda weights: weights.update(
        {"model.norm.weight": torch.ones(31)})), "model.norm.weight is (31,)"),
    "transposed": (lambda folder: edit_weights(folder, lambda weights: weights.update(
        {"model.layers.0.mlp.up_proj.weight": weights["model.layers.0.mlp.up_proj.weight"].T.contiguous()})),
        "(32, 64)"),
    "truncated": (truncate, "cannot be read as safetensors"),
    "zero_bytes": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be read as safetensors"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken_config": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "config_not_utf8": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    "config_of_a_list": (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
}


@pytest.mark.parametrize("spoil, found", FOLDER_ERRORS.values(), ids=FOLDER_ERRORS.keys())
def test_folders_that_are_refused(saved, spoil, found):
    _, folder = saved()
    spoil(folder)
    with pytest.raises(BadInput) as error:
        load_model(str(folder))
    assert found in one_line(error) and str(folder) in str(error.value)


def test_a_missing_shard(saved):
    _, folder = saved(max_shard_size="20KB")
    min(folder.glob("model-*")).unlink()
    with pytest.raises(BadInput, match="missing"):
        load_model(str(folder))


def test_a_wrong_width_is_not_told_tensor_by_tensor(saved):
    _, folder = saved(num_hidden_layers=4)
    edit_config(folder, hidden_size=64)
    with pytest.raises(BadInput) as error:
        load_model(str(folder))
    lines = str(error.value).splitlines()
    assert len(lines) <= 6 and "more tensors" in lines[-1], lines


@pytest.mark.parametrize("name", ["./nowhere", "nobody/nothing", "not a name"])
def test_a_name_that_nothing_has(name, make_shape):
    with pytest.raises(BadInput) as error:
        load_weights(LlamaForCausalLM(make_shape()), name)
    assert name in one_line(error)
