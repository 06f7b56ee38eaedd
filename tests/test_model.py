"""model.py: the same numbers as transformers; the same tokens in any batch; the same log-probabilities in both roles."""
import json

import numpy as np
import pytest
import torch
import transformers

import model
from agents import InputError

PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789 "]
CONTEXTS = [[6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 6, 6, 21], [30, 31]]


@pytest.fixture(scope="module")
def tiny():
    network, tokenizer = model.tiny(PIECES, seed=1)
    return network, tokenizer


def draws(rows, count, seed=0):
    return np.random.RandomState(seed).random_sample((rows, count))


# ---- Parity -----------------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),  # head_dim is not hidden / heads
        transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=5e5, rms_norm_eps=1e-5),
        transformers.LlamaConfig(**SIZES, rope_scaling=dict(rope_type="linear", factor=4.0)),
        transformers.LlamaConfig(**SIZES, rope_theta=100.0, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16)),
        transformers.Qwen2Config(**SIZES, rope_theta=1000.0, rope_scaling=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
        transformers.Qwen3Config(**SIZES, head_dim=16, rope_scaling=dict(
            rope_type="yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=8.0, attention_factor=1.3)),
    ],
    ids=["qwen3", "qwen2", "llama", "linear", "llama3", "yarn", "yarn with options"],
)
def test_logits_are_those_of_transformers(config, tmp_path):
    """A random model of each family, written by transformers: our logits are theirs, and so are a saved copy's."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for p in theirs.parameters():  # fresh norms are all 1 and fresh biases all 0: that would hide a mix-up
        p.data += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1  # several files with an index
    (tmp_path / "theirs" / "generation_config.json").unlink(missing_ok=True)  # not every model has one
    tokenizer = model.tiny_tokenizer(PIECES)
    tokenizer.save_pretrained(tmp_path / "theirs")
    ours, tokenizer = model.load(str(tmp_path / "theirs"))
    assert tokenizer.eos_token_id in ours.stop_ids
    ours.n_tokens = 97  # compare the padded part of the vocabulary as well
    ids = torch.randint(0, 97, (3, 100))  # beyond the original context of the scaled ones
    positions = torch.arange(100).expand_as(ids)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours.logits(ours(ids, positions)) - expected).abs().max() < 1e-4
        if ours.config.rope["rope_type"] != "default":  # and the scaling is no ornament
            object.__setattr__(ours.config, "rope", {"rope_theta": ours.config.rope["rope_theta"], "rope_type": "default"})
            assert (ours.logits(ours(ids, positions)) - expected).abs().max() > 1e-3
        model.save(ours, tokenizer, str(tmp_path / "ours"))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert torch.equal(again(ids).logits, expected)


def test_saved_tiny_model_opens_in_transformers(tiny, tmp_path):
    network, tokenizer = tiny
    model.save(network, tokenizer, str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = [{"role": "user", "content": "abc 12"}]
    ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
    assert again.apply_chat_template(text, add_generation_prompt=True, return_dict=False) == ids
    assert again.decode(ids) == "<|user|>abc 12<|end|><|assistant|>"
    ids = torch.tensor([ids])
    with torch.no_grad():
        ours = network.logits(network(ids, torch.arange(ids.shape[1])[None]))
        assert (theirs(ids).logits - ours).abs().max() < 1e-4


@pytest.mark.parametrize("change", ["missing tensor", "extra tensor", "wrong shape", "no weights", "damaged", "unknown"])
def test_broken_folders_are_named(tiny, tmp_path, change):
    """Symptom: a model that loads and talks nonsense, for a tensor was skipped. Guard: each such folder is refused."""
    from safetensors.torch import load_file, save_file

    folder = str(tmp_path)
    model.save(*tiny, folder)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    expected = {"missing tensor": "model.norm.weight is missing", "extra tensor": "lacks, such as extra",
                "wrong shape": "of shape [3]", "no weights": "has no model.safetensors", "damaged": "is damaged",
                "unknown": "'mamba' is not supported"}[change]  # fmt: skip
    if change == "missing tensor":
        del weights["model.norm.weight"]
    elif change == "wrong shape":
        weights["model.norm.weight"] = torch.ones(3)
    elif change == "extra tensor":
        weights["extra"] = torch.ones(3)
    save_file(weights, path)
    if change == "damaged":
        path.write_bytes(path.read_bytes()[:1000])
    elif change == "no weights":
        path.unlink()
    elif change == "unknown":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(InputError) as error:
        model.load(folder)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_missing_folder_is_not_sent_to_the_hub():
    with pytest.raises(InputError, match="neither a model folder nor a hub id"):
        model.load("./no/such/folder")


# ---- One distribution, two roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_scored_logprobs(tiny, temperature):
    """FAULTS 7, 11. Symptom: ratio far from 1 before any update, a part of the tokens clipped at once. Cause: the
    scorer forgets the temperature, or pads, or masks otherwise. Guard: one `logits` for both; equal to 1e-5."""
    network, _ = tiny
    completions = model.sample(network, CONTEXTS, draws(5, 12), 12, temperature)
    scored, _ = model.token_logprobs(network, CONTEXTS, [c.ids for c in completions], temperature)
    sampled = torch.tensor([x for c in completions for x in c.logprobs])
    assert (scored.detach() - sampled).abs().max() < 1e-5
    wrong, _ = model.token_logprobs(network, CONTEXTS, [c.ids for c in completions], 2 * temperature)
    assert (wrong.detach() - sampled).abs().max() > 0.01  # the comparison can fail


def test_sampling_draws_from_the_plain_softmax(tiny):
    """FAULT 8. Symptom: scores of tokens drift although nothing is learned. Cause: drawn with top-k or top-p, scored
    with the full softmax. Guard: the sampler has no such option, and its frequencies are the softmax's, tail included."""
    network, _ = tiny
    n = 20_000
    uniforms = (np.arange(n) + 0.5)[:, None] / n
    with torch.no_grad():
        hidden = network(torch.tensor([[6, 7]]), torch.tensor([[0, 1]]))[:, -1]
        p = network.logits(hidden).softmax(-1)[0]
    drawn = torch.bincount(model.draw(p.log().expand(n, -1), torch.tensor(uniforms[:, 0])), minlength=len(p)) / n
    assert (drawn - p).abs().max() < 2 / n
    assert (drawn > 0).all()  # also the least likely


def test_ids_beyond_the_tokenizer_are_never_drawn_and_share_no_probability(tiny, tmp_path):
    """FAULT 21. Symptom: IndexError in decode, or <unk> in the middle of answers. Cause: embedding rows that pad the
    vocabulary can be drawn. Guard: -inf in sampler and scorer alike."""
    network, _ = model.tiny(PIECES, seed=3)
    network.n_tokens = 20
    completions = model.sample(network, CONTEXTS, draws(5, 50), 50)
    assert max(max(c.ids) for c in completions) < 20
    logprobs, _ = model.token_logprobs(network, [[6, 7]] * 20, [[i] for i in range(20)])
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    logprobs.sum().backward()  # and no nan from the masked rows
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


def test_entropy_is_that_of_the_distribution(tiny):
    network, _ = tiny
    network.n_tokens, kept = 30, network.n_tokens
    _, entropy = model.token_logprobs(network, [[6, 7]], [[8]])
    hidden = network(torch.tensor([[6, 7]]), torch.tensor([[0, 1]]))[:, -1]
    expected = torch.distributions.Categorical(logits=network.logits(hidden)[0, :30]).entropy()
    network.n_tokens = kept
    assert entropy.item() == pytest.approx(expected.item(), abs=1e-5)


# ---- Batches -----------------------------------------------------------------------------------------------------------


def test_a_row_is_the_same_alone_and_in_any_batch(tiny):
    """FAULTS 6, 20. Symptom: answers change with the batch size; rows of a batch are alike. Cause: left padding shifts
    positions, padding is attended to, or rows share random numbers. Guard: slot = position, one uniform per token."""
    network, _ = tiny
    u = draws(5, 15)
    together = model.sample(network, CONTEXTS, u, 15)
    order = [3, 0, 4, 2, 1]
    shuffled = model.sample(network, [CONTEXTS[i] for i in order], u[order], 15, prefill_budget=10)
    for row, i in zip(shuffled, order):
        alone = model.sample(network, [CONTEXTS[i]], u[i : i + 1], 15)[0]
        assert row.ids == together[i].ids == alone.ids
        assert row.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
        assert row.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert len({tuple(c.ids) for c in together}) == 5


def test_cached_decoding_equals_running_the_model_anew(tiny):
    """FAULTS 13, 20: greedy tokens with the cache are the argmax of full, cacheless passes over the growing text."""
    network, _ = tiny
    network.gradient_checkpointing = True  # concerns training only: the cache must not notice
    cached = model.sample(network, CONTEXTS, draws(5, 10), 10, temperature=0)
    network.gradient_checkpointing = False
    for context, completion in zip(CONTEXTS, cached):
        ids = list(context)
        for token in completion.ids:
            with torch.no_grad():
                hidden = network(torch.tensor([ids]), torch.arange(len(ids))[None])[:, -1]
            assert network.logits(hidden).argmax().item() == token
            ids.append(token)


def test_no_cache_survives_an_update(tiny):
    """FAULT 12. Symptom: after an update, samples still come from a mix of old and new weights. Cause: the cache outlives
    the weights. Guard: it lives inside one call; sampling after a change equals sampling from a fresh copy."""
    network, _ = model.tiny(PIECES, seed=5)
    model.sample(network, CONTEXTS, draws(5, 8), 8)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(1.3)
    fresh, _ = model.tiny(PIECES, seed=6)
    fresh.load_state_dict(network.state_dict())
    after = model.sample(network, CONTEXTS, draws(5, 8), 8)
    assert [c.ids for c in after] == [c.ids for c in model.sample(fresh, CONTEXTS, draws(5, 8), 8)]


# ---- Terminators -----------------------------------------------------------------------------------------------------------


def always(network, token):
    """Make a network that gives (almost) all probability to one token: every hidden state ends on its embedding."""
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
        network.embed_tokens.weight[:, 0] = 1.0
        network.embed_tokens.weight[token, 0] = 100.0
        network.norm.weight.fill_(1.0)
    return network


def test_the_terminator_is_part_of_the_action():
    """FAULT 15. Symptom: the end is never learned, all completions hit the limit. Cause: the terminator is dropped, or
    masked because it equals the padding id. Guard: it is the action's last id and gets a gradient like any other."""
    network, _ = model.tiny(PIECES)
    [c] = model.sample(always(network, network.stop_ids[0]), [[6, 7]], draws(1, 9), 9)
    assert c.ids == network.stop_ids and len(c.logprobs) == 1 and not c.truncated
    network, _ = model.tiny(PIECES)
    logprobs, _ = model.token_logprobs(network, [[6, 7]], [[8, network.stop_ids[0]]])
    assert len(logprobs) == 2
    logprobs[1].backward()
    assert network.embed_tokens.weight.grad[network.stop_ids[0]].abs().sum() > 0


def test_every_stop_id_stops(tmp_path):
    """FAULT 16. Symptom: Qwen runs past <|im_end|>. Cause: one of its two terminators is known. Guard: the set of
    generation_config and tokenizer."""
    network, tokenizer = model.tiny(PIECES)
    model.save(network, tokenizer, str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 12]}')
    network, tokenizer = model.load(str(tmp_path))
    assert network.stop_ids == sorted({9, 12, tokenizer.eos_token_id})
    for stop in (9, 12):
        [c] = model.sample(always(network, stop), [[6, 7]], draws(1, 9), 9)
        assert c.ids == [stop] and not c.truncated


def test_nothing_is_forced_at_either_end():
    """FAULTS 17, 23: an immediate end is allowed (no min_tokens), a missing one is reported and not pasted in."""
    network, _ = model.tiny(PIECES)
    [c] = model.sample(always(network, 20), [[6, 7]], draws(1, 9), 9)
    assert c.ids == [20] * 9 and c.truncated


def test_finished_rows_leave_the_batch(tiny):
    """Symptom: a batch takes as long as its longest row times all its rows. Guard: ended rows are dropped at once."""
    network, _ = tiny
    sizes = []
    hook = network.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    completions = model.sample(network, CONTEXTS * 8, draws(40, 60, seed=2), 60)
    hook.remove()
    lengths = sorted((len(c.ids) for c in completions), reverse=True)
    assert sizes[1:] == [sum(n > t for n in lengths) for t in range(1, lengths[0])]
    assert sizes[-1] < sizes[1] == sum(n > 1 for n in lengths)


# ---- Memory ------------------------------------------------------------------------------------------------------------------


def test_logits_of_all_tokens_never_exist_at_once(tiny, monkeypatch):
    """FAULT 26. Symptom: out of memory at the head, [tokens, vocabulary] in float32. Guard: made in chunks, and made
    again in backward, with the same result."""
    network, _ = tiny
    contexts, completions = [[6, 7]] * 10, [[8] * 30] * 10
    rows = []
    original = model.Transformer.logits
    monkeypatch.setattr(model.Transformer, "logits", lambda s, h, t=1.0: rows.append(len(h)) or original(s, h, t))
    results = []
    for chunk in (7, 1000):
        network.zero_grad()
        logprobs, _ = model.token_logprobs(network, contexts, completions, chunk=chunk)
        logprobs.sum().backward()
        results.append((logprobs.detach(), network.embed_tokens.weight.grad.clone()))
    assert max(rows[: len(rows) - 2]) == 7 and rows[-1] == 300
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-3)


def test_gradient_checkpointing_changes_no_gradient(tiny):
    """FAULT 13: recomputing activations is a matter of memory only."""
    network, _ = tiny
    gradients = []
    for network.gradient_checkpointing in (True, False):
        network.zero_grad()
        model.token_logprobs(network, CONTEXTS, [[8, 9, 1]] * 5)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch.equal(*gradients)
