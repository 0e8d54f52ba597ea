"""A GGUF model loaded by llama.cpp: its weights, one context, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from brainpatch.backends.chat_template import render
from brainpatch.backends.llamacpp_library import Library, failed, open_library
from brainpatch.backends.sampling import Logits
from brainpatch.errors import EngineError

_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
_SPLITS = {"none": 0, "layer": 1, "row": 2}
_CONTEXT = 8192


@dataclass
class Settings:
    """What `load_model` takes beside the model.

    `n_gpu_layers` (-1: all), `main_gpu` and `split_mode` (none, layer, row) go to llama.cpp as they are.
    `n_ctx`: tokens that all running requests have together (None: the model's own, 8192 at most); `n_batch`: tokens
    of one step; `n_parallel`: requests that share a step. `n_threads` None: all cores. `flash_attn` None: llama.cpp
    chooses. `cache_type_k`, `cache_type_v`: f32, f16, bf16 or q8_0. `editing`: see `LlamaCppBackend`.
    """

    n_gpu_layers: int = 0
    main_gpu: int = 0
    split_mode: str = "layer"
    n_ctx: int | None = None
    n_batch: int = 512
    n_parallel: int = 16
    n_threads: int | None = None
    flash_attn: bool | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    editing: Literal["auto", "callback", "control-vector"] = "auto"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Settings from keywords. EngineError (BP507) names one that is unknown or out of range."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(arguments) - set(known))
        if unknown:
            raise EngineError("BP507", f"{unknown[0]} is not an argument here", f"Known: {', '.join(known)}.")
        made = cls(**arguments)
        choices = (
            ("split_mode", _SPLITS),
            ("cache_type_k", _TYPES),
            ("cache_type_v", _TYPES),
            ("editing", ("auto", "callback", "control-vector")),
        )
        for name, allowed in choices:
            if getattr(made, name) not in tuple(allowed):
                raise EngineError(
                    "BP507", f"{name} is {getattr(made, name)!r}", f"One of: {', '.join(allowed)}."
                )
        for name in ("n_ctx", "n_batch", "n_parallel", "n_threads"):
            value = getattr(made, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise EngineError("BP507", f"{name} is {value!r}, not a whole number from 1 on")
        return made


class GgufModel:
    """The weights and one context. Belongs to one thread, and must be closed."""

    def __init__(self, path: Path, settings: Settings, on_node: Any) -> None:
        """Load `path`. `on_node(address, ask) -> bool` is called for each node of a graph, or is None."""
        self.library: Library = open_library()
        ffi, c = self.library
        self._model = self._context = ffi.NULL
        self._batch: Any = None
        wish = c.llama_model_default_params()
        wish.n_gpu_layers = settings.n_gpu_layers
        wish.main_gpu = settings.main_gpu
        wish.split_mode = _SPLITS[settings.split_mode]
        self._model = c.llama_model_load_from_file(os.fsencode(path), wish)
        if self._model == ffi.NULL:
            raise EngineError("BP507", f"llama.cpp cannot load {path}")
        try:
            self._open_context(settings, on_node)
        except BaseException:
            self.close()
            raise

    def _open_context(self, settings: Settings, on_node: Any) -> None:
        ffi, c = self.library
        if c.llama_model_has_encoder(self._model) or not c.llama_model_has_decoder(self._model):
            raise EngineError("BP504", "the model has an encoder; only decoders are patched")
        trained = c.llama_model_n_ctx_train(self._model)
        wish = c.llama_context_default_params()
        wish.n_ctx = settings.n_ctx or min(trained, _CONTEXT)
        wish.n_seq_max = settings.n_parallel
        # One logical batch is one physical one, so that each step computes one graph, in the order of its rows.
        wish.n_batch = wish.n_ubatch = min(max(settings.n_batch, settings.n_parallel), wish.n_ctx)
        wish.kv_unified = True
        wish.n_threads = wish.n_threads_batch = settings.n_threads or os.cpu_count() or 1
        wish.type_k, wish.type_v = _TYPES[settings.cache_type_k], _TYPES[settings.cache_type_v]
        wish.flash_attn_type = -1 if settings.flash_attn is None else int(settings.flash_attn)
        if on_node is not None:
            self._callback = ffi.callback("bool(uintptr_t, bool, void *)", on_node)
            wish.cb_eval = self._callback
        self._context = c.llama_init_from_model(self._model, wish)
        if self._context == ffi.NULL:
            raise EngineError("BP507", f"llama.cpp cannot make a context of {wish.n_ctx} tokens")
        self.layers: int = c.llama_model_n_layer(self._model)
        self.width: int = c.llama_model_n_embd(self._model)
        # What such models keep of a sequence is not a row for each token: llama.cpp computes the sequences of a step
        # in an order of its own, and cannot drop a part of one.
        self.one_by_one: bool = c.llama_model_is_recurrent(self._model) or c.llama_model_is_hybrid(
            self._model
        )
        self.context_length: int = c.llama_n_ctx(self._context)
        self.step_size: int = wish.n_batch
        self.tokenizer = GgufTokenizer(self.library, self._model)
        self._memory = c.llama_get_memory(self._context)
        self._batch = c.llama_batch_init(self.step_size, 0, 1)

    @property
    def name(self) -> str:
        """The model's name in the file, or ''."""
        return self.metadata("general.name")

    def metadata(self, key: str) -> str:
        """A value of the file's metadata as text, or ''."""
        ffi, c = self.library
        buffer = ffi.new("char[]", 4096)
        size = c.llama_model_meta_val_str(self._model, key.encode(), buffer, 4096)
        return bytes(ffi.string(buffer)).decode("utf-8", "replace") if size >= 0 else ""

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One step: rows of (token, position, sequence, whether its logits are wanted)."""
        c, batch = self.library.c, self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = c.llama_decode(self._context, batch)
        c.llama_synchronize(self._context)
        if code:
            raise failed("llama_decode", code)

    def logits(self, row: int) -> Logits:
        """The logits of a row of the last step: float32 [vocabulary], good until the next step."""
        ffi, c = self.library
        size = len(self.tokenizer)
        address = c.llama_get_logits_ith(self._context, row)
        return np.frombuffer(ffi.buffer(address, 4 * size), dtype=np.float32)

    def forget(self, sequence: int, first: int = 0) -> bool:
        """Drop what is kept of a sequence from a position on; whether that could be done."""
        return bool(self.library.c.llama_memory_seq_rm(self._memory, sequence, first, -1))

    def forget_all(self, *, wipe: bool = False) -> None:
        """Drop what is kept of every sequence; `wipe`: and write zeros there."""
        self.library.c.llama_memory_clear(self._memory, wipe)

    def set_control_vector(self, rows: Any) -> None:
        """Add rows[L - 1] after each block L from 1 on, at every position: float32 [layers - 1, width], or None.

        All rows are given each time: llama.cpp keeps the old ones of what is left out.
        """
        ffi, c = self.library
        if rows is None:
            code = c.llama_set_adapter_cvec(self._context, ffi.NULL, 0, 0, 0, 0)
        else:
            code = c.llama_set_adapter_cvec(
                self._context,
                ffi.from_buffer("float[]", rows),
                rows.size,
                rows.shape[1],
                1,
                self.layers,
            )
        if code:
            raise failed("llama_set_adapter_cvec", code)

    def close(self) -> None:
        """Free everything. May be called more than once."""
        ffi, c = self.library
        if self._batch is not None:
            c.llama_batch_free(self._batch)
        if self._context != ffi.NULL:
            c.llama_free(self._context)
        if self._model != ffi.NULL:
            c.llama_model_free(self._model)
        self._context, self._model, self._batch = ffi.NULL, ffi.NULL, None


class GgufTokenizer:
    """The tokenizer inside a GGUF, with as much of a Hugging Face tokenizer's interface as `prompts` needs."""

    def __init__(self, library: Library, model: Any) -> None:
        self._library = library
        ffi, c = library
        self._vocab = c.llama_model_get_vocab(model)
        self._size: int = c.llama_vocab_n_tokens(self._vocab)
        template = c.llama_model_chat_template(model, ffi.NULL)
        self.chat_template: str = "" if template == ffi.NULL else ffi.string(template).decode("utf-8")
        bos = c.llama_vocab_bos(self._vocab)
        self.bos_token_id = None if bos < 0 else bos
        self._bos, self._eos = self._text(bos), self._text(c.llama_vocab_eos(self._vocab))
        self.end_ids = frozenset(
            token for token in range(self._size) if c.llama_vocab_is_eog(self._vocab, token)
        )

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids of a text, with the special tokens that the file says belong around it."""
        return {"input_ids": self._ids(text, add_special=True)}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        """The ids of a conversation; the template writes its special tokens itself."""
        text = render(self.chat_template, messages, bos=self._bos, eos=self._eos)
        return self._ids(text, add_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens; half a character becomes U+FFFD."""
        ffi, c = self._library
        size = 16 * len(ids) + 64
        while True:
            buffer = ffi.new("char[]", size)
            written = c.llama_detokenize(self._vocab, list(ids), len(ids), buffer, size, True, False)
            if written >= 0:
                return bytes(ffi.buffer(buffer, written)).decode("utf-8", "replace")
            size = -written

    def text(self, token: int) -> str:
        """What one token reads by itself, special ones included."""
        return self._text(token)

    def _text(self, token: int) -> str:
        ffi, c = self._library
        if token < 0:
            return ""
        buffer = ffi.new("char[]", 512)
        size = c.llama_token_to_piece(self._vocab, token, buffer, 512, 0, True)
        return bytes(ffi.buffer(buffer, max(size, 0))).decode("utf-8", "replace")

    def _ids(self, text: str, *, add_special: bool) -> list[int]:
        ffi, c = self._library
        raw = text.encode("utf-8", "replace")
        size = len(raw) + 8
        tokens = ffi.new("llama_token[]", size)
        count = c.llama_tokenize(self._vocab, raw, len(raw), tokens, size, add_special, True)
        if count < 0:
            raise failed("llama_tokenize", count)
        return list(tokens[0:count])
