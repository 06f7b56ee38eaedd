"""model.py: transformers' numbers, the same tokens in any batch, one distribution in both roles."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import model
from agents import InputError

PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789 "]
CONTEXTS = [[6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 6, 6, 21], [30, 31]]


@pytest.fixture(scope="module")
def tiny():
    """An untrained model and its tokenizer."""
    return model.tiny(PIECES, seed=1)


def draws(rows, count, seed=0):
    """Uniform numbers [rows, count] for sample()."""
    return np.random.RandomState(seed).random_sample((rows, count))


# ---- Parity --------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
LINEAR = dict(rope_type="linear", factor=4.0)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
YARN_WITH_OPTIONS = dict(
    rope_type="yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=8.0, attention_factor=1.3
)

CONFIGS = {
    # head_dim is not hidden_size / heads
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=5e5, rms_norm_eps=1e-5),
    "linear": transformers.LlamaConfig(**SIZES, rope_scaling=LINEAR),
    "llama3": transformers.LlamaConfig(**SIZES, rope_theta=100.0, rope_scaling=LLAMA3),
    "yarn": transformers.Qwen2Config(**SIZES, rope_theta=1000.0, rope_scaling=YARN),
    "yarn with options": transformers.Qwen3Config(**SIZES, head_dim=16, rope_scaling=YARN_WITH_OPTIONS),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(config, tmp_path):
    """For a random model of each family, written by transformers, our logits are theirs.

    What we save gives transformers the same logits again, bit for bit.
    """
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in theirs.parameters():  # fresh norms are all 1, biases all 0: this would hide a mix-up
        parameter.data += 0.1 * torch.randn_like(parameter)

    # their folder: several files with an index; no generation_config.json, which not every model has
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "generation_config.json").unlink(missing_ok=True)
    model.tiny_tokenizer(PIECES).save_pretrained(folder)

    # our logits
    ours, tokenizer = model.load(str(folder))
    assert tokenizer.eos_token_id in ours.stop_ids
    ours.n_tokens = 97  # compare the padded part of the vocabulary as well
    ids = torch.randint(0, 97, (3, 100))  # beyond the original context of the scaled ones
    positions = torch.arange(100).expand_as(ids)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours.logits(ours(ids, positions)) - expected).abs().max() < 1e-4

    # without the scaling of positions they would differ
    if ours.config.rope["rope_type"] != "default":
        unscaled = {"rope_theta": ours.config.rope["rope_theta"], "rope_type": "default"}
        ours.config = replace(ours.config, rope=unscaled)
        with torch.no_grad():
            assert (ours.logits(ours(ids, positions)) - expected).abs().max() > 1e-3

    # a saved copy
    model.save(ours, tokenizer, str(tmp_path / "ours"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)


def test_saved_tiny_model_opens_in_transformers(tiny, tmp_path):
    """The embedded model's folder gives transformers the same logits, tokens and chat template."""
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


BROKEN = {
    "missing tensor": "model.norm.weight is missing",
    "extra tensor": "lacks, such as extra",
    "wrong shape": "of shape [3]",
    "no weights": "has no model.safetensors",
    "damaged": "is damaged",
    "unknown": "'mamba' is not supported",
}


@pytest.mark.parametrize("change", BROKEN)
def test_broken_folders_are_named(tiny, tmp_path, change):
    """Symptom: a model that loads and talks nonsense.

    Cause: a tensor was skipped, or the architecture taken for a similar one.
    Guard: each such folder is refused, in one line that says what is wrong.
    """
    model.save(*tiny, str(tmp_path))
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
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
        model.load(str(tmp_path))
    assert BROKEN[change] in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_folder_is_not_sent_to_the_hub():
    """A path that leads nowhere is a mistake, and not the name of a model to download."""
    with pytest.raises(InputError, match="neither a model folder nor a hub id"):
        model.load("./no/such/folder")


# ---- One distribution, two roles -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_scored_logprobs(tiny, temperature):
    """Symptom: the importance ratio is far from 1 before any update; some tokens are clipped at once.

    Cause: the scorer forgets the temperature, or pads or masks differently from the sampler.
    Guard: both use one `logits`; what they give is equal to 1e-5.
    """
    network, _ = tiny
    completions = model.sample(network, CONTEXTS, draws(5, 12), 12, temperature)
    ids = [completion.ids for completion in completions]
    sampled = torch.tensor([x for completion in completions for x in completion.logprobs])
    scored, _ = model.token_logprobs(network, CONTEXTS, ids, temperature)
    assert (scored.detach() - sampled).abs().max() < 1e-5
    wrong, _ = model.token_logprobs(network, CONTEXTS, ids, 2 * temperature)
    assert (wrong.detach() - sampled).abs().max() > 0.01  # the comparison can fail


def test_sampling_draws_from_the_plain_softmax(tiny):
    """Symptom: the log-probabilities of tokens drift although nothing is learned.

    Cause: tokens are drawn with top-k or top-p and scored with the full softmax.
    Guard: the sampler has no such option. Its frequencies are those of the softmax, tail included.
    """
    network, _ = tiny
    with torch.no_grad():
        hidden = network(torch.tensor([[6, 7]]), torch.tensor([[0, 1]]))[:, -1]
        probabilities = network.logits(hidden).softmax(-1)[0]
    n = 20_000
    evenly_spread = torch.tensor((np.arange(n) + 0.5) / n)
    ids = model.draw(probabilities.log().expand(n, -1), evenly_spread)
    frequencies = torch.bincount(ids, minlength=len(probabilities)) / n
    assert (frequencies - probabilities).abs().max() < 2 / n
    assert (frequencies > 0).all()  # also the least likely


def test_ids_beyond_the_tokenizer_are_never_drawn_and_share_no_probability():
    """Symptom: an IndexError when a completion is decoded, or <unk> in the middle of answers.

    Cause: embedding rows that only pad the vocabulary can be drawn.
    Guard: their logits are -inf, in the sampler and in the scorer.
    """
    network, _ = model.tiny(PIECES, seed=3)
    network.n_tokens = 20
    completions = model.sample(network, CONTEXTS, draws(5, 50), 50)
    assert max(max(completion.ids) for completion in completions) < 20

    logprobs, _ = model.token_logprobs(network, [[6, 7]] * 20, [[i] for i in range(20)])
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    logprobs.sum().backward()  # and no nan from the masked rows
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


def test_entropy_is_that_of_the_distribution():
    """The entropy is the one that torch.distributions computes; masked ids add nothing, and no nan."""
    network, _ = model.tiny(PIECES, seed=1)
    network.n_tokens = 30
    _, entropy = model.token_logprobs(network, [[6, 7]], [[8]])
    hidden = network(torch.tensor([[6, 7]]), torch.tensor([[0, 1]]))[:, -1]
    expected = torch.distributions.Categorical(logits=network.logits(hidden)[0, :30]).entropy()
    assert entropy.item() == pytest.approx(expected.item(), abs=1e-5)


# ---- Batches -------------------------------------------------------------------------------------


def test_a_row_is_the_same_alone_and_in_any_batch(tiny):
    """Symptom: answers change with the batch size, or the rows of a batch are alike.

    Cause: left padding shifts positions, padding is attended to, or rows share random numbers.
    Guard: a token's slot in the cache is its position, and each token has its own uniform number.
    """
    network, _ = tiny
    uniforms = draws(5, 15)
    together = model.sample(network, CONTEXTS, uniforms, 15)
    order = [3, 0, 4, 2, 1]
    contexts = [CONTEXTS[i] for i in order]
    shuffled = model.sample(network, contexts, uniforms[order], 15, prefill_budget=10)
    for i, row in zip(order, shuffled, strict=True):
        [alone] = model.sample(network, [CONTEXTS[i]], uniforms[i : i + 1], 15)
        assert row.ids == together[i].ids == alone.ids
        assert row.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
        assert row.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert len({tuple(completion.ids) for completion in together}) == 5


def test_cached_decoding_equals_running_the_model_anew(tiny):
    """Symptom: with the cache the model writes something else than without.

    Cause: gradient checkpointing switches the cache off or breaks it, or positions are shifted.
    Guard: greedy tokens are the argmax of full passes without a cache over the growing text.
    """
    network, _ = tiny
    network.gradient_checkpointing = True  # concerns training only: the cache must not notice
    cached = model.sample(network, CONTEXTS, draws(5, 10), 10, temperature=0)
    network.gradient_checkpointing = False
    for context, completion in zip(CONTEXTS, cached, strict=True):
        ids = list(context)
        for token in completion.ids:
            with torch.no_grad():
                hidden = network(torch.tensor([ids]), torch.arange(len(ids))[None])[:, -1]
            assert network.logits(hidden).argmax().item() == token
            ids.append(token)


def test_no_cache_survives_an_update(tiny):
    """Symptom: after an update, samples still come from a mix of old and new weights.

    Cause: the cache outlives the weights.
    Guard: it lives inside one call, so sampling after a change equals sampling from a fresh copy.
    """
    network, _ = model.tiny(PIECES, seed=5)
    model.sample(network, CONTEXTS, draws(5, 8), 8)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.3)
    fresh, _ = model.tiny(PIECES, seed=6)
    fresh.load_state_dict(network.state_dict())
    after = model.sample(network, CONTEXTS, draws(5, 8), 8)
    expected = model.sample(fresh, CONTEXTS, draws(5, 8), 8)
    assert [completion.ids for completion in after] == [completion.ids for completion in expected]


# ---- Terminators ---------------------------------------------------------------------------------


def always(network, token):
    """Make a network give (almost) all probability to one token: all hidden states point to it."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.embed_tokens.weight[:, 0] = 1.0
        network.embed_tokens.weight[token, 0] = 100.0
        network.norm.weight.fill_(1.0)
    return network


def test_the_terminator_is_part_of_the_action():
    """Symptom: the end is never learned, and all completions run into the limit.

    Cause: the terminator is dropped, or masked because it equals the padding id.
    Guard: it is the last id of the action, and it gets a gradient like any other.
    """
    network, _ = model.tiny(PIECES)
    [completion] = model.sample(always(network, network.stop_ids[0]), [[6, 7]], draws(1, 9), 9)
    assert completion.ids == network.stop_ids
    assert len(completion.logprobs) == 1
    assert not completion.truncated

    network, _ = model.tiny(PIECES)
    logprobs, _ = model.token_logprobs(network, [[6, 7]], [[8, network.stop_ids[0]]])
    assert len(logprobs) == 2
    logprobs[1].backward()
    assert network.embed_tokens.weight.grad[network.stop_ids[0]].abs().sum() > 0


def test_every_stop_id_stops(tmp_path):
    """Symptom: Qwen writes on after <|im_end|>.

    Cause: only one of its two terminators is known.
    Guard: all ids that generation_config.json and the tokenizer name end a completion.
    """
    network, tokenizer = model.tiny(PIECES)
    model.save(network, tokenizer, str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 12]}')
    network, tokenizer = model.load(str(tmp_path))
    assert network.stop_ids == sorted({9, 12, tokenizer.eos_token_id})
    for stop in (9, 12):
        [completion] = model.sample(always(network, stop), [[6, 7]], draws(1, 9), 9)
        assert completion.ids == [stop]
        assert not completion.truncated


def test_nothing_is_forced_at_either_end():
    """Symptom: endings that the model did not choose are trained, or cut-off completions pass as whole.

    Cause: an end is forbidden before some length, or pasted in at the limit.
    Guard: an immediate end is allowed (see test_every_stop_id_stops), a missing one is only reported.
    """
    network, _ = model.tiny(PIECES)
    [completion] = model.sample(always(network, 20), [[6, 7]], draws(1, 9), 9)
    assert completion.ids == [20] * 9
    assert completion.truncated


def test_finished_rows_leave_the_batch(tiny, monkeypatch):
    """Symptom: a batch takes as long as its longest row times all its rows.

    Cause: rows that have ended go on through the model.
    Guard: never are more than a quarter of the places free while something goes through the model.
    """
    network, _ = tiny
    sizes = []
    watch_decoding(monkeypatch, lambda tokens, positions, cache, seen: sizes.append(len(tokens)))
    completions = model.sample(network, CONTEXTS * 8, draws(40, 60, seed=2), 60)
    lengths = [len(completion.ids) for completion in completions]
    for t, size in enumerate(sizes, 1):
        live = sum(n > t for n in lengths)
        assert live <= size <= 4 / 3 * live
    assert sizes[-1] < sizes[0]


def watch_decoding(monkeypatch, look):
    """Have a function look at the arguments of each decoding pass."""
    decode = model.Transformer.decode

    def watched(self, *arguments):
        look(*arguments)
        return decode(self, *arguments)

    monkeypatch.setattr(model.Transformer, "decode", watched)


RAGGED = [list(range(6, 6 + n)) for n in (5, 11, 2, 7, 3, 9, 2, 14, 4, 6, 8, 3)]


def bytes_for(network, rows, slots):
    """What so many rows and slots take in the cache."""
    return rows * slots * model.KVCache(network.config, "cpu", torch.float32).bytes_a_slot


@pytest.mark.parametrize("rows, cache_slots", [(256, None), (3, None), (256, 3), (256, 1), (2, 5)])
@pytest.mark.parametrize("order", ["as it is", "reversed"])
def test_tokens_do_not_depend_on_the_room_for_them(tiny, monkeypatch, rows, cache_slots, order):
    """Symptom: out of memory; or other samples on a smaller machine.

    Guard: contexts wait for room, take the places of those that ended, and step back where longer ones need it; each
    token is decided by its own uniform number, so it is the same whatever the budget and the order.
    """
    network, _ = tiny
    uniforms = draws(len(RAGGED), 70, seed=3)
    expected = [model.sample(network, [c], u[None], 70)[0] for c, u in zip(RAGGED, uniforms, strict=True)]
    sizes = []
    watch_decoding(
        monkeypatch, lambda tokens, positions, cache, seen: sizes.append((cache.layers[0].shape[1], cache.slots))
    )
    places = list(range(len(RAGGED)))[:: -1 if order == "reversed" else 1]
    limits = dict(rows=rows, prefill_budget=20)
    if cache_slots:
        limits["cache_bytes"] = bytes_for(network, cache_slots, 64)
    found = model.sample(network, [RAGGED[i] for i in places], uniforms[places], 70, **limits)
    for i, completion in zip(places, found, strict=True):
        assert completion.ids == expected[i].ids
        assert completion.truncated == expected[i].truncated
        assert completion.logprobs == pytest.approx(expected[i].logprobs, abs=1e-4)
    assert max(rows_used for rows_used, _ in sizes) <= rows
    if cache_slots:
        assert all(used == 1 or used * slots <= cache_slots * 64 for used, slots in sizes)


def test_rows_that_are_looked_at_seldom_are_the_same(tiny, monkeypatch):
    """On a GPU the host looks at every eighth token only; what a row draws behind its stop counts for nothing."""
    network, _ = tiny
    uniforms = draws(len(RAGGED), 30, seed=3)
    expected = model.sample(network, RAGGED, uniforms, 30)
    begin = model.Batch.__init__

    def like_a_gpu(self, *arguments):
        begin(self, *arguments)
        self.collect_every, self.slot_step = 8, 256

    monkeypatch.setattr(model.Batch, "__init__", like_a_gpu)
    found = model.sample(network, RAGGED, uniforms, 30, rows=5)
    assert [(c.ids, c.truncated) for c in found] == [(c.ids, c.truncated) for c in expected]


def test_a_place_does_not_stay_free_while_contexts_wait(tiny, monkeypatch):
    """Symptom: batch after batch, each as long as its longest row. Guard: with 4 places, 4 are in use to the end."""
    network, _ = tiny
    sizes = []
    watch_decoding(monkeypatch, lambda tokens, positions, cache, seen: sizes.append(int((positions > 0).sum())))
    completions = model.sample(network, RAGGED * 4, draws(48, 40, seed=4), 40, rows=4)
    passes = sum(len(completion.ids) - 1 for completion in completions)
    assert sum(sizes) == passes
    assert len(sizes) < passes / 4 + 40  # all but the last ones ran four at a time


def test_equal_contexts_are_prefilled_once(tiny, monkeypatch):
    """The samples of a problem have one context: it goes through the model once, and each row draws its own tokens."""
    network, _ = tiny
    prefill, seen = model.Transformer.prefill, []

    def watched(self, contexts, cache, places):
        seen.extend(contexts)
        return prefill(self, contexts, cache, places)

    monkeypatch.setattr(model.Transformer, "prefill", watched)
    uniforms = draws(6, 12, seed=5)
    found = model.sample(network, [CONTEXTS[0], CONTEXTS[1]] * 3, uniforms, 12)
    assert sorted(seen) == sorted([tuple(CONTEXTS[0]), tuple(CONTEXTS[1])])
    monkeypatch.undo()
    for i, completion in enumerate(found):
        assert completion.ids == model.sample(network, [CONTEXTS[i % 2]], uniforms[i : i + 1], 12)[0].ids


# ---- Memory --------------------------------------------------------------------------------------


def test_logits_of_all_tokens_never_exist_at_once(tiny, monkeypatch):
    """Symptom: out of memory at the output head.

    Cause: the logits [tokens, vocabulary] of a whole micro-batch in float32.
    Guard: they are made in chunks, and made again in backward, with the same result.
    """
    network, _ = tiny
    rows = []
    original = model.Transformer.logits

    def counted(self, hidden, temperature=1.0):
        rows.append(len(hidden))
        return original(self, hidden, temperature)

    monkeypatch.setattr(model.Transformer, "logits", counted)
    monkeypatch.setattr(model, "FEW_LOGITS", 0)

    def score(chunk):
        """The log-probabilities of 300 tokens, and the gradient of their sum."""
        network.zero_grad()
        logprobs, _ = model.token_logprobs(network, [[6, 7]] * 10, [[8] * 30] * 10, chunk=chunk)
        logprobs.sum().backward()
        return logprobs.detach(), network.embed_tokens.weight.grad.clone()

    logprobs, gradient = score(chunk=7)
    assert max(rows) == 7
    rows.clear()
    whole_logprobs, whole_gradient = score(chunk=1000)
    assert rows == [300, 300]  # forward and backward
    assert torch.allclose(logprobs, whole_logprobs, atol=1e-5)
    assert torch.allclose(gradient, whole_gradient, atol=1e-3)


def test_gradient_checkpointing_changes_no_gradient(tiny):
    """Symptom: training goes differently when activations are recomputed to save memory.

    Cause: the second forward pass is not the first one, because of a cache or another mode.
    Guard: the gradients are equal bit for bit.
    """
    network, _ = tiny

    def gradient(recompute):
        network.gradient_checkpointing = recompute
        network.zero_grad()
        logprobs, _ = model.token_logprobs(network, CONTEXTS, [[8, 9, 1]] * 5)
        logprobs.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])

    assert torch.equal(gradient(recompute=True), gradient(recompute=False))
