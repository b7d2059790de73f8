"""Text from a model, a token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.model.llama import KeyValueCache, LlamaForCausalLM


def choose_token(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    """The next token: the likeliest at temperature 0, else drawn from softmax(logits / temperature) over the top_k."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V.float() / temperature
    if top_k is not None and top_k < scaled_V.numel():
        scaled_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(scaled_V.softmax(dim=-1), 1, generator=generator))


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt_ids: list[int], max_new_tokens: int, *, temperature: float = 0.0,
             top_k: int | None = None, seed: int = 0, end_id: int | None = None) -> list[int]:
    """Tokens that continue `prompt_ids` (at least one id), up to and with `end_id`. Keys and values are cached."""
    model.eval()
    device = model.head_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = KeyValueCache()
    new: list[int] = []
    step_ids = prompt_ids
    while len(new) < max_new_tokens:
        logits_1SV = model(torch.tensor([step_ids], device=device), cache=cache)
        new.append(choose_token(logits_1SV[0, -1], temperature, top_k, generator))
        if new[-1] == end_id:
            break
        step_ids = new[-1:]
    return new
