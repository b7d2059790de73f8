"""Text token by token: transformers' greedy text, and draws that follow the softmax."""

from __future__ import annotations

import pytest
import torch

from memtrain.model.generate import choose_token, generate

PROMPT = [5, 17, 60, 2, 2, 81]


def test_greedy_text_equals_transformers(twins):
    ours, theirs = twins(rope_theta=500000.0)
    out = theirs.eval().generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), do_sample=False,
                                 max_new_tokens=32, min_new_tokens=32, pad_token_id=0)
    wanted = out[0, len(PROMPT):].tolist()
    found = generate(ours, PROMPT, 32)
    assert found == wanted
    assert len(set(found)) > 4, "a text of few different tokens would prove little"


def test_greedy_text_is_the_likeliest_token_of_a_full_forward(make_model):
    model, ids = make_model(), list(PROMPT)
    new = generate(model, ids, 20)
    assert ids == PROMPT, "the prompt was changed"
    for token in new:
        with torch.no_grad():
            assert token == model(torch.tensor([ids]))[0, -1].argmax().item()
        ids.append(token)


def test_a_prompt_of_one_token_and_none_wanted(make_model):
    model = make_model()
    assert len(generate(model, [3], 5)) == 5
    assert generate(model, [3], 0) == []


def test_the_seed_decides(make_model):
    model = make_model(attention_dropout=0.5)  # dropout must be off, whatever mode the model came in
    texts = [generate(model.train(), PROMPT, 24, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_global_random_state_is_left_alone(make_model):
    model = make_model()
    before = torch.get_rng_state()
    generate(model, PROMPT, 4, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_top_1_is_greedy(make_model):
    model = make_model()
    assert generate(model, PROMPT, 24, temperature=1.0, top_k=1) == generate(model, PROMPT, 24)


def test_stops_at_the_end_token(make_model):
    model = make_model()
    full = generate(model, PROMPT, 24)
    end_id = full[5]
    cut = full.index(end_id) + 1
    assert generate(model, PROMPT, 24, end_id=end_id) == full[:cut]


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (2.0, None), (1.0, 3), (1.0, 100)])
def test_frequencies_follow_the_softmax(temperature, top_k):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])
    probabilities = (logits / temperature).softmax(0)
    if top_k == 3:
        probabilities = torch.where(logits >= 1.0, probabilities, 0.0)
        probabilities /= probabilities.sum()
    generator, draws = torch.Generator().manual_seed(0), 4000
    counts = torch.zeros(6)
    for _ in range(draws):
        counts[choose_token(logits, temperature, top_k, generator)] += 1
    assert not counts[probabilities == 0].any()
    # five standard deviations of a share
    spread = 5 * (probabilities * (1 - probabilities) / draws).sqrt()
    assert ((counts / draws - probabilities).abs() <= spread).all(), (counts / draws, probabilities)


def test_low_precision_logits_are_drawn_in_float32():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    drawn, wanted = ([choose_token(values, 0.9, None, torch.Generator().manual_seed(seed)) for seed in range(300)]
                     for values in (logits, logits.float()))
    assert drawn == wanted
    assert len(set(drawn)) > 100
