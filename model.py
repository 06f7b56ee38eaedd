"""model.py: the language model, its KV-cached sampler and its scorer, in plain PyTorch.

Before this: agents.py; after it: judge.py.
Part of the paper: the policy pi_theta that every agent has.
An update compares probabilities of the same sampled token, in the importance ratio
rho_t = pi_theta(y_t) / pi_old(y_t) and in the KL penalty against pi_ref:

    sample()          draws y_1..y_T, and returns their log-probabilities as it saw them; sample_as_they_end(), which
                      does the work, keeps a Batch of Sequences: one that ends gives its row to one that waits
    token_logprobs()  computes the log-probabilities of given ids: pi_old and pi_ref, and with gradients pi_theta

Both go through `Transformer.logits`, so they agree about masking and temperature. In bfloat16 they
still differ, by their kernels and shapes: the scorer is the authority, and train.py measures the
sampler against it.

One decoder family covers Qwen2/Qwen2.5, Qwen3, Llama and what shares their layout (SmolLM2,
DeepSeek-R1-Distill): RMSNorm, rotary positions, grouped-query attention (optional QKV bias or
QK-norm), SwiGLU, and an output head that may be tied to the embedding.

Instead of all its weights an agent may train a LoRA adapter over frozen ones: with_adapter().

What we leave out: dropout, sliding windows, mixtures of experts, tensor parallelism,
and every sampling trick (top-k, top-p, repetition penalties, forced tokens):
the trainer scores the plain softmax, so the sampler must draw from the plain softmax too.

Letters in shapes: B rows, T tokens of a row, H hidden size, D size of one head,
S slots of the cache, V vocabulary size, N tokens of all rows together.

Sample up to three tokens from an untrained model:

    python -c "import model; m, tokenizer = model.tiny('abc'); print(
        model.sample(m, [tokenizer('ab')['input_ids']], [[0.9, 0.7, 0.8]], 3))"

Compare a model of yours with transformers:  MAPPA_TEST_MODEL=FOLDER pytest tests/test_real_model.py
"""

import copy
import json
import math
import os
import re
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from agents import InputError, read_json, require, turn_end

# no attention by cuDNN: it makes a new plan for every new shape
torch.backends.cuda.enable_cudnn_sdp(False)

# ---- Configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """The fields of Hugging Face's config.json that the code below reads."""

    vocab_size: int  # V, rows of the embedding; may exceed the tokenizer's size (padding)
    hidden_size: int  # H
    intermediate_size: int  # width of the MLP
    layers: int  # number of blocks
    heads: int  # query heads of a block
    kv_heads: int  # key/value heads; heads // kv_heads query heads share one (grouped queries)
    head_dim: int  # D; not always hidden_size / heads
    norm_eps: float  # added to the mean square in RMSNorm
    max_positions: int  # longest context that the model is made for
    rope: dict  # rotary positions: rope_theta, rope_type and that type's options, see rope_settings
    tied: bool  # the output head is the embedding matrix
    qkv_bias: bool  # Qwen2: biases on the query, key and value projections
    qk_norm: bool  # Qwen3: RMSNorm of every query and key head


def model_config(hf_config):
    """Translate the dict of a Hugging Face config.json into a ModelConfig.

    Raises InputError for an architecture or an option that this file does not implement: to ignore
    one would give a model that runs and is subtly wrong.
    """
    # the architecture
    kind = hf_config.get("model_type")
    supported = kind in ("qwen2", "qwen3", "llama")
    require(supported, f"model type {kind!r} is not supported; known are qwen2, qwen3 and llama")

    # its options
    rope = rope_settings(hf_config)
    unsupported = ", ".join(unsupported_options(hf_config, rope))
    require(not unsupported, f"this {kind} model uses {unsupported}, which model.py does not implement")

    # the sizes without which there is no model
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in needed:
        size = hf_config.get(name)
        require(isinstance(size, int) and size > 0, f"config.json: {name} must be a number over 0, not {size}")

    # our names for the fields, with the defaults of transformers for those that may be absent
    sizes = {name: hf_config[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = hf_config["num_attention_heads"]
    kv_heads = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    blocks = dict(layers=hf_config["num_hidden_layers"], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    norms = dict(norm_eps=hf_config.get("rms_norm_eps", 1e-6), qk_norm=kind == "qwen3")
    positions = dict(max_positions=hf_config.get("max_position_embeddings") or 32_768, rope=rope)
    tied = hf_config.get("tie_word_embeddings", False)
    return ModelConfig(**sizes, **blocks, **norms, **positions, tied=tied, qkv_bias=kind == "qwen2")


def rope_settings(hf_config):
    """Return the settings of the rotary positions as one dict, whichever version wrote the file.

    transformers 5 writes all of them into rope_parameters. Earlier versions write rope_theta at the
    top level and the rest into rope_scaling, in which "type" is the old name of "rope_type".
    """
    written = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    require(isinstance(written, dict), f"config.json: rope_scaling must be an object, not {written}")
    rope_type = written.get("rope_type") or written.get("type", "default")
    theta = written.get("rope_theta") or hf_config.get("rope_theta", 10_000.0)
    return written | {"rope_type": rope_type, "rope_theta": theta}


def unsupported_options(hf_config, rope):
    """List what a config.json asks for and this file does not implement."""
    options = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
    found = [name for name in options if hf_config.get(name)]
    if rope["rope_type"] not in ROPE_TYPES:
        found.append(f"rope scaling {rope['rope_type']}")
    found += [f"the rope option {name}" for name in ("mscale", "mscale_all_dim", "truncate") if name in rope]
    if hf_config.get("hidden_act", "silu") != "silu":
        found.append(hf_config["hidden_act"])
    return found


# ---- The decoder: attributes have Hugging Face's names, so that weights need no key map ----------


# Rotary positions (RoPE, arXiv 2104.09864): pair i of the D/2 pairs of dimensions of a query or key
# is turned by position / period_i radians, with period_i = theta^(2i/D). A "period" here is the
# number of positions per radian, so a whole turn takes 2 pi periods. Scaling fits a longer context
# into the angles of the original one: it lengthens periods by up to `factor`.


def linear_periods(period, config):
    """Lengthen all periods alike: period' = factor * period (arXiv 2306.15595). Without scaling the factor is 1."""
    return period * config.rope.get("factor", 1.0)


def llama3_periods(period, config):
    """Lengthen only the periods of pairs that turn seldom within the original context.

    A pair turns context / (2 pi period) times. It keeps its period from high_freq_factor turns on,
    gets factor * period up to low_freq_factor turns, and a frequency in between for turns between:

        kept    = (turns - low) / (high - low), clamped to [0, 1]
        period' = period / (kept + (1 - kept) / factor)

    Source: the code released with Llama 3.1.
    """
    low, high = config.rope["low_freq_factor"], config.rope["high_freq_factor"]
    turns = original_context(config) / (2 * math.pi * period)  # [D/2]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return period / (kept + (1 - kept) / config.rope.get("factor", 1.0))


def yarn_periods(period, config):
    """Lengthen only the periods of pairs that turn seldom, interpolating along the index of the pair.

    The idea is that of llama3, with beta_fast and beta_slow turns as limits, but the share that is
    kept falls with the pair's index i and not with its number of turns:

        kept    = 1 - (i - first) / (last - first), clamped to [0, 1]
        period' = period / (kept + (1 - kept) / factor)

    Source: YaRN, arXiv 2309.00071, section 3.2, as in its released code (the paper's own formula
    goes by turns).
    """
    first = max(math.floor(pair_with_turns(config.rope.get("beta_fast") or 32, config)), 0)
    last = min(math.ceil(pair_with_turns(config.rope.get("beta_slow") or 1, config)), config.head_dim - 1)
    pairs = torch.arange(len(period), device=period.device)
    kept = 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)  # [D/2]
    return period / (kept + (1 - kept) / config.rope.get("factor", 1.0))


def pair_with_turns(turns, config):
    """Solve context / (2 pi theta^(2i/D)) = turns for i, the (fractional) index of a pair."""
    periods = original_context(config) / (turns * 2 * math.pi)
    return config.head_dim * math.log(periods) / (2 * math.log(config.rope["rope_theta"]))


def original_context(config):
    """Return the context length that the model had before its positions were scaled."""
    return config.rope.get("original_max_position_embeddings") or config.max_positions


def attention_factor(config):
    """Return the factor on cos and sin, and so on queries and keys: 1 except for yarn.

    By default it is 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4): it sharpens attention in
    longer contexts.
    """
    if config.rope["rope_type"] != "yarn":
        return 1.0
    return config.rope.get("attention_factor") or (0.1 * math.log(config.rope.get("factor", 1.0)) + 1)


ROPE_TYPES = {"default": linear_periods, "linear": linear_periods, "llama3": llama3_periods, "yarn": yarn_periods}


def rotary_angles(positions, config):
    """Return cos and sin [B, T, 1, D] in float32 for explicit positions [B, T]; see rotate() for their signs."""
    D = config.head_dim
    exponents = torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D
    period = config.rope["rope_theta"] ** exponents  # [D/2]
    period = ROPE_TYPES[config.rope["rope_type"]](period, config)
    angles = positions[..., None].float() / period  # [B, T, D/2]
    scale = attention_factor(config)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    # NOTE: a pair is (i, i + D/2), as in Hugging Face's weights, not (2i, 2i + 1) as in the paper
    return torch.cat([cos, cos], dim=-1)[:, :, None], torch.cat([-sin, sin], dim=-1)[:, :, None]


def rotate(x, cos, sin):
    """Turn queries or keys x [B, T, heads, D] by the angles of their positions.

    The pair (a, b) becomes (a cos - b sin, b cos + a sin); the sign is in the first half of `sin`.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)  # each half in the place of the other
    return (x * cos + swapped * sin).to(x.dtype)  # the products are float32, as cos and sin are


@dataclass(frozen=True)
class Layout:
    """Where the tokens of one forward pass stand: what all its layers need to know, made once, not once a layer."""

    angles: tuple  # cos and sin, from rotary_angles()
    cache: object = None  # KVCache that the pass writes into
    rows: torch.Tensor | None = None  # [B, 1]: the row of the cache that each row of the pass is written into
    positions: torch.Tensor | None = None  # [B, T]
    visible: torch.Tensor | None = None  # [B, 1, 1, S]: the slots that a decoding pass sees, which is one of T = 1


class KVCache:
    """Keys and values of the tokens seen so far: for each layer one tensor [2, rows, slots, kv_heads, D].

    NOTE: a token's slot IS its position. Ragged contexts therefore need no left padding: each row
    fills its own slots 0..length-1. Whatever else a row holds (padding of a prefill, an earlier
    sequence, what a free row decoded) is overwritten before a query may look at it, for a query at
    position p looks at exactly the slots <= p. A cache lives inside one call of sample(): none
    survives an update of the weights.
    """

    def __init__(self, config, device, dtype):
        self.slots = 0
        shape = (2, 0, 0, config.kv_heads, config.head_dim)  # keys are [0], values [1]
        self.layers = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.bytes_a_slot = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize

    def resize(self, kept, n_rows, slots):
        """Move the rows `kept` (a list) to the front of a cache of other sizes, one layer at a time."""
        seen = min(slots, self.slots)
        for layer, old in enumerate(self.layers):
            new = old.new_zeros(2, n_rows, slots, *old.shape[3:])
            if kept:
                new[:, : len(kept), :seen] = old[:, kept, :seen]
            self.layers[layer] = new
        self.slots = slots

    def copy_row(self, source, target):
        """Give a row the content of another one."""
        for layer in self.layers:
            layer[:, target] = layer[:, source]


class Attention(nn.Module):
    """Grouped-query attention: training, prefill (whole contexts, empty rows) and decoding (one token a row)."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, layout, layer):
        """Map x [B, T, H] to [B, T, H]; writes into the cache, if there is one.

        layout: see Layout. layer: the index of this block in the cache.
        """
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim))  # [B, T, heads, D]
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim))  # [B, T, kv_heads, D]
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        q, k = rotate(q, *layout.angles), rotate(k, *layout.angles)
        if layout.cache is not None:
            # rows [B, 1] and positions [B, T] pick B x T slots: both sides are [2, B, T, kv_heads, D]
            layout.cache.layers[layer][:, layout.rows, layout.positions] = torch.stack([k, v])
        if layout.visible is None:
            out = self.attend(q, k, v)
        else:
            keys, values = layout.cache.layers[layer][:, :, : layout.visible.shape[-1]]
            out = self.decode(q, keys, values, layout.visible)
        return self.o_proj(out.reshape(B, T, -1))

    def attend(self, q, k, v):
        """Attend within whole rows: q [B, T, heads, D] to k and v [B, T, kv_heads, D].

        Each token sees itself and the tokens before it. Rows are right-padded, so this causal mask
        already hides the padding from every real token. Returns the shape of q.
        """
        # NOTE: prefill may use the fresh k and v alone because its rows were empty. is_causal
        # aligns the mask top-left, so with earlier keys in the cache (chunked prefill) it would be
        # silently wrong.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads or kv_heads, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def decode(self, q, k, v, visible):
        """Attend with one token a row: q [B, 1, heads, D] to the slots k and v [B, S, kv_heads, D] that are visible.

        Returns the shape of q.
        """
        B, S, kv_heads, D = k.shape
        # The query heads that share a key head become the "sequence" of that key head,
        # so that keys are never copied per query head.
        q = q.view(B, kv_heads, -1, D)  # [B, kv_heads, heads / kv_heads, D]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, kv_heads, S, D]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).view(B, 1, -1, D)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, layout, layer):
        x = x + self.self_attn(self.input_layernorm(x), layout, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """The decoder. Besides its weights it knows what sampling needs: `stop_ids` and `n_tokens`."""

    def __init__(self, hf_config, stop_ids, n_tokens):
        super().__init__()
        config = model_config(hf_config)
        self.config = config
        self.hf_config = hf_config  # the config.json that it came with; saved again, with the dtype of the weights
        # several: Qwen ends turns with <|im_end|> and documents with <|endoftext|>
        self.stop_ids = sorted(stop_ids)
        self.n_tokens = n_tokens  # ids from here on belong to no token
        self.gradient_checkpointing = False  # recompute the blocks in backward (training only)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def device(self):
        """Where the weights are."""
        return self.embed_tokens.weight.device

    def forward(self, ids, positions):
        """Map whole texts, ids and positions [B, T] int64, to hidden states [B, T, H]."""
        return self.run(ids, Layout(rotary_angles(positions, self.config)))

    def prefill(self, contexts, cache, rows):
        """Run contexts (lists of ids) into these free rows of the cache; the hidden state [B, H] of each end."""
        ids, positions = right_pad(contexts, self.device)
        rows = torch.tensor(rows, device=self.device)[:, None]  # [B, 1]
        hidden = self.run(ids, Layout(rotary_angles(positions, self.config), cache, rows, positions))  # [B, T, H]
        ends = [len(context) - 1 for context in contexts]
        return hidden[range(len(contexts)), ends]

    def decode(self, tokens, positions, cache, seen):
        """Run one token [B] in each row of the cache, at these positions [B] < seen; its hidden state [B, H].

        seen: how many slots attention looks at; those behind a row's position are masked.
        """
        rows, positions = torch.arange(len(tokens), device=self.device)[:, None], positions[:, None]  # [B, 1] each
        visible = torch.arange(seen, device=self.device) <= positions  # [B, S]
        layout = Layout(rotary_angles(positions, self.config), cache, rows, positions, visible[:, None, None])
        return self.run(tokens[:, None], layout)[:, 0]

    def run(self, ids, layout):
        """Map ids [B, T] to hidden states [B, T, H]."""
        recompute = self.gradient_checkpointing and layout.cache is None and torch.is_grad_enabled()
        x = self.embed_tokens(ids)  # [B, T, H]
        for layer, block in enumerate(self.layers):
            x = checkpoint(block, x, layout, layer, use_reentrant=False) if recompute else block(x, layout, layer)
        return self.norm(x)

    def logits(self, hidden, temperature=1.0):
        """Map hidden [N, H] to logits / temperature [N, V] in float32.

        The one place where sampler and scorer get their distribution from. Ids that the tokenizer
        lacks get -inf: padded vocabularies have rows that no text maps to (Qwen: 151,936 rows,
        151,669 tokens), and one sampled by chance would be untrainable garbage.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        # NOTE: the product itself is float32. One in bfloat16 rounds logits to steps of up to 0.125
        # before the softmax.
        logits = F.linear(hidden.float(), head.weight.float()) / temperature
        logits[..., self.n_tokens :] = -math.inf
        return logits


# ---- LoRA: a small trained correction for each linear layer of a frozen model ---------------------

LORA_ALPHA = 32  # the correction is multiplied by LORA_ALPHA / its rank, so that one learning rate suits every rank


class LoraLinear(nn.Module):
    """y = W x + b + (alpha / r) B A x, with W and b frozen and A [r, in], B [out, r] trained (arXiv 2106.09685)."""

    def __init__(self, linear, rank, generator):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # those of the frozen model, not copies
        # uniform within 1 / sqrt(in), as peft draws it
        drawn = 2 * torch.rand(rank, linear.in_features, generator=generator) - 1
        self.lora_A = nn.Parameter((drawn / math.sqrt(linear.in_features)).to(self.weight))
        self.lora_B = nn.Parameter(self.weight.new_zeros(linear.out_features, rank))  # so the start is the frozen model
        self.scale = LORA_ALPHA / rank

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def merged(self):
        """The weight [out, in] that does the same alone, in float32."""
        return self.weight.float() + self.scale * self.lora_B.float() @ self.lora_A.float()


def with_adapter(base, rank, seed=0):
    """A model that shares the frozen weights of `base` and has its own LoRA on all linear layers of the blocks.

    Freezes the base, which stays the model without adapters: it can serve many, and as KL reference.
    """
    base.requires_grad_(False)
    # what is in deepcopy's memo counts as copied already: the weights are shared
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    generator = torch.Generator().manual_seed(seed)
    for block in model.layers:
        for part in (block.self_attn, block.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(part, name, LoraLinear(module, rank, generator))
    return model


def adapters(model):
    """name -> LoraLinear of a model; none where it has no adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


# ---- Sampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """What the model wrote after one context."""

    ids: list[int]  # sampled ids, the terminator included
    logprobs: list[float]  # of each id, at the sampling temperature, as the sampler saw it
    truncated: bool  # the limit came before a terminator


def cache_room(device):
    """Bytes that the cache may take by default: most of what is free now on a GPU, and 4 GiB on a CPU."""
    if torch.device(device).type != "cuda":
        return 4 << 30
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(0.8 * (free + unused))  # the rest is for activations and for moving rows


def sample(model, contexts, uniforms, max_new_tokens, temperature=1.0, **limits):
    """Sample one completion for each context: sample_as_they_end(), in the order of the contexts."""
    completions = dict(sample_as_they_end(model, contexts, uniforms, max_new_tokens, temperature, **limits))
    return [completions[i] for i in range(len(contexts))]


def sample_as_they_end(
    model, contexts, uniforms, max_new_tokens, temperature=1.0, rows=256, cache_bytes=0, prefill_budget=16_384
):
    """Sample one completion for each of B contexts from softmax(logits / temperature); yields (index, Completion).

    contexts: B lists of ids, none empty.
    uniforms: [B, >= max_new_tokens] float64 in [0, 1); row b decides the tokens of completion b,
    see draw().
    temperature: 0 means greedy (log-probabilities are then those of temperature 1).
    rows: how many contexts are worked on at once, at most.
    cache_bytes: how large the cache may get, 0: see cache_room(). At least one context is worked on,
    whatever its size.
    prefill_budget: how many padded tokens are prefilled at a time, which bounds the memory of activations.

    A context that ends hands its place to the next one that waits. Neither the order nor the company
    of a context changes its tokens, for each is decided by its own uniform number.
    """
    cache_bytes = cache_bytes or cache_room(model.device)
    batch = Batch(model, uniforms, max_new_tokens, temperature, rows, cache_bytes, prefill_budget)
    waiting = deque(Sequence(i, list(context), len(context)) for i, context in enumerate(contexts))
    while waiting or batch.live():
        with torch.inference_mode():  # NOTE: not around the generator, or its caller would be in that mode too
            batch.admit(waiting)
            batch.draw_next()
            ended = batch.collect() if batch.is_time_to_collect() else []
            batch.advance(waiting)
        for sequence in ended:
            truncated = sequence.ids[-1] not in model.stop_ids
            yield sequence.index, Completion(sequence.ids[sequence.n_context :], sequence.logprobs, truncated)


@dataclass(eq=False)  # `in` and remove() go by identity
class Sequence:
    """A context that is worked on, or that waits, and what has been drawn after it."""

    index: int  # among the contexts
    ids: list  # of the context, and those drawn so far
    n_context: int  # length of the context
    logprobs: list = field(default_factory=list)  # of the ids that were drawn


class Batch:
    """The contexts that sample_as_they_end() works on at the moment. Each has a row of the cache."""

    def __init__(self, model, uniforms, max_new_tokens, temperature, most_rows, cache_bytes, prefill_budget):
        self.model = model
        self.greedy = temperature == 0
        self.temperature = 1.0 if self.greedy else temperature
        self.max_new_tokens = max_new_tokens
        self.most_rows, self.cache_bytes, self.prefill_budget = most_rows, cache_bytes, prefill_budget
        # A GPU wants shapes that seldom change, for its kernels may plan anew for each, and few moments
        # at which the host waits for it. On a CPU neither matters.
        on_gpu = model.device.type == "cuda"
        self.slot_step = 256 if on_gpu else 32
        self.collect_every = 8 if on_gpu else 1  # draws from one collect() to the next
        self.uniforms = torch.as_tensor(np.asarray(uniforms), dtype=torch.float64, device=model.device)
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(model.config, model.device, dtype)
        self.at = []  # row -> its Sequence, or None where it is free
        self.tokens = None  # [rows]: the ids that were drawn last
        self.hidden = torch.zeros(0, model.config.hidden_size, device=model.device, dtype=dtype)  # [rows, H]
        self.drawn = []  # since the last collect(): pairs of ids and their log-probabilities, [rows] each

    def live(self):
        """The Sequences that are worked on, in order of their rows."""
        return [sequence for sequence in self.at if sequence is not None]

    def slots_for(self, sequences):
        """How many slots the longest of these Sequences needs until the next collect(), rounded up."""
        longest = max((len(sequence.ids) for sequence in sequences), default=0) + self.collect_every
        return math.ceil(longest / self.slot_step) * self.slot_step

    def fits(self, n_rows, slots):
        """May the cache have so many rows and slots?"""
        return n_rows <= self.most_rows and n_rows * slots * self.cache.bytes_a_slot <= self.cache_bytes

    def admit(self, waiting):
        """Give rows to waiting Sequences, the first ones first, as long as there is room; and prefill them."""
        if self.drawn:
            return  # rows become free in collect() only
        live = self.live()
        new = []
        while waiting:
            together = [*live, *new, waiting[0]]
            if len(together) > 1 and not self.fits(len(together), self.slots_for(together)):
                break
            new.append(waiting.popleft())
        if not new:
            return
        slots = self.slots_for([*live, *new])
        if len(new) > self.at.count(None) or slots > self.cache.slots:
            self.rearrange(live, len(live) + len(new), slots)
        rows = [row for row, sequence in enumerate(self.at) if sequence is None][: len(new)]
        for row, sequence in zip(rows, new, strict=True):
            self.at[row] = sequence
        self.fill(rows)

    def rearrange(self, kept, n_rows, slots):
        """Make a cache of these sizes, with the Sequences `kept` at its first rows; returns their former rows."""
        rows = [row for row, sequence in enumerate(self.at) if sequence in kept]
        self.cache.resize(rows, n_rows, slots)
        hidden = self.hidden.new_zeros(n_rows, self.hidden.shape[1])
        hidden[: len(rows)] = self.hidden[rows]
        self.hidden = hidden
        self.at = [self.at[row] for row in rows] + [None] * (n_rows - len(rows))
        return rows

    def fill(self, rows):
        """Run the ids of the Sequences at these rows through the model, equal ones once, the longest first."""
        first = {}  # ids -> the row that they are run at
        for row in sorted(rows, key=lambda row: -len(self.at[row].ids)):
            first.setdefault(tuple(self.at[row].ids), row)
        todo = list(first.items())
        while todo:
            count = max(1, self.prefill_budget // len(todo[0][0]))
            contexts, theirs = zip(*todo[:count], strict=True)
            self.hidden[list(theirs)] = self.model.prefill(contexts, self.cache, theirs)
            todo = todo[count:]
        for row in rows:
            source = first[tuple(self.at[row].ids)]
            if source != row:
                self.cache.copy_row(source, row)
                self.hidden[row] = self.hidden[source]

    def draw_next(self):
        """Draw the next token of every row, a free one too: its token is looked at by nobody."""
        logits = self.model.logits(self.hidden, self.temperature)  # [rows, V]
        indices = [0 if sequence is None else sequence.index for sequence in self.at]
        counts = [0 if sequence is None else self.count(sequence) for sequence in self.at]
        self.tokens = logits.argmax(-1) if self.greedy else draw(logits, self.uniforms[indices, counts])
        logprobs = logits.log_softmax(-1).gather(-1, self.tokens[:, None])[:, 0]
        self.drawn.append((self.tokens, logprobs))

    def count(self, sequence):
        """How many tokens have been drawn for a Sequence."""
        return len(sequence.logprobs) + len(self.drawn)

    def is_time_to_collect(self):
        """Have enough tokens been drawn since the last collect(), or is a Sequence at its limit?"""
        at_limit = any(self.count(sequence) == self.max_new_tokens for sequence in self.live())
        return at_limit or len(self.drawn) == self.collect_every

    def collect(self):
        """Write down what was drawn; the Sequences that have ended. Their rows are free from here on."""
        ended = []
        # [rows][draws] each
        tokens, logprobs = (torch.stack(parts, 1).tolist() for parts in zip(*self.drawn, strict=True))
        self.drawn = []
        for row, sequence in enumerate(self.at):
            if sequence is None:
                continue
            for token, logprob in zip(tokens[row], logprobs[row], strict=True):
                sequence.ids.append(token)
                sequence.logprobs.append(logprob)
                if token in self.model.stop_ids:
                    break  # what was drawn after it counts for nothing
            if sequence.ids[-1] in self.model.stop_ids or len(sequence.logprobs) == self.max_new_tokens:
                ended.append(sequence)
                self.at[row] = None
        return ended

    def advance(self, waiting):
        """Run the tokens drawn last through the model, each at the next position of its row."""
        if not self.live():
            return
        if not self.drawn:
            self.make_room(waiting)
        positions = [0 if sequence is None else len(sequence.ids) + len(self.drawn) - 1 for sequence in self.at]
        positions = torch.tensor(positions, device=self.model.device)
        self.hidden = self.model.decode(self.tokens, positions, self.cache, self.slots_for(self.live()))

    def make_room(self, waiting):
        """Let the cache grow with its longest Sequence, and shrink when many rows are free.

        Where growing would be over the budget, the Sequences with the fewest tokens step back. They wait,
        and go on later by prefilling what they have.
        """
        live = self.live()
        slots = self.slots_for(live)
        is_sparse = not waiting and 4 * len(live) <= 3 * len(self.at)
        if slots <= self.cache.slots and not is_sparse:
            return
        while len(live) > 1 and not self.fits(len(live), slots):
            youngest = min(live, key=lambda sequence: len(sequence.logprobs))
            live.remove(youngest)
            waiting.appendleft(youngest)
            slots = self.slots_for(live)
        self.tokens = self.tokens[self.rearrange(live, len(live), slots)]


def draw(logits, uniforms):
    """Draw ids [B] from logits [B, V] with uniform numbers [B], by inverse-CDF sampling.

    The id drawn is the first whose cumulative probability exceeds u. One uniform number decides one
    token, so the same number gives the same token in any batch.

    >>> probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2]]).repeat(4, 1)
    >>> draw(probabilities.log(), torch.tensor([0.0, 0.49, 0.51, 0.81], dtype=torch.float64)).tolist()
    [1, 1, 3, 4]
    """
    # float64: over 150,000 ids a float32 running sum loses the tail
    cdf = logits.double().softmax(-1).cumsum(-1)  # [B, V]
    target = uniforms[:, None] * cdf[:, -1:]  # [B, 1]
    # right=True: strictly greater, so an id of probability zero is never drawn, not even at u = 0
    # clamp: without it a row of nan would give V, which is no id
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def right_pad(sequences, device):
    """Turn lists of ids into ids and positions [B, T], T being the length of the longest.

    The padding is id 0. Nothing looks at it, see Attention.attend.
    """
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in sequences], batch_first=True).to(device)
    return ids, torch.arange(ids.shape[1], device=device).expand_as(ids)


# ---- Scoring -------------------------------------------------------------------------------------


# Up to this many logits (64 MiB) are kept for backward. More are made again by checkpoint(), whose
# first use imports torch's compiler: seconds that a small model need not wait.
FEW_LOGITS = 1 << 24


def token_logprobs(model, contexts, completions, temperature=1.0, chunk=1024):
    """Compute log pi(y_t | context, y_<t) of every completion token, at the temperature of sampling.

    contexts, completions: B lists of ids, none empty. Returns two float32 tensors [N], N = all
    completion tokens, row after row: the log-probabilities (differentiable) and the entropies in
    nats (not).

    The logits are made for `chunk` tokens at a time, and made again in backward unless they are few:
    [N, V] in float32 never exists (for 16,384 tokens of Qwen it would take 10 GB, twice).
    """
    if not contexts:
        return torch.zeros(0, device=model.device), torch.zeros(0, device=model.device)

    # hidden states of the whole texts, but for the last token, which predicts nothing that we need
    texts = [context + completion[:-1] for context, completion in zip(contexts, completions, strict=True)]
    hidden = model(*right_pad(texts, model.device))  # [B, T, H]

    # y_t is predicted at the position before it: y_1 at the context's last token, and so on
    rows = zip(hidden, contexts, texts, strict=True)
    hidden = torch.cat([row[len(context) - 1 : len(text)] for row, context, text in rows])  # [N, H]
    tokens = [token for completion in completions for token in completion]
    targets = torch.tensor(tokens, device=model.device)  # [N]

    # the head, one chunk of tokens at a time
    chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    if torch.is_grad_enabled() and len(tokens) * model.config.vocab_size > FEW_LOGITS:
        scored = [checkpoint(score_chunk, model, *part, temperature, use_reentrant=False) for part in chunks]
    else:
        scored = [score_chunk(model, *part, temperature) for part in chunks]
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def score_chunk(model, hidden, targets, temperature):
    """Return the log-probabilities [n] of targets [n] after hidden [n, H], and (without gradient) the entropies [n]."""
    logprobs = model.logits(hidden, temperature).log_softmax(-1)  # [n, V]
    entropies = torch.special.entr(logprobs.detach().exp()).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


# ---- Hugging Face folders, in and out ------------------------------------------------------------

# The chat template of base models, whose folders have none.
PLAIN_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)


def load(path, device="cpu", dtype=torch.float32, positions=0, bases=None):
    """Load (model, tokenizer) from a Hugging Face folder or an adapter folder, or from a hub id, which is downloaded.

    positions: how long contexts and completions together may get; a model that is made for fewer is
    refused.
    bases: path -> (model, tokenizer) of bases that are loaded already; adapters share them.
    Raises InputError when the folder or a file is missing, when the architecture is not supported,
    when a tensor is missing, left over or of the wrong shape, or when there are too few positions.
    """
    if not os.path.exists(os.path.join(path, "adapter_config.json")):
        return load_whole(path, device, dtype, positions)
    bases = {} if bases is None else bases
    base_path = read_json(path, "adapter_config.json").get("base_model_name_or_path")
    require(isinstance(base_path, str) and base_path, f"{path}: its adapter_config.json names no base model")
    if base_path not in bases:
        bases[base_path] = load_whole(base_path, device, dtype, positions)
    base, tokenizer = bases[base_path]
    return load_adapter(path, base), tokenizer


def load_whole(path, device, dtype, positions):
    """load() of what is no adapter."""
    # config, first of all: it says what is unsupported before the slow parts
    folder = path if os.path.isdir(path) else download(path)
    hf_config = read_json(folder, "config.json")
    most = model_config(hf_config).max_positions
    limits = f"--max-context-tokens and --max-new-tokens allow {positions}"
    require(positions <= most, f"{path} is made for {most} positions, {limits}: lower them")

    # tokenizer and stop ids
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT
    last_id, rows = max(tokenizer.get_vocab().values()), hf_config["vocab_size"]
    require(last_id < rows, f"{path}: its tokenizer has ids up to {last_id}, its embedding has {rows} rows")
    stop_ids = read_stop_ids(folder, hf_config, tokenizer)

    # skeleton: the modules without memory for their weights
    with torch.device("meta"):
        model = Transformer(hf_config, stop_ids, last_id + 1)

    # weights: one tensor at a time is converted and its original released
    state = match_weights(model, read_weights(folder), folder)
    for name in state:
        state[name] = state[name].to(device, dtype)
    model.load_state_dict(state, assign=True)
    return model, tokenizer


def load_tokenizer(folder):
    """Load the tokenizer of a Hugging Face folder. Raises InputError where there is none, or a broken one."""
    from transformers import AutoTokenizer  # here: it takes seconds, and not all commands need it

    # NOTE: without its files some tokenizer classes load all the same, and know no token
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    found = any(os.path.exists(os.path.join(folder, name)) for name in files)
    require(found, f"{folder} has no tokenizer (none of {', '.join(files)})")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many types, by the kind of tokenizer
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"the tokenizer of {folder} cannot be read: {reason}") from None


def download(name):
    """Return the local folder of a model on the Hugging Face hub, after downloading what is missing."""
    from huggingface_hub import snapshot_download

    if name.startswith((".", "/")) or name.count("/") != 1:
        raise InputError(f"{name} is neither a model folder nor a hub id like Qwen/Qwen3-4B")
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
    except Exception as error:  # of dozens of types; all mean that there is no model to go on with
        reason = str(error).splitlines()[0]
        raise InputError(f"{name} is no folder and cannot be downloaded: {reason}") from None


def read_stop_ids(folder, hf_config, tokenizer):
    """Return the ids that end a completion: those of generation_config.json, else config.json, and the tokenizer's.

    And the one with which the chat template ends a reply: a model that was tuned on it writes nothing
    else, and the files of some say otherwise.
    """
    generation = read_json(folder, "generation_config.json", default={})
    named = generation.get("eos_token_id", hf_config.get("eos_token_id"))  # an id, a list or None
    named = named if isinstance(named, list) else [named]
    wrong = [i for i in named if not isinstance(i, int | None)]
    require(not wrong, f"{folder}: eos_token_id must be an id, or a list of ids, not {wrong[:1]}")
    stop_ids = {*named, tokenizer.eos_token_id} - {None}
    require(stop_ids, f"{folder} names no end-of-sequence token")
    end = turn_end(tokenizer)
    if end is not None and end not in stop_ids:
        token = tokenizer.convert_ids_to_tokens(end)
        print(
            f"{folder}: replies end with {token} in its chat template, so that stops a completion too", file=sys.stderr
        )
        stop_ids.add(end)
    return stop_ids


def read_weights(folder):
    """Return {name: tensor} of a folder's safetensors, from one file or from several with an index.

    As transformers does it: an index beside model.safetensors is left over from another save.
    """
    single = os.path.exists(os.path.join(folder, "model.safetensors"))
    index = {} if single else read_json(folder, "model.safetensors.index.json", default={})
    files = index.get("weight_map", {})
    require(not index or (isinstance(files, dict) and files), f"{folder}: its index of weights names no file")
    names = set(files.values()) if index else {"model.safetensors"}
    weights = {}
    for name in sorted(names):
        weights |= read_safetensors(os.path.join(folder, name))
    return weights


def read_safetensors(path):
    """The {name: tensor} of a file. Raises InputError where it is missing or damaged."""
    require(os.path.exists(path), f"{os.path.dirname(path)} has no {os.path.basename(path)}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None


def match_weights(model, weights, folder):
    """Return {our name: tensor} for all parameters of the model, out of the {name: tensor} of a file.

    Raises InputError when a tensor is missing, of the wrong shape or left over:
    a model that skipped one would load and talk nonsense.
    """
    # two things that some files hold although they follow from the rest
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if model.config.tied and "lm_head.weight" in weights:
        head, embedding = weights.pop("lm_head.weight"), weights.get("model.embed_tokens.weight")
        same = embedding is None or torch.equal(head, embedding)
        require(same, f"{folder}: its config ties the output head to the embedding, but the stored head is another one")

    # every parameter has its tensor
    state = {}
    for name, parameter in model.named_parameters():
        theirs, expected = hf_name(name), list(parameter.shape)
        require(theirs in weights, f"{folder}: {theirs} is missing; it should have shape {expected}")
        state[name] = weights.pop(theirs)
        floats = state[name].dtype in (torch.float32, torch.bfloat16, torch.float16)
        require(floats, f"{folder}: {theirs} is {state[name].dtype}: quantized weights are not implemented")
        found = list(state[name].shape)
        require(found == expected, f"{folder}: {theirs} is of shape {found}; it should have shape {expected}")

    # every tensor had its parameter
    example = min(weights, default=None)
    require(not weights, f"{folder} has {len(weights)} tensors that this architecture lacks, such as {example}")
    return state


def hf_name(name):
    """Return the name that one of our parameters has in a Hugging Face file.

    >>> hf_name("layers.0.mlp.up_proj.weight"), hf_name("lm_head.weight")
    ('model.layers.0.mlp.up_proj.weight', 'lm_head.weight')
    """
    return name if name.startswith("lm_head") else "model." + name


def compute_dtype(device):
    """Return the dtype of weights for sampling and scoring: bfloat16 on a GPU, else float32."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def save(model, tokenizer, path):
    """Write a Hugging Face folder, which load(), transformers and vLLM open. An adapter is merged into the weights."""
    # weights
    os.makedirs(path, exist_ok=True)
    tensors = {name: p.detach() for name, p in model.named_parameters() if "lora_" not in name}
    tensors |= {f"{name}.weight": module.merged().to(module.weight.dtype) for name, module in adapters(model).items()}
    tensors = {hf_name(name): tensor.cpu().clone() for name, tensor in tensors.items()}
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})

    # tokenizer, under a class name that transformers 4 knows as well
    tokenizer.save_pretrained(path)
    settings = read_json(path, "tokenizer_config.json")
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(path, "tokenizer_config.json", settings)

    # config, with the dtype of the weights (transformers 5 writes "dtype", but reads this one too)
    hf_config = {name: value for name, value in model.hf_config.items() if name not in ("dtype", "torch_dtype")}
    hf_config["torch_dtype"] = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    write_json(path, "config.json", hf_config)
    write_json(path, "generation_config.json", {"eos_token_id": model.stop_ids})


def save_adapter(model, base, path):
    """Write the adapter of a model as peft does; base: folder or hub id of the frozen model."""
    os.makedirs(path, exist_ok=True)
    found = adapters(model)
    tensors = {name: parameter.detach().cpu().clone() for name, parameter in adapter_parameters(model).items()}
    save_file(tensors, os.path.join(path, "adapter_model.safetensors"), metadata={"format": "pt"})
    settings = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True)
    settings |= dict(r=len(next(iter(found.values())).lora_A), lora_alpha=LORA_ALPHA, lora_dropout=0.0, bias="none")
    settings |= dict(target_modules=sorted({name.rpartition(".")[2] for name in found}), fan_in_fan_out=False)
    write_json(path, "adapter_config.json", settings)


def adapter_parameters(model):
    """peft's name -> parameter, of the adapter in a model."""
    return {f"base_model.model.model.{name}.weight": p for name, p in model.named_parameters() if "lora_" in name}


def load_adapter(path, base):
    """The model of an adapter folder over its loaded base. Raises InputError where they do not fit each other."""
    settings = read_json(path, "adapter_config.json", what="adapter folder")
    known = settings.get("peft_type") == "LORA" and settings.get("lora_alpha") == LORA_ALPHA
    require(known and isinstance(settings.get("r"), int), f"{path} is no LoRA adapter of ours (alpha {LORA_ALPHA})")
    others = ("use_rslora", "use_dora", "alpha_pattern", "rank_pattern", "modules_to_save")
    used = [name for name in others if settings.get(name)]
    require(not used, f"{path}: the adapter uses {', '.join(used)}, which model.py does not implement")
    model = with_adapter(base, settings["r"])
    tensors = read_safetensors(os.path.join(path, "adapter_model.safetensors"))
    for name, own in adapter_parameters(model).items():
        theirs = tensors.pop(name, None)
        fits = theirs is not None and theirs.shape == own.shape
        require(fits, f"{path}: {name} is missing, or of another shape than {list(own.shape)}")
        own.data.copy_(theirs)
    require(not tensors, f"{path} has {len(tensors)} tensors that this model lacks, such as {min(tensors, default='')}")
    return model


def write_json(folder, name, content):
    """Write a JSON file into a folder."""
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


# ---- The embedded model of the miniature pipelines -----------------------------------------------

TINY_CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(pieces):
    """Make a tokenizer whose tokens are the given pieces of text.

    The longest piece that fits is taken first; text that no piece fits becomes <unk>.

    >>> tokenizer = tiny_tokenizer(["Tom", " has", " ", "1", "2", "print(", ")"])
    >>> tokenizer.convert_ids_to_tokens(tokenizer("Tom has 12 cows")["input_ids"])
    ['Tom', ' has', ' ', '1', '2', ' ', '<unk>']
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # each piece is one id; the special tokens come first
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = ["<|pad|>", "<|end|>", *roles, "<unk>", *pieces]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))

    # text is cut at the pieces, the longest first: a regular expression takes the first alternative
    # that fits
    pattern = "|".join(re.escape(piece) for piece in sorted(pieces, key=len, reverse=True))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words.decoder = decoders.Fuse()

    # what transformers must know of it
    special = dict(pad_token="<|pad|>", eos_token="<|end|>", unk_token="<unk>", additional_special_tokens=roles)
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TINY_CHAT, **special)


def tiny(pieces, seed=0, hidden_size=64, layers=3, heads=4, kv_heads=2):
    """Make an untrained (model, tokenizer) in Qwen3's layout for a vocabulary of text pieces: about 0.15M weights."""
    tokenizer = tiny_tokenizer(pieces)
    hf_config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=len(tokenizer))
    hf_config |= dict(hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers)
    hf_config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden_size // heads)
    hf_config |= dict(max_position_embeddings=1024, rms_norm_eps=1e-6, rope_theta=100.0)
    hf_config |= dict(tie_word_embeddings=True, hidden_act="silu", attention_bias=False)
    hf_config |= dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = Transformer(hf_config, {tokenizer.eos_token_id}, len(tokenizer))

    # matrices are drawn from a generator of their own; the norms stay at 1
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    return model, tokenizer


def main(argv):
    """python model.py merge ADAPTER OUT: write a whole Hugging Face folder out of an adapter and its base."""
    if len(argv) != 3 or argv[0] != "merge":
        print(main.__doc__, file=sys.stderr)
        return 2
    try:
        model, tokenizer = load(argv[1])
    except InputError as error:
        print(f"model.py: {error}", file=sys.stderr)
        return 2
    save(model, tokenizer, argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
