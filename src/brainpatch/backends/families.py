"""Where the decoder blocks of each model family are and what they return: the one place for both.

In transformers a block returns the residual stream as a tensor [rows, columns, width] ("tensor") or as the
first element of a tuple ("tuple"). In vLLM, where tokens are flat [tokens, width], it returns one of:

- SUM: (h, residual), and the stream is h + residual, added later inside the next norm;
- DONE: (h, residual), where h is the stream already and the second element is stale;
- NONE: (h, None), where h is the stream;
- ONE: one tensor, the stream;
- HFB: what the transformers block returns, since vLLM runs that block itself.

The engines confirm by a proof at load what the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from brainpatch.errors import EngineError

Form = Literal["tensor", "tuple"]
VllmForm = Literal["SUM", "DONE", "NONE", "ONE", "HFB"]


@dataclass(frozen=True)
class Family:
    """One model family.

    `paths`: where the block list is in transformers, the causal class first, then wrappers around it.
    `vllm_form` None: vLLM has no such family. `padded`: whether rows of different lengths may share a batch,
    padded on the left; recurrent blocks carry padding into their state, and attention that looks both ways
    within the prompt sees it. `refused`: why it cannot be patched.
    """

    model_type: str
    paths: tuple[str, ...] = ("model.layers",)
    form: Form = "tensor"
    vllm_form: VllmForm | None = "SUM"
    vllm_path: str = "model.layers"
    padded: bool = True
    refused: str | None = None


_WRAPPED = ("model.language_model.layers",)
_BOTH = ("model.layers", "model.language_model.layers")
_GPT = ("transformer.h",)
_STREAMS = "its blocks carry several residual streams at once, and an edit of one is not an edit of the sum"


def _wrapper(
    model_type: str, *paths: str, vllm_path: str = "language_model.model.layers", padded: bool = True
) -> Family:
    return Family(model_type, paths or _WRAPPED, vllm_path=vllm_path, padded=padded)


_TABLE: tuple[Family, ...] = (
    Family("apertus"),
    Family("bamba", form="tuple", vllm_form=None, padded=False),
    Family("bloom", _GPT, "tuple", "ONE", "transformer.h"),
    Family("codegen", _GPT, "tuple", None),
    Family("cohere", vllm_form="DONE"),
    Family("cohere2", vllm_form="DONE"),
    Family("dbrx", ("transformer.blocks",), vllm_form="ONE", vllm_path="transformer.blocks"),
    Family("deepseek_v2"),
    Family("deepseek_v3"),
    Family("deepseek_v4", refused=_STREAMS),
    Family("ernie4_5"),
    Family("exaone4", vllm_form="DONE"),
    Family("falcon", _GPT, "tuple", "ONE", "transformer.h"),
    Family("falcon_h1", form="tuple", vllm_form="ONE", padded=False),
    Family("falcon_mamba", ("backbone.layers",), vllm_path="backbone.layers", padded=False),
    Family("gemma"),
    Family("gemma2"),
    Family("gemma3_text", _BOTH, vllm_path="model.layers"),
    Family("gemma3n_text", _BOTH, refused=_STREAMS),
    Family("gemma4_text", _BOTH, vllm_form="NONE"),
    Family("glm", vllm_form="HFB"),
    Family("glm4"),
    Family("glm4_moe"),
    Family("gpt2", _GPT, vllm_form="ONE", vllm_path="transformer.h"),
    Family("gpt_bigcode", _GPT, vllm_form="HFB", vllm_path="transformer.h"),
    Family("gpt_neo", _GPT, "tuple", None),
    Family("gpt_neox", ("gpt_neox.layers",), vllm_form="HFB", vllm_path="model.layers"),
    Family("gpt_oss"),
    Family("gptj", _GPT, "tuple", "ONE", "transformer.h"),
    Family("granite", vllm_form="ONE"),
    Family("granitemoe", vllm_form="ONE"),
    Family("granitemoehybrid", vllm_form="DONE", padded=False),
    Family("jamba", padded=False),
    Family("lfm2", padded=False),
    Family("llama"),
    Family("llama4_text", ("model.layers", "language_model.model.layers")),
    Family("mamba", ("backbone.layers",), vllm_path="backbone.layers", padded=False),
    Family("mamba2", ("backbone.layers",), vllm_path="backbone.layers", padded=False),
    Family("minimax", vllm_form=None, padded=False),
    Family("ministral3"),
    Family("mistral", _BOTH),
    Family("mixtral"),
    Family("mpt", ("transformer.blocks",), "tuple", None),
    Family("nemotron"),
    Family("nemotron_h", ("model.layers", "backbone.layers"), padded=False),
    Family("olmo", vllm_form="HFB"),
    Family("olmo2", vllm_form="HFB"),
    Family("olmo3", vllm_form="HFB"),
    Family("olmoe"),
    Family("opt", ("model.decoder.layers",), vllm_form="ONE", vllm_path="model.decoder.layers"),
    Family("persimmon", vllm_form=None),
    Family("phi", vllm_form="HFB"),
    Family("phi3"),
    Family("phimoe", vllm_form="DONE"),
    Family("qwen2", _BOTH),
    Family("qwen2_moe"),
    Family("qwen3", _BOTH),
    Family("qwen3_moe"),
    Family("qwen3_next", padded=False),
    Family("qwen3_5_text", _BOTH, padded=False),
    Family("recurrent_gemma", vllm_form=None, padded=False),
    Family("seed_oss", vllm_form="HFB"),
    Family("smollm3", vllm_form="HFB"),
    Family("stablelm", vllm_form="DONE"),
    Family("starcoder2", vllm_form="HFB"),
    Family("xglm", vllm_form=None),
    Family("zamba2", vllm_form="ONE", padded=False),
    # Text models that exist inside their wrapper alone.
    Family("glm4v_text", _WRAPPED),
    Family("qwen2_5_vl_text", _WRAPPED),
    Family("qwen2_vl_text", _WRAPPED),
    Family("qwen3_vl_text", _WRAPPED),
    # Wrappers around a text model: images or audio beside it. Their text family's form holds.
    _wrapper("cohere2_vision"),
    _wrapper("gemma3"),
    _wrapper("gemma4"),
    _wrapper("glm4v"),
    _wrapper("idefics3", "model.text_model.layers", vllm_path="model.text_model.layers"),
    _wrapper("internvl"),
    _wrapper("llama4", "language_model.model.layers", "model.layers"),
    _wrapper("llava"),
    _wrapper("mistral3"),
    _wrapper("paligemma", padded=False),
    _wrapper("qwen2_5_vl"),
    _wrapper("qwen2_vl"),
    _wrapper("qwen3_5", "model.language_model.layers", "model.layers", padded=False),
    _wrapper("qwen3_vl"),
    _wrapper("smolvlm", "model.text_model.layers", vllm_path="model.text_model.layers"),
    Family("gemma3n", _WRAPPED, refused=_STREAMS),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _TABLE}
"""model_type of a config -> family."""

_USUAL_PATHS = (
    "model.language_model.layers",
    "language_model.model.layers",
    "model.text_model.layers",
    "model.layers",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
    "model.decoder.layers",
    "backbone.layers",
    "transformer.encoder.layers",
    "model.h",
)
"""Where a family that is not in the table may keep its blocks. Wrappers first: an image tower may hold a list
of a usual name as well."""

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def register(family: Family) -> None:
    """Make a family known, or replace what is known of it.

    For example `register(Family("my_model", paths=("model.my_blocks",)))`.
    """
    FAMILIES[family.model_type] = family


def text_config(config: Any) -> Any:
    """The config of the text model, which a wrapper holds nested."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def families_of(config: Any) -> tuple[Family, ...]:
    """What is known of a config: the wrapper's family, where it is one, before the text model's."""
    types = dict.fromkeys((config.model_type, text_config(config).model_type))
    return tuple(FAMILIES[name] for name in types if name in FAMILIES)


def block_count(config: Any) -> int:
    """How many decoder blocks a config states. EngineError (BP503) when it states none."""
    text = text_config(config)
    for name in _COUNTS:
        if isinstance(value := getattr(text, name, None), int):
            return value
    if kinds := getattr(text, "layers_block_type", None):
        return len(kinds)
    raise EngineError("BP503", f"the config of {text.model_type} states no number of blocks")


def context_length(config: Any) -> int | None:
    """How many positions the model has, or None when it has no bound."""
    text = text_config(config)
    for name in _CONTEXTS:
        if isinstance(value := getattr(text, name, None), int):
            return value
    return None


def can_be_padded(config: Any) -> bool:
    """Whether rows of different lengths may share a batch.

    A text model that is not in the table is taken for one that cannot: that costs time, and the other mistake
    would cost right answers without a word.
    """
    return text_config(config).model_type in FAMILIES and all(f.padded for f in families_of(config))


def refuse_unfit(config: Any) -> None:
    """Refuse by name what cannot be patched. EngineError (BP504)."""
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(
            "BP504", f"{config.model_type} has an encoder and a decoder; only decoders are patched"
        )
    for family in families_of(config):
        if family.refused:
            raise EngineError("BP504", f"{family.model_type}: {family.refused}")


def find_blocks(model: Any, config: Any, *, vllm: bool = False) -> tuple[str, Any]:
    """The path of the block list in a loaded model, and the list.

    Looked for where the family keeps it, then at the usual places; a list counts when it has as many entries
    as the config states blocks. EngineError (BP503) names what was looked for and every list that was found.
    """
    from torch.nn import ModuleList

    refuse_unfit(config)
    count = block_count(config)
    lists: Mapping[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, ModuleList)
    }
    known = families_of(config)
    own = [family.vllm_path for family in known] if vllm else [path for f in known for path in f.paths]
    tried = list(dict.fromkeys((*own, *_USUAL_PATHS)))
    for path in tried:
        if path in lists and len(lists[path]) == count:
            return path, lists[path]
    found = ", ".join(f"{name} ({len(blocks)} entries)" for name, blocks in lists.items())
    raise EngineError(
        "BP503",
        f"{config.model_type}: looked for {count} blocks at {', '.join(tried)}; lists found: {found or 'none'}",
        "Tell where they are: brainpatch.backends.families.register("
        f'Family("{config.model_type}", paths=("...",), vllm_path="...")).',
    )


def markdown_table() -> str:
    """The page docs/engines/families.md."""
    rows = [
        f"| `{family.model_type}` | {' or '.join(f'`{path}`' for path in family.paths)} | {family.form} "
        f"| {family.vllm_form or 'not there'} | {'yes' if family.padded else 'equal lengths only'} "
        f"| {'no: ' + family.refused if family.refused else 'yes'} |"
        for family in sorted(FAMILIES.values(), key=lambda family: family.model_type)
    ]
    return "\n".join(
        (
            "# Model families",
            "",
            "<!-- made by tools/generate_docs.py from brainpatch.backends.families: do not edit -->",
            "",
            "Where each family keeps its decoder blocks in transformers, what a block returns there and in",
            "vLLM (see [vLLM](vllm.md) for the forms), whether rows of different lengths share a batch, and",
            "whether it can be patched. The engines confirm it by a proof at load. `tests/backends` runs every",
            "family that is not refused on Transformers, small and with random weights; `tests/engines/vllm`",
            "runs each form.",
            "",
            "Encoder-decoder models are refused. A family that is not listed is looked for at the usual places,",
            "and only rows of equal length share a batch. Register it to say where its blocks are, and that it",
            'can be padded: `families.register(Family("name", paths=("a.b",)))`.',
            "",
            "| family | blocks | returns | in vLLM | padded batches | patched |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )
