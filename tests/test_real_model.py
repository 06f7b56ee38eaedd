"""model.py with a real pretrained model, against transformers.

Skipped unless MAPPA_TEST_MODEL names the model's folder: nothing is downloaded here. Run with, say:

    MAPPA_TEST_MODEL=/models/SmolLM2-135M-Instruct pytest tests/test_real_model.py
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
    "What is 2 + 3?",
    "Name a colour.",
    "Write one line of Python that prints the first ten squares.",
    "Hi",
    "Translate 'good morning' into French, German and Spanish, one per line, and say which is the longest.",
    "Tom has 12 apples and buys 7 more. How many has he?",
    "Count from 1 to 5.",
    "Why is the sky blue?",
    "List three prime numbers.",
    "The capital of France is",
    "Spell 'cat' backwards.",
    "What comes after Monday?",
    "Give me a rhyme for 'light'.",
    "Is 17 prime?",
    "What is the square root of 81?",
    "Say nothing.",
    "Define entropy in one sentence.",
    "Convert 3 feet to inches.",
    "Who wrote Hamlet?",
    "x = 3; what is x * x?",
]


@pytest.fixture(scope="module")
def both():
    """Our model, its tokenizer, and the model of transformers, in float32."""
    ours, tokenizer = model.load(FOLDER)
    return ours, tokenizer, transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def contexts(both):
    """The ids of each prompt in the model's own chat template."""
    _, tokenizer, _ = both
    agent = agents.Agent("A", "{problem}")
    return [agents.render(tokenizer, agent, {"problem": prompt}) for prompt in PROMPTS]


def test_logits_of_real_text(both, contexts):
    """Trained weights give the logits of transformers, for all ids that the tokenizer has."""
    ours, _, theirs = both
    with torch.no_grad():
        for context in contexts[:6]:
            ids = torch.tensor([context])
            mine = ours.logits(ours(ids, torch.arange(len(context))[None]))
            expected = theirs(ids).logits
            assert (mine - expected)[..., : ours.n_tokens].abs().max() < 1e-3


def test_greedy_continuations_of_a_ragged_batch(both, contexts):
    """All 20 prompts at once in our sampler go on as one by one in transformers' generate()."""
    ours, _, theirs = both
    mine = model.sample(ours, contexts, np.zeros((20, 16)), 16, temperature=0)
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=ours.stop_ids)
    for context, completion in zip(contexts, mine, strict=True):
        ids = torch.tensor([context])
        [text] = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert completion.ids == text[len(context) :].tolist()


def test_saved_weights_are_exact(both, tmp_path):
    """What we save, transformers loads: the same weights bit for bit, and a tokenizer with the same ids."""
    ours, tokenizer, theirs = both
    model.save(ours, tokenizer, str(tmp_path))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    saved = dict(again.named_parameters())
    expected = dict(theirs.named_parameters())
    assert list(saved) == list(expected)
    for name in expected:
        assert torch.equal(saved[name], expected[name])

    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Über 3 + 4 = 7 <|im_end|>"
    assert reloaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_second_turn_is_what_the_template_would_have_rendered(both):
    """Symptom: an agent's second turn is sampled, or trained, under a prompt that does not continue its first.

    Cause: the history is rendered again from text, and some templates rewrite it.
    Guard: ids are extended. With a real template this gives the rendering of the whole conversation, for
    a reply whose words survive decoding and encoding.
    """
    _, tokenizer, _ = both
    question = "What is 2 + 3?"
    reply = "It is 5."
    context = agents.render(tokenizer, agents.Agent("A", "{problem}"), {"problem": question})
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    conversation = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "error"},
    ]
    whole = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert agents.extend(tokenizer, context, ids, "error") == whole


def test_sampled_is_scored(both, contexts):
    """Symptom: the importance ratio is not 1 before any update.

    Cause: sampler and scorer differ in temperature, padding or masking.
    Guard: with real weights, in float32 and at temperature 0.7, both give the same log-probabilities.
    """
    ours, _, _ = both
    uniforms = np.random.RandomState(0).random_sample((4, 12))
    completions = model.sample(ours, contexts[:4], uniforms, 12, temperature=0.7)
    ids = [completion.ids for completion in completions]
    scored, _ = model.token_logprobs(ours, contexts[:4], ids, temperature=0.7)
    sampled = torch.tensor([x for completion in completions for x in completion.logprobs])
    assert (scored.detach() - sampled).abs().max() < 1e-4
