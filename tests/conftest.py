"""What all tests share: no network, one thread, and a pair of models that must agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# tiny tensors: on cores that others use too, a second thread makes them seven times slower; child processes as well
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch

torch.set_num_threads(1)

# the tiny model of all cases: grouped-query attention, an odd vocabulary
BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}


@pytest.fixture
def make_shape() -> Callable[..., Any]:
    """make_shape(**changes) -> LlamaConfig of the tiny model with those changes."""
    from memtrain.model.presets import LlamaConfig

    return lambda **changes: LlamaConfig(**{**BASE, **changes})


@pytest.fixture
def make_model(make_shape: Callable[..., Any]) -> Callable[..., Any]:
    """make_model(shape=None, seed=0, **changes) -> our model in training mode.

    Weights are large, N(0, 0.2), biases and norms too: attention is then far from uniform, and a wrong rope base,
    scaling, epsilon or grouping of heads shows in every output.
    """
    from memtrain.model.llama import LlamaForCausalLM

    def make(shape: Any = None, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape or make_shape(**changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        return model.train()

    return make


@pytest.fixture
def twins(make_model: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """twins(attention="sdpa", **changes) -> (our model, transformers' with the same weights), both in training mode."""
    import transformers

    def make(attention: str = "sdpa", **changes: Any) -> tuple[Any, Any]:
        ours = make_model(**changes)
        shape = ours.config
        values = {name: getattr(shape, name) for name in (*BASE, "rms_norm_eps", "tie_word_embeddings",
                                                          "attention_bias", "mlp_bias", "attention_dropout")}
        rope = {"rope_type": "default", **(shape.rope_scaling or {}), "rope_theta": shape.rope_theta}
        config = transformers.LlamaConfig(**values, rope_parameters=rope, pad_token_id=None, bos_token_id=None,
                                          eos_token_id=None)
        config._attn_implementation = attention
        theirs = transformers.LlamaForCausalLM(config)
        state = dict(ours.state_dict())
        if shape.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        theirs.load_state_dict(state, strict=True)
        return ours, theirs.train()

    return make


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], Any]], int]:
    """peak_bytes(function) -> most bytes the CPU allocator gave out above the start, counted by torch's profiler."""

    def measure(function: Callable[[], Any]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kept = function()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        assert events, "the profiler recorded no allocation"
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        del kept
        return peak

    return measure


@pytest.fixture
def largest_tensor() -> Callable[[Callable[[], Any]], tuple[int, str]]:
    """largest_tensor(function) -> (elements, operation) of the largest result of any operation, backward included."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        found: tuple[int, str] = (0, "")
        operations = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.operations += 1
            for leaf in tree_leaves(out):
                # the storage, so that an expanded view of a small tensor does not count
                if isinstance(leaf, torch.Tensor):
                    elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                    self.found = max(self.found, (elements, f"{func} {tuple(leaf.shape)}"))
            return out

    def measure(function: Callable[[], Any]) -> tuple[int, str]:
        with Largest() as mode:
            function()
        assert mode.operations, "no operation was seen"
        return mode.found

    return measure
