"""Llama, from scratch. Parameter names are those of transformers' `LlamaForCausalLM`: weights go both ways as they are.

Shapes in names: N rows, S positions of a row, T = N x S tokens, D hidden, H query heads, K key/value heads,
C head width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.model.embedding import Embedding, Int8Embedding
from memtrain.model.gradient_checkpointing import POLICIES
from memtrain.model.int8 import Int8Linear
from memtrain.model.layers import Linear, RMSNorm, UpdateRows, compute_dtype, swiglu
from memtrain.model.loss import linear_cross_entropy
from memtrain.model.offload import offload_activations
from memtrain.model.presets import LlamaConfig


def rotary_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of a head, float32 [C/2] (RoPE, arXiv 2104.09864, eq. 15).

    `linear` scaling divides all by the factor (arXiv 2306.15595); `llama3` divides the slow ones, leaves the fast ones,
    and blends between (Llama 3.1, arXiv 2407.21783, and its published reference code).
    """
    even = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
    exponents = even / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the first context length
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


def rotary_tables(config: LlamaConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions [N or 1, S] as [N or 1, 1, S, C], computed in float32."""
    angles = positions.to(torch.float32)[:, None, :, None] * rotary_frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + C/2) of x [N, H, S, C] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

MakeLinear = Callable[..., nn.Module]  # of (in_features, out_features, bias=...)
NOT_OFFLOADED = 2  # layers at the end whose activations stay on the device


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far, a pair per layer, each [N, K, S, C]."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            self.layers.append((key, value))
        else:
            old_key, old_value = self.layers[layer]
            self.layers[layer] = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        return self.layers[layer]


@dataclass
class Positions:
    """What every layer needs to know of where tokens stand: rotary tables and who may see whom."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None  # bool [N, 1, S, S], true where a query may see a key; None: causal
    document_lengths: list[int] | None = None  # cut the T tokens of a packed batch into documents, each by itself
    cache: KeyValueCache | None = None

    def of_rows(self, first: int, count: int, length: int) -> Positions:
        """For rows first to first + count of `length` tokens each; no document goes from one row into the next."""
        lengths = self.document_lengths
        if lengths is not None:
            ends = list(itertools.accumulate(lengths))
            lengths = [n for n, end in zip(lengths, ends, strict=True) if first * length < end <= (first + count) * length]
        mask = None if self.mask is None else self.mask[first:first + count]
        return replace(self, mask=mask, document_lengths=lengths)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, index: int, linear: MakeLinear) -> None:
        super().__init__()
        h, c, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.index, self.head_dim, self.dropout = index, c, config.attention_dropout
        self.q_proj = linear(h, config.num_attention_heads * c, bias=bias)
        self.k_proj = linear(h, config.num_key_value_heads * c, bias=bias)
        self.v_proj = linear(h, config.num_key_value_heads * c, bias=bias)
        self.o_proj = linear(config.num_attention_heads * c, h, bias=bias)

    def forward(self, x_NSD: Tensor, at: Positions) -> Tensor:
        n, s, _ = x_NSD.shape
        query, key, value = (proj(x_NSD).view(n, s, -1, self.head_dim).transpose(1, 2)
                             for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, at.cos, at.sin), rotate(key, at.cos, at.sin)
        if at.cache is not None:
            key, value = at.cache.extend(self.index, key, value)
        if at.document_lengths is None:
            # a single new token sees all that the cache holds; is_causal would let it see the first position only
            out = self._attend(query, key, value, at.mask, causal=at.mask is None and s > 1)
        else:
            # one causal product per document: no S x S mask, and less work than the whole row
            parts = [tensor.transpose(1, 2).reshape(1, n * s, -1, self.head_dim).transpose(1, 2)
                     .split(at.document_lengths, dim=2) for tensor in (query, key, value)]
            out = torch.cat([self._attend(q, k, v, None, causal=True) for q, k, v in zip(*parts, strict=True)], dim=2)
        return self.o_proj(out.transpose(1, 2).reshape(n, s, -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal,
                                              dropout_p=self.dropout if self.training else 0.0, enable_gqa=True)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202). `recomputed`: what it keeps is a recomputation's, used once and at once."""

    recomputed = False

    def __init__(self, config: LlamaConfig, linear: MakeLinear) -> None:
        super().__init__()
        h, i, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linear(h, i, bias=bias)
        self.up_proj = linear(h, i, bias=bias)
        self.down_proj = linear(i, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up) if self.recomputed else F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int, linear: MakeLinear) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index, linear)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(self, x_NSD: Tensor, at: Positions) -> Tensor:
        x_NSD = x_NSD + self.self_attn(self.input_layernorm(x_NSD), at)
        return x_NSD + self.mlp(self.post_attention_layernorm(x_NSD))


class LlamaModel(nn.Module):
    """Embedding, decoder layers, last norm."""

    def __init__(self, config: LlamaConfig, int8: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = (Int8Embedding if int8 else Embedding)(config.vocab_size, config.hidden_size)
        linear: MakeLinear = Int8Linear if int8 else Linear
        self.layers = nn.ModuleList(DecoderLayer(config, index, linear) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.offload_activations = False
        self.recomputed_rows: int | None = None
        self.set_gradient_checkpointing("none", 0, compiled=False)

    def set_gradient_checkpointing(self, kind: str, layers: int, compiled: bool) -> None:
        """In training, run the first `layers` layers by policy `kind` and the others plainly; maybe compiled one by one."""
        self.runs: list[Callable[..., Tensor]] = [
            partial(POLICIES[kind if index < layers else "none"], layer, keep_rng=self.config.attention_dropout > 0)
            for index, layer in enumerate(self.layers)]
        if compiled:
            # the policy inside: the compiler then chooses what to keep by it
            self.runs = [torch.compile(run) for run in self.runs]
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if isinstance(module, Linear):
                    module.recomputed = kind != "none" and index < layers
                elif isinstance(module, MLP):
                    module.recomputed = kind == "full" and index < layers

    def forward(self, input_ids_NS: Tensor, attention_mask_NS: Tensor | None, document_lengths: list[int] | None,
                cache: KeyValueCache | None) -> Tensor:
        x_NSD = self.embed_tokens(input_ids_NS)
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + input_ids_NS.shape[1], device=x_NSD.device)[None]
        cos, sin = rotary_tables(self.config, positions, compute_dtype(x_NSD))
        if attention_mask_NS is None and start > 0 and input_ids_NS.shape[1] > 1:
            # is_causal lines up first query with first key: wrong where a cache stands before several new tokens
            attention_mask_NS = torch.ones_like(input_ids_NS[:1, :1]).expand(-1, start + input_ids_NS.shape[1])
        mask = None if attention_mask_NS is None else causal_padding_mask(attention_mask_NS, input_ids_NS.shape[1])
        at = Positions(cos, sin, mask, document_lengths, cache)
        training = self.training and torch.is_grad_enabled()
        offload = offload_activations() if training and self.offload_activations else nullcontext()
        kept_layers = min(NOT_OFFLOADED, len(self.layers))
        # groups of rows go through a layer in turn, so that the backward computes one group again at a time
        rows, length = x_NSD.shape[:2]
        size = self.recomputed_rows if training and self.recomputed_rows is not None else max(rows, 1)
        groups = list(x_NSD.split(size)) if size < rows else [x_NSD]
        places = [at.of_rows(first, size, length) for first in range(0, rows, size)] if size < rows else [at]
        for index, layer in enumerate(self.layers):
            run = self.runs[index] if training else layer
            # what the last layers save is wanted back at once
            with offload if index < len(self.layers) - kept_layers else nullcontext():
                for number, place in enumerate(places):
                    groups[number] = run(groups[number], place)
        x_NSD = torch.cat(groups) if len(groups) > 1 else groups[0]
        return self.norm(x_NSD)


def causal_padding_mask(attention_mask: Tensor, query_length: int) -> Tensor:
    """bool [N, 1, query_length, S] from attention_mask [N, S] (nonzero = real): causal, and no padding is seen.

    Every position sees at least itself, so a row or position with nothing to attend to gives finite numbers.
    """
    length = attention_mask.shape[1]
    query = torch.arange(length - query_length, length, device=attention_mask.device)[:, None]
    key = torch.arange(length, device=attention_mask.device)[None, :]
    return ((key < query) & attention_mask.bool()[:, None, None, :]) | (key == query)


class LlamaForCausalLM(nn.Module):
    """A Llama language model.

    Weights start as N(0, initializer_range), biases at 0, norms at 1 (transformers' Llama does the same).
    A tied head has no parameter of its own: the embedding is stored, saved and updated once.
    int8: embedding, linear layers and head (untied) hold int8 weights, from the start. initialise: False where others are
    read over them.
    """

    def __init__(self, config: LlamaConfig, int8: bool = False, initialise: bool = True) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, int8)
        self.lm_head = (None if config.tie_word_embeddings else
                        (Int8Linear if int8 else nn.Linear)(config.hidden_size, config.vocab_size, bias=False))
        self.loss_chunk_tokens: int | None = None
        self.update_head_rows: UpdateRows | None = None
        if initialise:
            self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (Int8Linear, Int8Embedding)):
            module.initialise(self.config.initializer_range)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def set_gradient_checkpointing(self, kind: str, layers: int | str = "all", compiled: bool = False) -> None:
        """Recompute by policy `kind` in the first `layers` decoder layers; `compiled`: torch.compile each of them."""
        self.model.set_gradient_checkpointing(
            kind, self.config.num_hidden_layers if layers == "all" else int(layers), compiled)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, attention_mask: Tensor | None = None,
                document_lengths: list[int] | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Logits, or with targets the summed loss.

        input_ids: int64 [N, S]. targets: int64 [N, S], the token that follows each position, -100 where there is none.
        attention_mask: [N, S] (with a cache, [N, all positions]), nonzero = real token; only needed for padding that is
        not on the right: a causal model never sees a pad that stands after a token. document_lengths: lengths that cut
        the N x S flattened tokens into documents which do not see each other.
        Returns logits [N, S, V] in the compute dtype, or the float32 sum of -log p(target), a scalar.
        """
        hidden_NSD = self.model(input_ids, attention_mask, document_lengths, cache)
        if targets is None:
            return F.linear(hidden_NSD, self.head_weight) if self.lm_head is None else self.lm_head(hidden_NSD)
        return linear_cross_entropy(hidden_NSD.flatten(0, 1), self.head_weight, targets.flatten(), self.loss_chunk_tokens,
                                    self.update_head_rows, getattr(self.lm_head, "weight_scale", None))


def new_model(shape: LlamaConfig, param_dtype: str, initialise: bool = True) -> LlamaForCausalLM:
    """A model whose weights are made in `param_dtype` (int8: but norms and biases in bfloat16) and never in another."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if param_dtype == "int8" else getattr(torch, param_dtype))
    try:
        return LlamaForCausalLM(shape, param_dtype == "int8", initialise)
    finally:
        torch.set_default_dtype(default)
