"""model.py: the language model, its KV-cached sampler and its scorer, written out in plain PyTorch.

One decoder family covers Qwen2/Qwen2.5, Qwen3, Llama and what shares their layout (SmolLM2, DeepSeek-R1-Distill):
RMSNorm, rotary positions, grouped-query attention (optional QKV bias or QK-norm), SwiGLU, tied or untied head.
For MAPPA it provides the two sides of the importance ratio rho_t = pi_theta(y_t) / pi_old(y_t):

    sample()          draws y_1..y_T and returns log pi_old(y_t)
    token_logprobs()  computes log pi_theta(y_t) for the same ids, with gradients

Both go through `Transformer.logits`, so they cannot disagree about masking, temperature or precision.
What we leave out: dropout, sliding windows, mixtures of experts, tensor parallelism, and every sampling trick
(top-k, top-p, repetition penalties, forced tokens): the trainer scores the plain softmax, so the sampler must draw
from the plain softmax too.
Compare a model of yours with transformers:  MAPPA_TEST_MODEL=FOLDER pytest tests/test_real_model.py"""
import json, math, os, re
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from agents import InputError, read_json, require

# ---- Configuration: Hugging Face's config.json is the truth; these are the fields of it that the code below reads ----
@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's size (padded vocabularies)
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int  # grouped-query attention: heads // kv_heads query heads share one key/value head
    head_dim: int  # not always hidden_size / heads
    norm_eps: float
    max_positions: int
    rope: dict  # rope_theta, and where positions are scaled: rope_type, factor, ...
    tied: bool  # the output head is the embedding matrix
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3

def model_config(hf):
    """Translate the dict of a Hugging Face config.json into a ModelConfig. Raises InputError for an architecture or an
    option that this file does not implement: to ignore one would give a model that runs and is subtly wrong."""
    kind = hf.get("model_type")
    known = kind in ("qwen2", "qwen3", "llama")
    require(known, f"model type {kind!r} is not supported; known are qwen2, qwen3 and llama")
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling, with "type" for "rope_type"
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)} | (hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope = {"rope_type": rope.get("type", "default")} | rope
    unsupported = [name for name in ("attention_bias", "mlp_bias", "use_sliding_window") if hf.get(name)]
    unsupported += [f"rope scaling {rope['rope_type']}"] if rope["rope_type"] not in ROPE_TYPES else []
    unsupported += [f"the rope option {name}" for name in ("mscale", "mscale_all_dim", "truncate") if name in rope]
    unsupported += [hf["hidden_act"]] if hf.get("hidden_act", "silu") != "silu" else []
    require(not unsupported, f"this {kind} model uses {', '.join(unsupported)}, which model.py does not implement")
    heads = hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"], hidden_size=hf["hidden_size"], intermediate_size=hf["intermediate_size"],
        layers=hf["num_hidden_layers"], heads=heads, kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads, norm_eps=hf.get("rms_norm_eps", 1e-6),
        max_positions=hf.get("max_position_embeddings", 32_768), rope=rope, tied=hf.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")

# ---- The decoder. Attribute names are Hugging Face's, so that weights need no key map --------------------------------
class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps), computed in float32 whatever x is."""
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

def rotary_periods(c, device):
    """Positions for one radian, of each pair of dimensions [D/2] in float32: theta^(2i/D) unless positions are scaled;
    and a factor on cos and sin. Scaled: a context `factor` times as long is fitted into the angles of the original one,
    by slowing down all pairs (linear), or only those that turn seldom in it (llama3; yarn, arXiv 2309.00071)."""
    D, rope, factor = c.head_dim, c.rope, c.rope.get("factor", 1.0)
    period = rope["rope_theta"] ** (torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    context = rope.get("original_max_position_embeddings") or c.max_positions
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]  # turns within the original context
        kept = ((context / (2 * math.pi * period) - low) / (high - low)).clamp(0, 1)
        return period / (kept + (1 - kept) / factor), 1.0
    if rope["rope_type"] == "yarn":
        fast, slow = (D * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))  # such a pair
                      for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1))
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), D - 1)
        kept = 1 - ((torch.arange(D // 2, device=device) - first) / max(last - first, 0.001)).clamp(0, 1)
        return period / (kept + (1 - kept) / factor), rope.get("attention_factor") or 0.1 * math.log(factor) + 1
    return period * factor, 1.0  # linear, or no scaling: factor 1

def rotary_angles(positions, c):
    """cos and sin [B, T, 1, D] in float32 for explicit positions [B, T]."""
    period, scale = rotary_periods(c, positions.device)
    angles = positions[..., None].float() / period  # [B, T, D/2]
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]  # [B, T, 1, D]; halves, not pairs, as in HF's layout
    return angles.cos() * scale, angles.sin() * scale

def rotate(x, cos, sin):
    """Turn queries or keys x [B, T, heads, D] by their positions' angles."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

class KVCache:
    """Keys and values of the tokens seen so far, one pair of tensors [B, slots, kv_heads, D] a layer.
    NOTE: a token's slot IS its position. Ragged prompts therefore need no left padding: each row fills its own slots
    0..length-1, what a padded prefill wrote beyond is overwritten when the row gets there, and a query at position p
    looks at exactly the slots <= p. A cache lives inside one call of sample(): none survives an update of weights."""
    def __init__(self, config, rows, slots, like):
        shape = (rows, slots, config.kv_heads, config.head_dim)
        self.k = [like.new_zeros(shape) for _ in range(config.layers)]
        self.v = [like.new_zeros(shape) for _ in range(config.layers)]
        self.first = 0  # the row that the first row of the next batch belongs to
        self.used = 0  # slots from this one on are empty in every row

    def keep(self, rows):
        """Drop all rows but these (index tensor), one layer at a time to bound the extra memory."""
        for layer in range(len(self.k)): self.k[layer], self.v[layer] = self.k[layer][rows], self.v[layer][rows]

    def write(self, layer, positions, k, v):
        """Store k and v [B, T, kv_heads, D] at positions [B, T]; returns all used slots of these B rows."""
        rows = torch.arange(self.first, self.first + len(k), device=k.device)[:, None]
        self.k[layer][rows, positions], self.v[layer][rows, positions] = k, v
        part = slice(self.first, self.first + len(k)), slice(self.used)
        return self.k[layer][part], self.v[layer][part]

class Attention(nn.Module):
    """Grouped-query attention with three uses: training, prefill (fills an empty cache) and decoding (one token)."""
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x, angles, positions, cache, layer):
        """x [B, T, H], angles of rotary_angles, positions [B, T] -> [B, T, H]; writes the cache, if there is one."""
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(B, T, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim)
        q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None: cached_k, cached_v = cache.write(layer, positions, k, v)
        if cache is not None and T == 1: out = self.decode(q, cached_k, cached_v, positions)
        else:
            # Rows are right-padded: a causal mask already hides the padding from every real token.
            # NOTE: prefill may use the fresh k and v alone because its cache was empty. is_causal aligns the mask
            # top-left, so with earlier keys in the cache (chunked prefill) it would be silently wrong.
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.o_proj(out.reshape(B, T, -1))

    def decode(self, q, k, v, positions):
        """One query token a row, q [B, 1, heads, D], against the cache's k, v [B, S, kv_heads, D]."""
        B, S = k.shape[:2]
        # the query heads that share a key head become that head's "sequence", so keys are never copied per query head
        q = q.view(B, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        visible = torch.arange(S, device=k.device) <= positions  # [B, S]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, kv_heads, S, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
        return out.view(B, 1, self.heads, self.head_dim)

class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP."""
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, angles, positions, cache, layer):
        x = x + self.self_attn(self.input_layernorm(x), angles, positions, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))

class Transformer(nn.Module):
    """The decoder. Besides the weights it knows what sampling needs: `stop_ids` and `n_tokens` (tokenizer size)."""
    def __init__(self, hf, stop_ids, n_tokens):
        super().__init__()
        self.hf = hf  # the config.json it came with, saved again unchanged
        self.config = c = model_config(hf)
        self.stop_ids = sorted(stop_ids)  # a set: Qwen ends turns with <|im_end|> and documents with <|endoftext|>
        self.n_tokens = n_tokens
        self.gradient_checkpointing = False  # recompute the blocks in backward; touches training only
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(c.vocab_size, c.hidden_size), freeze=False)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = None if c.tied else nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    @property
    def device(self):
        return self.embed_tokens.weight.device

    def forward(self, ids, positions, cache=None):
        """ids, positions [B, T] int64 -> hidden states [B, T, H]. With a cache, T > 1 requires it to be empty."""
        x = self.embed_tokens(ids)
        angles = rotary_angles(positions, self.config)
        for i, block in enumerate(self.layers):
            if self.gradient_checkpointing and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, angles, positions, None, i, use_reentrant=False)
            else: x = block(x, angles, positions, cache, i)
        return self.norm(x)

    def logits(self, hidden, temperature=1.0):
        """hidden [N, H] -> logits / temperature [N, V] in float32; ids that the tokenizer lacks get -inf.
        The one place where sampler and scorer get their distribution from. Padded vocabularies have rows that no text
        maps to (Qwen: 151,936 rows, 151,669 tokens); one sampled by chance would be untrainable garbage."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(hidden, weight).float() / temperature
        if self.n_tokens < self.config.vocab_size:
            beyond = torch.arange(self.config.vocab_size, device=logits.device) >= self.n_tokens
            logits = logits.masked_fill(beyond, -math.inf)
        return logits

# ---- Sampling --------------------------------------------------------------------------------------------------------
@dataclass
class Completion:
    ids: list  # sampled ids, the terminator included
    logprobs: list  # log pi_old of each, at the sampling temperature
    truncated: bool  # the limit came before a terminator

def draw(logits, uniforms):
    """Inverse-CDF sampling: the first id whose cumulated probability exceeds u. logits [B, V], uniforms [B].
    One uniform number decides one token, so the same number gives the same token in any batch.
    >>> probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2]]).repeat(4, 1)
    >>> draw(probabilities.log(), torch.tensor([0.0, 0.49, 0.51, 0.81], dtype=torch.float64)).tolist()
    [1, 1, 3, 4]"""
    # float64: over 150,000 ids a float32 running sum loses the tail
    cdf = logits.double().softmax(-1).cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    # right=True: strictly greater, so an id of probability zero is never drawn, not even at u = 0
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)

def prefill(model, contexts, cache, budget):
    """Run the contexts through the model, into the cache; returns the last real token's hidden state of each [B, H].
    Rows are taken a few at a time, at most `budget` padded tokens, to bound the memory that activations take."""
    step, last = max(1, budget // max(map(len, contexts))), []
    for start in range(0, len(contexts), step):
        part = contexts[start : start + step]
        ids, positions = right_pad(part, model.device)
        cache.first = start
        hidden = model(ids, positions, cache)  # [b, T, H]
        ends = torch.tensor([len(c) - 1 for c in part], device=model.device)
        last.append(hidden[torch.arange(len(part), device=model.device), ends])
    cache.first = 0
    return torch.cat(last)

def right_pad(sequences, device):
    """Lists of ids -> ids and positions [B, longest]. The padding is id 0: nothing looks at it, see Attention."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in enumerate(sequences): ids[row, : len(sequence)] = torch.tensor(sequence)
    ids = ids.to(device)
    return ids, torch.arange(ids.shape[1], device=device).expand_as(ids)

@torch.no_grad()
def sample(model, contexts, uniforms, max_new_tokens, temperature=1.0, prefill_budget=16_384):
    """Sample one completion for each of B contexts (lists of ids, none empty) from softmax(logits / temperature).
    uniforms: [B, >= max_new_tokens] float64 in [0, 1), row b deciding the tokens of completion b (see draw).
    temperature: 0 means greedy (log-probabilities are then those of temperature 1).
    Returns B Completions in the order of the contexts. A row leaves the batch as soon as it draws a stop id. Neither
    the order nor the company of a row changes its tokens."""
    if not contexts: return []
    device, scale = model.device, temperature or 1.0
    lengths = torch.tensor([len(c) for c in contexts], device=device)
    longest = int(lengths.max())
    stop = torch.tensor(model.stop_ids, device=device)
    uniforms = torch.as_tensor(np.asarray(uniforms), dtype=torch.float64, device=device)
    ids = torch.zeros(len(contexts), max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(len(contexts), max_new_tokens, device=device)
    counts = torch.full((len(contexts),), max_new_tokens, device=device)
    stopped = torch.zeros(len(contexts), dtype=torch.bool, device=device)
    cache = KVCache(model.config, len(contexts), longest + max_new_tokens, like=model.embed_tokens.weight)
    cache.used = longest
    live = torch.arange(len(contexts), device=device)  # rows still in the batch, as indices into contexts
    hidden = prefill(model, contexts, cache, prefill_budget)  # [B, H]
    for t in range(max_new_tokens):
        logits = model.logits(hidden, scale)  # [live, V]
        token = draw(logits, uniforms[live, t]) if temperature else logits.argmax(-1)  # [live]
        ids[live, t] = token
        logprobs[live, t] = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
        ended = torch.isin(token, stop)
        if ended.any():
            stopped[live[ended]] = True
            counts[live[ended]] = t + 1
            going = (~ended).nonzero()[:, 0]
            live, token = live[going], token[going]
            cache.keep(going)
        if len(live) == 0 or t + 1 == max_new_tokens: break
        cache.used = longest + t + 1
        hidden = model(token[:, None], (lengths[live] + t)[:, None], cache)[:, 0]
    rows = zip(ids.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist())
    return [Completion(row[:n], logprob[:n], not end) for row, logprob, n, end in rows]

# ---- Scoring ---------------------------------------------------------------------------------------------------------
def score_chunk(model, hidden, targets, temperature):
    """hidden [n, H], targets [n] -> log-probabilities [n] and entropies [n] (the latter without gradient)."""
    logprobs = model.logits(hidden, temperature).log_softmax(-1)  # [n, V]
    entropy = torch.special.entr(logprobs.detach().exp()).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy

def token_logprobs(model, contexts, completions, temperature=1.0, chunk=1024):
    """log pi(y_t | context, y_<t) of every completion token, at the temperature that they were sampled with.
    contexts, completions: B lists of ids, none empty. Returns two float32 tensors [N], N = all completion tokens,
    row after row: the log-probabilities (differentiable) and the entropies in nats (not). The logits are made `chunk`
    tokens at a time and again in backward: [N, V] in float32 never exists (16,384 tokens of Qwen: 10 GB, twice)."""
    if not contexts: return torch.zeros(0, device=model.device), torch.zeros(0, device=model.device)
    ids, positions = right_pad([x + y[:-1] for x, y in zip(contexts, completions)], model.device)
    hidden = model(ids, positions)  # [B, T, H]
    # y_t is predicted at the position before it: the context's last token predicts y_1
    rows = [row for row, y in enumerate(completions) for _ in y]
    where = [len(x) - 1 + t for x, y in zip(contexts, completions) for t in range(len(y))]
    hidden = hidden[torch.tensor(rows, device=model.device), torch.tensor(where, device=model.device)]  # [N, H]
    targets = torch.tensor([token for y in completions for token in y], device=model.device)
    pairs = zip(hidden.split(chunk), targets.split(chunk))
    parts = [checkpoint(score_chunk, model, h, y, temperature, use_reentrant=False) for h, y in pairs]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

# ---- Weights in and out: Hugging Face folders ------------------------------------------------------------------------
def read_weights(folder):
    """name -> tensor of a folder's safetensors, in one file or in several with an index."""
    index = read_json(folder, "model.safetensors.index.json", default={})
    weights = {}
    for name in sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]:
        try: weights |= load_file(os.path.join(folder, name))
        except FileNotFoundError: raise InputError(f"{folder} has no {name}") from None
        except SafetensorError as error: raise InputError(f"{os.path.join(folder, name)} is damaged: {error}") from None
    return weights

PLAIN_CHAT = (  # for base models, whose folders have no template
    "{{ bos_token }}{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}")

def hf_name(name):
    """The name in a Hugging Face file of one of our parameters.
    >>> hf_name("layers.0.mlp.up_proj.weight"), hf_name("lm_head.weight")
    ('model.layers.0.mlp.up_proj.weight', 'lm_head.weight')"""
    return name if name.startswith("lm_head") else "model." + name

def compute_dtype(device):
    """The dtype of weights for sampling and scoring: bfloat16 on a GPU, else float32 (see the table in train.py)."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32

def load(path, device="cpu", dtype=torch.float32):
    """Load (model, tokenizer) from a Hugging Face folder, or from a hub id, which is downloaded.
    Raises InputError when the folder, a file or a tensor is missing, left over or of the wrong shape."""
    from transformers import AutoTokenizer
    path = path if os.path.isdir(path) else download(path)
    hf = read_json(path, "config.json")
    model_config(hf)  # say what is unsupported before the slow parts
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_CHAT
    eos = read_json(path, "generation_config.json", default={}).get("eos_token_id", hf.get("eos_token_id"))
    stop_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if not stop_ids: raise InputError(f"{path} names no end-of-sequence token")
    with torch.device("meta"): model = Transformer(hf, stop_ids, len(tokenizer))
    weights = {k: v for k, v in read_weights(path).items() if not k.endswith("rotary_emb.inv_freq")}
    if model.config.tied: weights.pop("lm_head.weight", None)
    state = {}
    for name, parameter in model.named_parameters():
        tensor = weights.pop(hf_name(name), None)
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        right = tensor is not None and tensor.shape == parameter.shape
        require(right, f"{path}: {hf_name(name)} is {found}, expected is shape {list(parameter.shape)}")
        state[name] = tensor.to(device, dtype)
    left = f"{len(weights)} tensors that this architecture lacks, such as {min(weights, default='')}"
    require(not weights, f"{path} has {left}")
    model.load_state_dict(state, assign=True)
    return model, tokenizer

def download(name):
    """The local folder of a model on the Hugging Face hub."""
    from huggingface_hub import snapshot_download
    if name.startswith((".", "/")) or name.count("/") != 1:
        raise InputError(f"{name} is neither a model folder nor a hub id like Qwen/Qwen3-4B")
    try: return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
    except Exception as error:  # of dozens of types; all mean that there is no model to go on with
        raise InputError(f"{name} is no folder and cannot be downloaded: {str(error).splitlines()[0]}") from None

def save(model, tokenizer, path):
    """Write a Hugging Face folder, which load(), transformers and vLLM open."""
    os.makedirs(path, exist_ok=True)
    tensors = {hf_name(name): p.detach().cpu().clone() for name, p in model.named_parameters()}
    save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(path)
    settings = read_json(path, "tokenizer_config.json")
    if settings.get("tokenizer_class") == "TokenizersBackend":  # the name in transformers 5; 4 does not know it
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    hf = {k: v for k, v in model.hf.items() if k not in ("dtype", "torch_dtype")}
    hf["torch_dtype"] = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    files = {"config.json": hf, "generation_config.json": {"eos_token_id": model.stop_ids}}
    for name, content in (files | {"tokenizer_config.json": settings}).items():
        with open(os.path.join(path, name), "w", encoding="utf-8") as f: json.dump(content, f, indent=1)

# ---- The embedded model of the miniature pipelines -------------------------------------------------------------------
TINY_CHAT = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>{% endif %}")

def tiny_tokenizer(pieces):
    """A tokenizer whose tokens are the given pieces of text, longest match first; other text becomes <unk>.
    >>> tokenizer = tiny_tokenizer(["Tom", " has", " ", "1", "2", "print(", ")"])
    >>> tokenizer.convert_ids_to_tokens(tokenizer("Tom has 12 cows")["input_ids"])
    ['Tom', ' has', ' ', '1', '2', ' ', '<unk>']"""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>"]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *pieces])}, unk_token="<unk>"))
    pattern = "|".join(re.escape(p) for p in sorted(pieces, key=len, reverse=True))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>",
                                        unk_token="<unk>", additional_special_tokens=special[2:5])
    tokenizer.chat_template = TINY_CHAT
    return tokenizer

def tiny(pieces, seed=0, hidden_size=64, layers=3, heads=4, kv_heads=2):
    """A new, untrained (model, tokenizer) in Qwen3's layout, about 0.15M weights, for a vocabulary of text pieces."""
    tokenizer = tiny_tokenizer(pieces)
    hf = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=len(tokenizer),
        hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden_size // heads, max_position_embeddings=1024, rms_norm_eps=1e-6,
        rope_theta=100.0, tie_word_embeddings=True, hidden_act="silu", attention_bias=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = Transformer(hf, {tokenizer.eos_token_id}, len(tokenizer))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2: nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    return model, tokenizer
