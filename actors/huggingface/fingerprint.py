"""`model_fingerprint`: the fields of a transformers model that its KV depends on, and a checksum of its weights.

    words      | w0 | w1 | w2 | ...            a tensor's bits, as 64-bit integers, in chunks
    weights    | a0 | a1 | a2 | ...            odd, and of any two the difference divides by few powers of 2
    sums       sum a_i * w_i,  sum a_i * (w_i >> 32)         modulo 2**64, of each chunk

A change of one bit or one element changes the first sum, because an odd number times a nonzero difference is not 0. An
exchange of two elements changes one of the two sums. Integer sums are the same in any order and on any device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raydix.schemas import InvalidRequest, ModelFingerprint
from raydix.schemas.fingerprint import MAX_NAME, MAX_TEXT
from raydix.schemas.shown import brief

_CHUNK = 2**18  # words; the same on every device
_MOST_NAMES = 32  # members of a dictionary that count as fields
_MOST_CHUNKS = 32  # summed together on a GPU: two temporary tensors of 64 MiB
_WEIGHTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4E, 0x165667B19E3779F8)  # odd, even, even: see `_weights_on`

_COSMETIC = {  # fields of a configuration that do not affect KV
    *("architectures", "dtype", "torch_dtype", "name_or_path", "transformers_version", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_logits_to_keep"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("tokenizer_class", "prefix", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
    *("initializer_range", "initializer_factor", "chunk_size_feed_forward", "gradient_checkpointing"),
    *("embd_pdrop", "resid_pdrop", "attn_pdrop", "router_aux_loss_coef", "layerdrop"),
}


def model_fingerprint(model: Any) -> ModelFingerprint:
    """Return the fingerprint of a transformers model: its configuration, by name, and a checksum of all weights.

    The configuration is the text model's, with the model's type and dtype. It leaves out names, labels, end
    tokens and fields that only training uses. The checksum covers the bits of every parameter and buffer, and their
    names, dtypes and shapes. A changed bit or an exchange of two elements changes it. It leaves out the frequencies
    that a rotary embedding computes again for each length, and tensors that are not buffers.

    Each tensor is summed on its device, without a copy if it is contiguous. On a CPU of 2023 (AMD EPYC, one thread)
    this takes 0.2 s per GiB.

    Args:
        model: the model, with its weights loaded; a merged or injected adapter counts as weights.

    Raises:
        InvalidRequest: `model` is not a `torch.nn.Module` with a transformers configuration, or a tensor has no bits to
            read, such as one on the meta device.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "get_text_config"):
        raise InvalidRequest(f"model must be a transformers model with its config, not {type(model).__name__}")
    digest = hashlib.sha256()
    sums: dict[Any, bytes] = {}  # tied tensors are read once
    for name, tensor in weights_of(model):
        try:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in sums:
                sums[place] = _sums(tensor)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise InvalidRequest(
                f"model: {brief(name)} has no bits to read ({type(error).__name__}: {brief(str(error))}): load its "
                "weights as plain tensors, or pass a ModelFingerprint"
            ) from error
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + sums[place])
    return ModelFingerprint(fields=_fields_of(model), weights=digest.hexdigest()[:32])


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer by name, tied ones by each name; without tensors that each pass computes."""
    yield from model.named_parameters(remove_duplicate=False)
    passing = set(_passing_buffers(model))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in passing:
            yield name, buffer


def weights_version(model: torch.nn.Module) -> int:
    """Return a number that differs after a counted change of a weight in place, or after a new tensor.

    torch counts `load_state_dict`, optimizers and arithmetic, but no writes through `.data` or by other means.
    """
    return hash(
        tuple([(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for _, tensor in weights_of(model)])
    )


def _passing_buffers(model: torch.nn.Module) -> Iterator[str]:
    """Return the frequencies of rotary embeddings that vary with the length, and so depend on the last pass."""
    for path, module in model.named_modules(remove_duplicate=False):
        types = getattr(module, "rope_type", "")
        for layer_type, rope_type in types.items() if isinstance(types, dict) else (("", types),):
            if "dynamic" in str(rope_type) or rope_type == "longrope":
                yield ".".join(filter(None, (path, f"{layer_type}_inv_freq" if layer_type else "inv_freq")))


# ---------------------------------------------------------------- the configuration


def _fields_of(model: Any) -> dict[str, Any]:
    text = model.config.get_text_config(decoder=True)
    fields = {"model_type": text.model_type, "dtype": str(getattr(model, "dtype", None))}
    for name, value in _flat(text.to_dict()):
        fields.setdefault(name[:MAX_NAME], value)
    return fields


def _flat(values: dict[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of small dictionaries, with dotted names, and other values as JSON."""
    for key, value in values.items():
        name = f"{above}{key}"
        if name in _COSMETIC or name.startswith("_") or "dropout" in name:
            continue
        if isinstance(value, dict) and len(value) <= _MOST_NAMES:
            yield from _flat(value, f"{name}.")
        elif value is None or isinstance(value, (bool, int)):
            yield name, value
        elif isinstance(value, float) and value - value == 0:  # finite
            yield name, value
        else:
            yield name, _short(value if isinstance(value, str) else json.dumps(_normal(value)))


def _normal(value: Any) -> Any:
    """Return a value in the types of JSON; equal values give equal results for any order or type."""
    if isinstance(value, dict):
        return {str(key): _normal(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# ---------------------------------------------------------------- the weights


@torch.no_grad()
def _sums(tensor: torch.Tensor) -> bytes:
    """Return the two sums of each chunk of a tensor's bits, then the bytes after the last whole word."""
    if tensor.device.type == "meta":
        raise TypeError("it is on the meta device")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    num_whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words, weights = flat[:num_whole].view(torch.int64), _weights_on(tensor.device)
    add_up = _sums_on_cpu if tensor.device.type == "cpu" else _sums_of_rows
    num_full = len(words) // _CHUNK
    sums = [add_up(words[: num_full * _CHUNK].view(num_full, _CHUNK), weights)] if num_full else []
    if rest := len(words) - num_full * _CHUNK:
        sums.append(add_up(words[-rest:].view(1, rest), weights[:rest]))
    packed = torch.cat(sums).cpu().numpy().astype("<i8").tobytes() if sums else b""
    return packed + flat[num_whole:].cpu().numpy().tobytes()


def _sums_on_cpu(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return both sums of each row, `[rows, 2]`, row by row, so that each is read from memory once."""
    high = torch.empty_like(weights)
    sums = []
    for row in rows:
        torch.bitwise_right_shift(row, 32, out=high)
        sums += [torch.dot(row, weights), torch.dot(high, weights)]
    return torch.stack(sums).view(-1, 2)


def _sums_of_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the dot product; CUDA has none for integers."""
    some = (rows[first : first + _MOST_CHUNKS] for first in range(0, len(rows), _MOST_CHUNKS))
    return torch.cat([torch.stack([(part * weights).sum(1), ((part >> 32) * weights).sum(1)], 1) for part in some])


@lru_cache(maxsize=8)
def _weights_on(device: torch.device) -> torch.Tensor:
    """Return the weights of the words of a chunk: a polynomial of the odd numbers u = 1, 3, 5, ...

    Two weights differ by (u - v) * (a + b * (u + v) + c * (u*u + u*v + v*v)). The second factor is odd for odd a and
    even c. So the difference has as many powers of 2 as u - v, less than 2**19. Times the difference of two words, or
    of their higher halves, it is not 0 modulo 2**64.
    """
    a, b, c = (np.uint64(weight) for weight in _WEIGHTS)
    u = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return torch.from_numpy((u * (a + u * (b + u * c))).view(np.int64)).to(device)
