"""A real pretrained model, where MAPPA_TEST_MODEL names its folder; skipped elsewhere, since nothing is downloaded here.

Run with, say:  MAPPA_TEST_MODEL=/models/SmolLM2-135M-Instruct pytest tests/test_real_model.py
"""
import os

import numpy as np
import pytest
import torch
import transformers

import agents
import model

FOLDER = os.environ.get("MAPPA_TEST_MODEL", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="MAPPA_TEST_MODEL names no model folder")

PROMPTS = [
    "What is 2 + 3?", "Name a colour.", "Write one line of Python that prints the first ten squares.", "Hi",
    "Translate 'good morning' into French, German and Spanish, one per line, and say which is the longest.",
    "Tom has 12 apples and buys 7 more. How many has he?", "Count from 1 to 5.", "Why is the sky blue?",
    "List three prime numbers.", "The capital of France is", "Spell 'cat' backwards.", "What comes after Monday?",
    "Give me a rhyme for 'light'.", "Is 17 prime?", "What is the square root of 81?", "Say nothing.",
    "Define entropy in one sentence.", "Convert 3 feet to inches.", "Who wrote Hamlet?", "x = 3; what is x * x?",
]  # fmt: skip


@pytest.fixture(scope="module")
def both():
    ours, tokenizer = model.load(FOLDER)
    return ours, tokenizer, transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def contexts(both):
    agent = agents.Agent("A", "{problem}")
    return [agents.render(both[1], agent, {"problem": prompt}) for prompt in PROMPTS]


def test_logits_of_real_text(both, contexts):
    ours, _, theirs = both
    with torch.no_grad():
        for context in contexts[:6]:
            ids = torch.tensor([context])
            mine = ours.logits(ours(ids, torch.arange(len(context))[None]))
            expected = theirs(ids).logits
            assert (mine - expected)[..., : ours.n_tokens].abs().max() < 1e-3


def test_greedy_continuations_of_a_ragged_batch(both, contexts):
    """All 20 at once in our sampler, one by one in transformers' generate()."""
    ours, _, theirs = both
    mine = model.sample(ours, contexts, np.zeros((20, 16)), 16, temperature=0)
    for context, completion in zip(contexts, mine):
        options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=ours.stop_ids)
        attention = torch.ones(1, len(context), dtype=torch.long)
        expected = theirs.generate(torch.tensor([context]), attention_mask=attention, **options)[0, len(context) :]
        assert completion.ids == expected.tolist()


def test_saved_weights_are_exact(both, tmp_path):
    ours, tokenizer, theirs = both
    model.save(ours, tokenizer, str(tmp_path))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, mine), (other, expected) in zip(again.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(mine, expected)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded("Über 3 + 4 = 7 <|im_end|>")["input_ids"] == tokenizer("Über 3 + 4 = 7 <|im_end|>")["input_ids"]


def test_a_second_turn_is_what_the_template_would_have_rendered(both):
    """FAULT 19, on a real template: extending ids gives the rendering of the whole conversation, where the model's
    words survive decoding and encoding."""
    _, tokenizer, _ = both
    reply = "It is 5."
    context = agents.render(tokenizer, agents.Agent("A", "{problem}"), {"problem": "What is 2 + 3?"})
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    turns = [("user", "What is 2 + 3?"), ("assistant", reply), ("user", "error")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True, tokenize=True, return_dict=False,
    )  # fmt: skip
    assert agents.extend(tokenizer, context, ids, "error") == whole


def test_sampled_is_scored(both, contexts):
    """FAULT 11 with real weights: float32, temperature 0.7."""
    ours, _, _ = both
    uniforms = np.random.RandomState(0).random_sample((4, 12))
    completions = model.sample(ours, contexts[:4], uniforms, 12, temperature=0.7)
    scored, _ = model.token_logprobs(ours, contexts[:4], [c.ids for c in completions], temperature=0.7)
    sampled = torch.tensor([x for c in completions for x in c.logprobs])
    assert (scored.detach() - sampled).abs().max() < 1e-4
