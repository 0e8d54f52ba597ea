"""llama.cpp's C interface, called in the shared object of the package `xllamacpp`: no compiler is needed.

Structs are passed by value, so their layout must be that of the build: it is stated here for the builds of `KNOWN`
alone, and `open_library` compares the defaults that the build gives with those of its headers before anything else
is called. Tensors are handled as addresses, so their layout does not matter.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from brainpatch.errors import BackendNotAvailable, EngineError

KNOWN = ("2026.10.11549",)
"""Versions of `xllamacpp` whose structs are those below."""

_DECLARATIONS = """
typedef int32_t llama_token; typedef int32_t llama_pos; typedef int32_t llama_seq_id;
typedef bool (*eval_callback)(uintptr_t tensor, bool ask, void * user_data);
typedef void (*log_callback)(int level, const char * text, void * user_data);
typedef bool (*progress_callback)(float progress, void * user_data);

struct llama_model_params {
    void * devices; const void * tensor_buft_overrides;
    int32_t n_gpu_layers; int split_mode; int load_mode; int lazy_mode; int32_t main_gpu;
    const float * tensor_split;
    progress_callback progress_callback; void * progress_callback_user_data;
    const void * kv_overrides;
    bool vocab_only; bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; uint32_t n_rs_seq;
    uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq;
    int32_t n_threads; int32_t n_threads_batch;
    int ctx_type; int rope_scaling_type; int pooling_type; int attention_type; int flash_attn_type;
    float rope_freq_base; float rope_freq_scale;
    float yarn_ext_factor; float yarn_attn_factor; float yarn_beta_fast; float yarn_beta_slow;
    uint32_t yarn_orig_ctx; float defrag_thold;
    eval_callback cb_eval; void * cb_eval_user_data;
    int type_k; int type_v; size_t moe_cache_size;
    void * abort_callback; void * abort_callback_data;
    bool embeddings; bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; bool kv_unified;
    void * samplers; size_t n_samplers; void * ctx_other;
};
struct llama_batch {
    int32_t n_tokens;
    llama_token * token; float * embd; llama_pos * pos;
    int32_t * n_seq_id; llama_seq_id ** seq_id; int8_t * logits;
};

void llama_backend_init(void);
void llama_log_set(log_callback callback, void * user_data);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void * llama_model_load_from_file(const char * path, struct llama_model_params params);
void llama_model_free(void * model);
void * llama_init_from_model(void * model, struct llama_context_params params);
void llama_free(void * context);
const void * llama_model_get_vocab(const void * model);
int32_t llama_model_n_ctx_train(const void * model);
int32_t llama_model_n_embd(const void * model);
bool llama_model_is_recurrent(const void * model);
bool llama_model_is_hybrid(const void * model);
int32_t llama_model_n_layer(const void * model);
bool llama_model_has_encoder(const void * model);
bool llama_model_has_decoder(const void * model);
int32_t llama_model_meta_val_str(const void * model, const char * key, char * buffer, size_t size);
const char * llama_model_chat_template(const void * model, const char * name);
uint32_t llama_n_ctx(const void * context);
void * llama_get_memory(const void * context);
void llama_memory_clear(void * memory, bool data);
bool llama_memory_seq_rm(void * memory, llama_seq_id sequence, llama_pos first, llama_pos last);
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(void * context, struct llama_batch batch);
void llama_synchronize(void * context);
float * llama_get_logits_ith(void * context, int32_t i);
int32_t llama_set_adapter_cvec(
    void * context, const float * data, size_t len, int32_t n_embd, int32_t il_start, int32_t il_end);
int32_t llama_vocab_n_tokens(const void * vocab);
llama_token llama_vocab_bos(const void * vocab);
llama_token llama_vocab_eos(const void * vocab);
bool llama_vocab_is_eog(const void * vocab, llama_token token);
int32_t llama_tokenize(
    const void * vocab, const char * text, int32_t length, llama_token * tokens, int32_t n_max,
    bool add_special, bool parse_special);
int32_t llama_token_to_piece(
    const void * vocab, llama_token token, char * buffer, int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(
    const void * vocab, const llama_token * tokens, int32_t n_tokens, char * text, int32_t n_max,
    bool remove_special, bool unparse_special);
const char * ggml_get_name(uintptr_t tensor);
size_t ggml_nbytes(uintptr_t tensor);
void ggml_backend_tensor_get(uintptr_t tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_set(uintptr_t tensor, const void * data, size_t offset, size_t size);
"""

_MODEL_DEFAULTS = {"split_mode": 1, "main_gpu": 0, "vocab_only": False, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn_type": -1, "type_k": 1, "type_v": 1,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "swa_full": True, "kv_unified": False, "n_samplers": 0,
}  # fmt: skip
"""What llama.cpp's headers say of the builds in `KNOWN`."""

_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_log = logging.getLogger("brainpatch.llamacpp")


class Library(NamedTuple):
    """The C functions (`c`) and the cffi object (`ffi`) that makes C values."""

    ffi: Any
    c: Any


def availability() -> tuple[bool, str]:
    """Whether a build that is known is installed, and in words which, or what to do. Loads nothing."""
    needed = "pip install 'brainpatch[llamacpp]'"
    for module in ("xllamacpp", "cffi", "jinja2"):
        if importlib.util.find_spec(module) is None:
            return False, f"{module} is not installed: {needed}"
    try:
        found = version("xllamacpp")
    except PackageNotFoundError:
        return False, f"xllamacpp is there, but not as an installed package: {needed}"
    if found not in KNOWN:
        return False, f"xllamacpp {found} is not a build that is known: pip install xllamacpp=={KNOWN[-1]}"
    return True, f"llama.cpp in xllamacpp {found}"


@cache
def open_library() -> Library:
    """The library, loaded once in a process. Errors: BackendNotAvailable (BP501)."""
    there, detail = availability()
    if not there:
        raise BackendNotAvailable("BP501", f"llamacpp: {detail}")
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    try:
        c = ffi.dlopen(str(_shared_object()))
        _compare(c.llama_model_default_params(), _MODEL_DEFAULTS)
        _compare(c.llama_context_default_params(), _CONTEXT_DEFAULTS)
    except (OSError, AttributeError) as error:
        raise BackendNotAvailable(
            "BP501", f"llamacpp: {error}", f"pip install --force-reinstall xllamacpp=={KNOWN[-1]}"
        ) from None
    global _keep_log
    _keep_log = ffi.callback("void(int, const char *, void *)", _logged(ffi))
    c.llama_log_set(_keep_log, ffi.NULL)
    c.llama_backend_init()
    return Library(ffi, c)


_keep_log: Any = None
"""The C side holds no reference to a callback, so that one must stay here."""


def _shared_object() -> Path:
    spec = importlib.util.find_spec("xllamacpp")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    found = sorted(folder.glob("xllamacpp*.so")) or sorted(folder.glob("xllamacpp*.pyd"))
    if not found:
        raise OSError(f"no shared object in {folder}")
    return found[0]


def _compare(defaults: Any, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        found = getattr(defaults, name)
        if found != value:
            raise OSError(f"this build's structs are others: {name} is {found}, not {value}")


def _logged(ffi: Any) -> Any:
    def log(level: int, text: Any, _: Any) -> None:
        _log.log(
            _LEVELS.get(level, logging.DEBUG), "%s", ffi.string(text).decode("utf-8", "replace").rstrip()
        )

    return log


def failed(what: str, code: int) -> EngineError:
    """An error for a C function that returned `code`."""
    return EngineError("BP508", f"llama.cpp: {what} returned {code}")
